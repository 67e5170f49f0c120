//! Who may not see whom within the sequences of a call: masks for devices without a kernel that asks the span.

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::cache::kv_cache::MASKED;
use crate::config::StackSpec;
use crate::documents::Documents;
use crate::nn::block_pick::DocumentBlocks;
use crate::nn::fused::has_kernels;
use crate::nn::span::Span;

/// How often, in multiples of the sequence, the lasting keys of a strided span may be copied.
const COPIES_OF_LASTING: usize = 4;

/// Who may not see whom: zeros, and [`MASKED`] where a query must not look.
#[derive(Clone, Debug)]
pub enum SequenceMask {
    /// The device has a kernel that asks the span and the documents.
    Kernel(Documents),
    /// `[B or 1, 1, N, N]`; where blocks are picked, what is seen whatever is picked.
    AllPairs(Tensor<4>),
    /// Blocks are picked within documents.
    Picked(Box<DocumentBlocks>),
    /// Block by block.
    Blocks(BlocksMask),
}

impl SequenceMask {
    /// The same for tensors without gradients.
    pub fn inner(self) -> Self {
        match self {
            Self::Kernel(documents) => Self::Kernel(documents),
            Self::AllPairs(mask) => Self::AllPairs(mask.inner()),
            Self::Picked(blocks) => Self::Picked(Box::new(blocks.inner())),
            Self::Blocks(blocks) => Self::Blocks(BlocksMask { mask: blocks.mask.inner(), ..blocks }),
        }
    }
}

/// What blocks of queries meet.
#[derive(Clone, Debug)]
pub struct BlocksMask {
    /// Positions in a block.
    pub(super) len: usize,
    /// Blocks before the own one whose keys it meets.
    pub(super) back: usize,
    /// Keys that it meets besides, wherever they are in its row: `n_lasting` for each row, counted through all rows.
    pub(super) lasting: Vec<usize>,
    /// Of each row; where a row has fewer, any key fills its place and is masked.
    pub(super) n_lasting: usize,
    /// `[B * n_blocks, 1, len, (back + 1) * len + n_lasting]`.
    pub(super) mask: Tensor<4>,
}

/// The mask of sequences of `n_positions` in the stack of `spec`, one for each row of `documents`.
pub fn sequence_mask(spec: &StackSpec, documents: &Documents, n_positions: usize, device: &Device) -> SequenceMask {
    if let Some(pick) = spec.pick {
        return match documents.are_whole_rows() {
            true => SequenceMask::AllPairs(pick.fixed_mask(&[(0..n_positions).collect()], n_positions, device)),
            false => SequenceMask::Picked(Box::new(DocumentBlocks::new(pick, documents, n_positions, device))),
        };
    }
    // Attention over positions is in f32, whatever the products with weights are in.
    if has_kernels(device, DType::F32) {
        return SequenceMask::Kernel(documents.clone());
    }
    blocks_mask(spec.span, documents, n_positions, device)
}

/// The mask for devices without a kernel.
pub(super) fn blocks_mask(span: Span, documents: &Documents, n_positions: usize, device: &Device) -> SequenceMask {
    let n_blocks = |len: usize| n_positions.div_ceil(len);
    let lasting = lasting_keys(span, documents, n_positions);
    let n_lasting = lasting.iter().map(Vec::len).max().unwrap_or(0);
    let (len, back, near) = match span {
        Span::Window { len } => (len, 1, span),
        Span::Blocks { len, back } if documents.start_at_multiples_of(len) => (len, back.min(n_blocks(len) - 1), span),
        Span::Full | Span::Blocks { .. } => {
            return SequenceMask::AllPairs(all_pairs_mask(span, documents, n_positions, device));
        }
        // Every block takes a copy of the keys that last: blocks grow with their number, so that the copies do not.
        Span::Strided { window, .. } => (window.max(n_lasting / COPIES_OF_LASTING), 1, Span::Window { len: window }),
    };
    let n_blocks = n_blocks(len);
    if n_blocks == 1 {
        return SequenceMask::AllPairs(all_pairs_mask(span, documents, n_positions, device));
    }
    let (n_near, n_rows) = ((back + 1) * len, documents.n_rows());
    let (n_keys, n_masks) = (n_near + n_lasting, n_masks(documents));
    let mut values = Vec::with_capacity(n_masks * n_blocks * len * n_keys);
    for (row, lasting) in lasting.iter().enumerate().take(n_masks) {
        for query in 0..n_blocks * len {
            let start = documents.start_of(row, query);
            let sees = |span: Span, key: usize| key >= start && span.sees(query - start, key - start);
            values.extend((0..n_near).map(|slot| {
                let key = (query / len * len + slot).checked_sub(back * len);
                if key.is_some_and(|key| sees(near, key)) { 0.0 } else { MASKED }
            }));
            // What is near has been met already.
            let is_far = |&key: &usize| sees(span, key) && !sees(near, key);
            values.extend((0..n_lasting).map(|slot| if lasting.get(slot).is_some_and(is_far) { 0.0 } else { MASKED }));
        }
    }
    let mask = Tensor::<4>::from_data(TensorData::new(values, [n_masks, n_blocks, len, n_keys]), device);
    let mask = mask.expand([n_rows, n_blocks, len, n_keys]).reshape([n_rows * n_blocks, 1, len, n_keys]);
    let through_all_rows = |(row, keys): (usize, Vec<usize>)| {
        (0..n_lasting).map(move |slot| row * n_positions + keys.get(slot).copied().unwrap_or(0))
    };
    let lasting = lasting.into_iter().enumerate().flat_map(through_all_rows).collect();
    SequenceMask::Blocks(BlocksMask { len, back, lasting, n_lasting, mask })
}

/// The keys of each row that all later queries of their document see, where a span leaves others out in between.
fn lasting_keys(span: Span, documents: &Documents, n_positions: usize) -> Vec<Vec<usize>> {
    let of_row = |row| {
        let places = documents
            .of_row(row, n_positions)
            .flat_map(|document| document.clone().map(move |key| (document.start, key)));
        places.filter(|(start, key)| span.is_lasting(key - start)).map(|(_, key)| key).collect()
    };
    match span {
        Span::Strided { .. } => (0..documents.n_rows()).map(of_row).collect(),
        _ => vec![Vec::new(); documents.n_rows()],
    }
}

/// All pairs: `[B or 1, 1, N, N]`.
pub(super) fn all_pairs_mask(span: Span, documents: &Documents, n_positions: usize, device: &Device) -> Tensor<4> {
    pairs_mask(documents, n_positions, device, |query, key| span.sees(query, key))
}

/// The mask of a rule on places within a document: `[B or 1, 1, N, N]`.
pub(crate) fn pairs_mask(
    documents: &Documents,
    n_positions: usize,
    device: &Device,
    sees: impl Fn(usize, usize) -> bool,
) -> Tensor<4> {
    let n_masks = n_masks(documents);
    let mut values = Vec::with_capacity(n_masks * n_positions * n_positions);
    for (row, query) in (0..n_masks).flat_map(|row| (0..n_positions).map(move |query| (row, query))) {
        let start = documents.start_of(row, query);
        let sees = |key: usize| key >= start && sees(query - start, key - start);
        values.extend((0..n_positions).map(|key| if sees(key) { 0.0 } else { MASKED }));
    }
    Tensor::from_data(TensorData::new(values, [n_masks, 1, n_positions, n_positions]), device)
}

/// One mask serves all rows where they are one document each.
fn n_masks(documents: &Documents) -> usize {
    if documents.are_whole_rows() { 1 } else { documents.n_rows() }
}
