//! Stored entries on the CPU backend, head by head, as 32-bit numbers.

use burn::tensor::{DType, bf16, f16};

use super::entries::{Code, Entries, Packed, Packing};
use super::flex::Lines;
use super::half_float::Stored;

/// Entries whose storage can be read.
pub(super) enum OpenEntries {
    /// Numbers.
    Dense {
        /// `[b, H, E, K]`
        numbers: Lines,
        /// `K`
        head_dim: usize,
    },
    /// Codes, with parameters in f16.
    Packed {
        /// `[b, 1, E, W]`
        codes: Lines,
        /// `[b, 1, E, P]`
        params: Lines,
        /// How to read them.
        packing: Packing,
    },
}

/// Whether [`OpenEntries::new`] is there for these entries of the CPU backend.
pub(super) fn are_readable(entries: &Entries) -> bool {
    match entries {
        Entries::Dense(numbers) => matches!(numbers.dtype(), DType::F32 | DType::F16 | DType::BF16),
        Entries::Packed(Packed { params, .. }) => params.dtype() == DType::F16,
    }
}

impl OpenEntries {
    /// Opens entries.
    ///
    /// # Panics
    ///
    /// If they are on another backend.
    pub(super) fn new(entries: Entries) -> Self {
        let [.., head_dim] = entries.dims();
        match entries {
            Entries::Dense(numbers) => Self::Dense { numbers: Lines::floats(numbers.inner()), head_dim },
            Entries::Packed(Packed { codes, params, packing }) => {
                Self::Packed { codes: Lines::words(codes), params: Lines::floats(params.inner()), packing }
            }
        }
    }

    /// Whether entries are codes.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed { .. })
    }

    /// Heads side by side in a row of the batch, if they are packed.
    pub(super) fn packed_heads(&self, row: usize, first_head: usize, n_heads: usize) -> Option<PackedHeads<'_>> {
        match self {
            Self::Dense { .. } => None,
            Self::Packed { codes, params, packing } => {
                Some(PackedHeads::new(codes, params, *packing, row, first_head, n_heads))
            }
        }
    }

    /// What is stored for a head in a row of the batch.
    pub(super) fn head(&self, row: usize, head: usize) -> Head<'_> {
        match self {
            Self::Dense { numbers, head_dim } => {
                let place = Place { start: numbers.start(row, head), stride: numbers.line_stride(), len: *head_dim };
                let tensor = numbers.tensor();
                match tensor.dtype() {
                    DType::F16 => Head::F16(tensor.storage(), place),
                    DType::BF16 => Head::BF16(tensor.storage(), place),
                    _ => Head::F32(tensor.storage(), place),
                }
            }
            Self::Packed { codes, params, packing } => {
                Head::Packed(PackedHeads::new(codes, params, *packing, row, head, 1))
            }
        }
    }
}

impl<'a> PackedHeads<'a> {
    fn new(
        codes: &'a Lines,
        params: &'a Lines,
        packing: Packing,
        row: usize,
        first_head: usize,
        n_heads: usize,
    ) -> Self {
        let place = |lines: &Lines, len: usize| Place {
            start: lines.start(row, 0) + first_head * len,
            stride: lines.line_stride(),
            len: n_heads * len,
        };
        Self {
            n_heads,
            packing,
            bytes: codes.tensor().bytes(),
            byte_place: place(codes, packing.words_per_head()).in_bytes(),
            params: params.tensor().storage(),
            param_place: place(params, packing.params_per_head()),
        }
    }

    /// Numbers that share a scale.
    #[inline(always)]
    pub(super) fn group(&self) -> usize {
        self.packing.group
    }

    /// Codes of an entry, those that fill up the last word of each head included.
    #[inline(always)]
    pub(super) fn width(&self) -> usize {
        self.n_heads * self.codes_per_head()
    }

    #[inline(always)]
    pub(super) fn groups_per_head(&self) -> usize {
        self.packing.head_dim / self.group()
    }

    /// Where the codes of a group start among those of an entry.
    #[inline(always)]
    pub(super) fn first_code(&self, head: usize, group: usize) -> usize {
        head * self.codes_per_head() + group * self.group()
    }

    /// Scale and minimum of a group.
    #[inline(always)]
    pub(super) fn params(&self, entry: usize, head: usize, group: usize) -> (f32, f32) {
        let params = self.param_place.line(self.params, entry);
        let index = head * self.groups_per_head() + group;
        match self.packing.code {
            Code::Int8 => (params[index].widen(), 0.0),
            Code::Int4 => (params[2 * index].widen(), params[2 * index + 1].widen()),
        }
    }

    /// Writes the codes of entries from `first` on as numbers, as many entries as `codes` holds.
    #[inline(always)]
    pub(super) fn widen(&self, first: usize, codes: &mut [f32]) {
        for (index, codes) in codes.chunks_exact_mut(self.width()).enumerate() {
            let bytes = self.byte_place.line(self.bytes, first + index);
            match self.packing.code {
                Code::Int8 => {
                    for (x, code) in codes.iter_mut().zip(bytes) {
                        *x = f32::from(code.cast_signed());
                    }
                }
                Code::Int4 => split_bytes(bytes, codes),
            }
        }
    }

