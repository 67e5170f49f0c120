//! Entries that several continuations of one prompt share: written once, never changed, never copied.

use burn::tensor::Tensor;
use burn::tensor::kind::Numeric;

use super::entries::{Entries, Packed, Segment};

const SEQ: usize = 2;

/// Entries of one row, which every row of a batch reads.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    /// One row: `[1, H, E, K]`.
    segment: Segment,
}

impl Shared {
    /// Copies of what a row shared before, if it did, and of its own entries.
    pub(super) fn new(earlier: Option<Segment>, own: Segment) -> Self {
        let keys = join(earlier.as_ref().map(|earlier| earlier.keys.clone()), own.keys);
        let values = join(earlier.map(|earlier| earlier.values), own.values);
        Self { segment: Segment { keys, values } }
    }

    /// Entries of one row, taken over as they are: they must not be a view of a store that goes on changing.
    pub(super) fn from_own(segment: Segment) -> Self {
        Self { segment }
    }

    pub(super) fn n_entries(&self) -> usize {
        self.segment.keys.dims()[SEQ]
    }

    pub(super) fn bytes(&self) -> usize {
        self.segment.keys.bytes() + self.segment.values.bytes()
    }

    /// The first `n_entries`, for each of `n_rows` rows.
    pub(super) fn read(&self, n_rows: usize, n_entries: usize) -> Segment {
        let Segment { keys, values } = self.segment.clone();
        Segment { keys: view(keys, n_rows, n_entries), values: view(values, n_rows, n_entries) }
    }
}

fn view(entries: Entries, n_rows: usize, n_entries: usize) -> Entries {
    fn part<N: Numeric>(x: Tensor<4, N>, n_rows: usize, n_entries: usize) -> Tensor<4, N> {
        let [_, n_heads, _, width] = x.dims();
        x.narrow(SEQ, 0, n_entries).expand([n_rows, n_heads, n_entries, width])
    }
    match entries {
        Entries::Dense(x) => Entries::Dense(part(x, n_rows, n_entries)),
        Entries::Packed(Packed { codes, params, packing }) => Entries::Packed(Packed {
            codes: part(codes, n_rows, n_entries),
            params: part(params, n_rows, n_entries),
            packing,
        }),
    }
}

fn join(earlier: Option<Entries>, own: Entries) -> Entries {
    match (earlier, own) {
        (Some(Entries::Dense(earlier)), Entries::Dense(own)) => Entries::Dense(Tensor::cat(vec![earlier, own], SEQ)),
        (Some(Entries::Packed(earlier)), Entries::Packed(own)) => Entries::Packed(Packed {
            codes: Tensor::cat(vec![earlier.codes, own.codes], SEQ),
            params: Tensor::cat(vec![earlier.params, own.params], SEQ),
            packing: own.packing,
        }),
        (None, Entries::Dense(own)) => Entries::Dense(copy(own)),
        (None, Entries::Packed(own)) => {
            Entries::Packed(Packed { codes: copy(own.codes), params: copy(own.params), packing: own.packing })
        }
        _ => panic!("a cache stores in one format"),
    }
}

/// A copy that does not hold on to the store that `x` is a view of.
fn copy<N: Numeric>(x: Tensor<4, N>) -> Tensor<4, N> {
    let [_, n_heads, n_entries, width] = x.dims();
    let target = Tensor::zeros([1, n_heads, n_entries, width], (&x.device(), x.dtype()));
    target.slice_assign([0..1, 0..n_heads, 0..n_entries, 0..width], x)
}
