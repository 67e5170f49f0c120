//! The formats of cache entries, and tensors of entries in those formats.
//!
//! An entry is what one position leaves in a cache for all kv heads: its keys, or its values. A packed entry is one line
//! of 32-bit words, the codes of its heads one after another, and one line of parameters that give the codes their
//! meaning. Numbers that share parameters, a group, lie side by side along the head dimension.

use burn::tensor::{DType, Device, Int, Tensor};

/// How entries are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryFormat {
    /// Numbers of 32 bits.
    F32,
    /// Numbers of 16 bits: 11 significant ones, up to 65504.
    F16,
    /// Numbers of 16 bits: 8 significant ones, with the range of `F32`.
    BF16,
    /// See [`Code::Int8`].
    Int8 {
        /// Numbers along the head dimension that share a scale.
        group: usize,
    },
    /// See [`Code::Int4`].
    Int4 {
        /// Numbers along the head dimension that share a scale and a minimum.
        group: usize,
    },
}

/// What a code says about its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `code * scale`, codes from -127 to 127 in two's complement, four to a word. A group's parameter is the scale.
    Int8,
    /// `minimum + code * scale`, codes from 0 to 15, eight to a word. A group's parameters are scale and minimum.
    Int4,
}

/// The layout of packed entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// What a code says.
    pub code: Code,
    /// Numbers that share parameters.
    pub group: usize,
    /// Heads of an entry.
    pub n_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
}

/// What tensors entries of a format lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Numbers of this type.
    Dense(DType),
    /// Codes and parameters.
    Packed(Packing),
}

/// Packed entries of a batch.
#[derive(Clone, Debug)]
pub struct Packed {
    /// 32-bit words `[b, 1, E, W]`. Code `i` of a head stands in its word `i / n`, `n` codes to a word, the first in the
    /// lowest bits; the last word of a head is filled up with zeros.
    pub codes: Tensor<4, Int>,
    /// `[b, 1, E, P]`: the parameters of the groups one after another, in f16, or in f32 where the device has no f16.
    pub params: Tensor<4>,
    /// How to read them.
    pub packing: Packing,
}

/// Entries as stored.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are few of them, each with far more memory behind it")]
pub enum Entries {
    /// `[b, H, E, K]` in f32, f16 or bf16.
    Dense(Tensor<4>),
    /// Codes and parameters.
    Packed(Packed),
}

/// Keys and values of the same entries, each in a format of its own.
#[derive(Clone, Debug)]
pub struct Segment {
    /// What queries are compared with.
    pub keys: Entries,
    /// What is weighed and summed.
    pub values: Entries,
}

impl EntryFormat {
    /// The same format with a group that fits: the largest divisor of `head_dim` that is no larger than the group wished.
    pub fn with_group_for(self, head_dim: usize) -> Self {
        let largest_fitting = |wished: usize| {
            let candidates = 1..=wished.min(head_dim);
            candidates.rev().find(|&group| head_dim.is_multiple_of(group)).unwrap_or(1)
        };
        match self {
            Self::Int8 { group } => Self::Int8 { group: largest_fitting(group) },
            Self::Int4 { group } => Self::Int4 { group: largest_fitting(group) },
            dense => dense,
        }
    }

    /// Bytes of one entry of `n_heads` heads, keys or values, on a device that has f16.
    pub fn entry_bytes(self, n_heads: usize, head_dim: usize) -> usize {
        match self.layout(n_heads, head_dim) {
            Layout::Packed(packing) => packing.n_words() * 4 + packing.n_params() * 2,
            Layout::Dense(dtype) => n_heads * head_dim * dtype.size(),
        }
    }