    /// Writes the numbers of an entry of a single head.
    #[inline(always)]
    fn read_entry(self, entry: usize, numbers: &mut [f32]) {
        let bytes = self.byte_place.line(self.bytes, entry);
        let params = self.param_place.line(self.params, entry);
        let group = self.group();
        // Counting on spares the division by which zipped chunks find their number.
        let mut start = 0;
        match self.packing.code {
            Code::Int8 => {
                for scale in params {
                    let (numbers, codes) = (&mut numbers[start..][..group], &bytes[start..][..group]);
                    let scale = scale.widen();
                    for (x, code) in numbers.iter_mut().zip(codes) {
                        *x = f32::from(code.cast_signed()) * scale;
                    }
                    start += group;
                }
            }
            Code::Int4 => {
                split_bytes(bytes, numbers);
                for [scale, minimum] in params.as_chunks().0 {
                    let (scale, minimum) = (scale.widen(), minimum.widen());
                    for x in &mut numbers[start..][..group] {
                        *x = *x * scale + minimum;
                    }
                    start += group;
                }
            }
        }
    }

    #[inline(always)]
    fn codes_per_head(&self) -> usize {
        self.packing.words_per_head() * self.packing.code.per_word()
    }
}

/// What one head stores in one row of a batch.
#[derive(Clone, Copy)]
pub(super) enum Head<'a> {
    F32(&'a [f32], Place),
    F16(&'a [f16], Place),
    BF16(&'a [bf16], Place),
    /// A single one.
    Packed(PackedHeads<'a>),
}

/// Codes and parameters of heads that lie side by side.
#[derive(Clone, Copy)]
pub(super) struct PackedHeads<'a> {
    pub(super) n_heads: usize,
    packing: Packing,
    bytes: &'a [u8],
    byte_place: Place,
    params: &'a [f16],
    param_place: Place,
}

/// Where the lines of a head lie in a storage: one for each entry.
#[derive(Clone, Copy)]
pub(super) struct Place {
    start: usize,
    stride: usize,
    len: usize,
}

impl Place {
    #[inline(always)]
    fn line<T>(self, storage: &[T], entry: usize) -> &[T] {
        &storage[self.start + entry * self.stride..][..self.len]
    }

    /// The same place, of 32-bit words, in the bytes of the storage.
    fn in_bytes(self) -> Self {
        const WORD: usize = 4;
        Self { start: WORD * self.start, stride: WORD * self.stride, len: WORD * self.len }
    }
}

/// Lines of numbers, one for each entry of a stretch.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    numbers: &'a [f32],
    stride: usize,
    head_dim: usize,
}

impl<'a> Block<'a> {
    /// Lines of `head_dim` numbers, one every `stride`.
    #[inline(always)]
    pub(super) fn new(numbers: &'a [f32], stride: usize, head_dim: usize) -> Self {
        Self { numbers, stride, head_dim }
    }

    /// The numbers of the entry that is `index`th in the stretch.
    #[inline(always)]
    pub(super) fn line(self, index: usize) -> &'a [f32] {
        &self.numbers[index * self.stride..][..self.head_dim]
    }

    /// Those of four entries. Written out: what hides behind a closure is not always compiled for the widest vectors.
    #[inline(always)]
    pub(super) fn lines(self, first: usize) -> [&'a [f32]; 4] {
        [self.line(first), self.line(first + 1), self.line(first + 2), self.line(first + 3)]
    }
}

impl<'a> Head<'a> {
    /// Numbers of an entry.
    pub(super) fn head_dim(&self) -> usize {
        match self {
            Self::F32(_, place) | Self::F16(_, place) | Self::BF16(_, place) => place.len,
            Self::Packed(packed) => packed.packing.head_dim,
        }
    }

    /// The numbers of `n` entries from `first` on, where they lie if they are 32-bit numbers, else in `scratch`.
    #[inline(always)]
    pub(super) fn block(&self, first: usize, n: usize, scratch: &'a mut [f32]) -> Block<'a> {
        let head_dim = self.head_dim();
        if let Self::F32(storage, place) = self {
            return Block::new(&storage[place.start + first * place.stride..], place.stride, head_dim);
        }
        self.read(first, &mut scratch[..n * head_dim]);
        Block::new(scratch, head_dim, head_dim)
    }

    /// Writes the numbers of entries from `first` on, as many as `numbers` holds.
    #[inline(always)]
    pub(super) fn read(&self, first: usize, numbers: &mut [f32]) {
        match *self {
            Self::F32(storage, place) => read_dense(storage, place, first, numbers),
            Self::F16(storage, place) => read_dense(storage, place, first, numbers),
            Self::BF16(storage, place) => read_dense(storage, place, first, numbers),
            Self::Packed(packed) => {
                for (index, numbers) in numbers.chunks_exact_mut(packed.packing.head_dim).enumerate() {
                    packed.read_entry(first + index, numbers);
                }
            }
        }
    }
}

#[inline(always)]
fn read_dense<T: Stored>(storage: &[T], place: Place, first: usize, numbers: &mut [f32]) {
    for (index, numbers) in numbers.chunks_exact_mut(place.len).enumerate() {
        for (x, stored) in numbers.iter_mut().zip(place.line(storage, first + index)) {
            *x = stored.widen();
        }
    }
}

/// Codes of four bits as numbers, those in the lower halves of bytes first.
#[inline(always)]
fn split_bytes(bytes: &[u8], codes: &mut [f32]) {
    let (words, _) = bytes.as_chunks::<4>();
    let (eights, rest) = codes.as_chunks_mut::<8>();
    for (codes, word) in eights.iter_mut().zip(words) {
        let word = u32::from_le_bytes(*word);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (4 * i) & 15) as f32;
        }
    }
    let rest_bytes = &bytes[eights.len() * 4..];
    for (i, code) in rest.iter_mut().enumerate() {
        *code = f32::from(rest_bytes[i / 2] >> (4 * (i % 2)) & 15);
    }
}