    /// The tensors of entries.
    ///
    /// # Panics
    ///
    /// If the group does not divide `head_dim`; see [`EntryFormat::with_group_for`].
    pub fn layout(self, n_heads: usize, head_dim: usize) -> Layout {
        let (code, group) = match self {
            Self::F32 => return Layout::Dense(DType::F32),
            Self::F16 => return Layout::Dense(DType::F16),
            Self::BF16 => return Layout::Dense(DType::BF16),
            Self::Int8 { group } => (Code::Int8, group),
            Self::Int4 { group } => (Code::Int4, group),
        };
        assert!(head_dim.is_multiple_of(group), "groups of {group} do not fill a head of {head_dim}");
        Layout::Packed(Packing { code, group, n_heads, head_dim })
    }
}

impl Code {
    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::Int8 => 8,
            Self::Int4 => 4,
        }
    }

    /// Codes in a word.
    pub const fn per_word(self) -> usize {
        32 / self.bits()
    }

    /// Parameters of a group.
    pub const fn n_params(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Int4 => 2,
        }
    }
}

impl Packing {
    /// Groups of a head.
    pub fn groups_per_head(&self) -> usize {
        self.head_dim / self.group
    }

    /// Words of a head.
    pub fn words_per_head(&self) -> usize {
        self.head_dim.div_ceil(self.code.per_word())
    }

    /// Words of an entry.
    pub fn n_words(&self) -> usize {
        self.n_heads * self.words_per_head()
    }

    /// Parameters of a head.
    pub fn params_per_head(&self) -> usize {
        self.groups_per_head() * self.code.n_params()
    }

    /// Parameters of an entry.
    pub fn n_params(&self) -> usize {
        self.n_heads * self.params_per_head()
    }
}

/// How a device stores the parameters of packed entries: in two bytes where it can.
pub(super) fn params_dtype(device: &Device) -> DType {
    match device.supports_dtype(DType::F16) {
        true => DType::F16,
        false => DType::F32,
    }
}

impl Entries {
    /// `[b, H, E, K]`, whatever the format.
    pub fn dims(&self) -> [usize; 4] {
        match self {
            Self::Dense(numbers) => numbers.dims(),
            Self::Packed(Packed { codes, packing, .. }) => {
                let [batch, _, n_entries, _] = codes.dims();
                [batch, packing.n_heads, n_entries, packing.head_dim]
            }
        }
    }

    /// Bytes of the numbers, or of the codes and parameters.
    pub fn bytes(&self) -> usize {
        let float_bytes = |x: &Tensor<4>| x.shape().num_elements() * x.dtype().size();
        match self {
            Self::Dense(numbers) => float_bytes(numbers),
            Self::Packed(Packed { codes, params, .. }) => {
                codes.shape().num_elements() * codes.dtype().size() + float_bytes(params)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_adapts_to_the_head_dimension() {
        let fitting = |head_dim, wished| match (EntryFormat::Int4 { group: wished }).with_group_for(head_dim) {
            EntryFormat::Int4 { group } => group,
            other => panic!("{other:?}"),
        };
        assert_eq!(fitting(64, 64), 64);
        assert_eq!(fitting(128, 64), 64);
        assert_eq!(fitting(52, 64), 52);
        assert_eq!(fitting(52, 32), 26);
        assert_eq!(fitting(40, 32), 20);
        assert_eq!(fitting(53, 32), 1);
        assert_eq!(EntryFormat::F16.with_group_for(52), EntryFormat::F16);
    }

    #[test]
    fn bytes_of_an_entry() {
        let bytes = |format: EntryFormat, head_dim| format.with_group_for(head_dim).entry_bytes(1, head_dim);
        assert_eq!(bytes(EntryFormat::F32, 64), 256);
        assert_eq!(bytes(EntryFormat::F16, 64), 128);
        assert_eq!(bytes(EntryFormat::Int8 { group: 64 }, 64), 66);
        assert_eq!(bytes(EntryFormat::Int4 { group: 64 }, 64), 36);
        assert_eq!(bytes(EntryFormat::Int4 { group: 64 }, 52), 7 * 4 + 4);
        assert_eq!(bytes(EntryFormat::Int4 { group: 32 }, 128), 64 + 16);
    }
}
