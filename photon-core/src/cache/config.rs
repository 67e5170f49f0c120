//! How the caches of one stack store their entries, and which they keep.

use std::fmt;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::entries::EntryFormat;
use super::offload::Offload;
use super::policy::PolicyConfig;

/// The caches of one stack: every layer has one of this kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheConfig {
    /// How keys are stored.
    pub keys: Storage,
    /// How values are stored.
    pub values: Storage,
    /// Numbers along the head dimension that share a scale: the largest divisor of the head dimension up to this.
    pub group: usize,
    /// Newest entries that stay in f32 while older ones are stored as `keys` and `values` say. With 0 every entry is
    /// stored so from the start.
    pub residual: usize,
    /// Entries leave the residual and the cache in blocks of this many positions, counted from the start of the
    /// sequence: so a result does not depend on how a prompt is cut.
    pub block: usize,
    /// Which entries are kept.
    pub policy: PolicyConfig,
    /// What a lack of memory may lower the budget of the policy to. Absent: it is never lowered.
    pub floor: Option<Budget>,
    /// The lightest storage that a lack of memory may turn to.
    pub lightest: Storage,
    /// Host memory for blocks outside the window, where attention picks blocks by their scores. Absent: all entries
    /// stay on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<Offload>,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            keys: Storage::F32,
            values: Storage::F32,
            group: 64,
            residual: 0,
            block: 16,
            policy: PolicyConfig::Full,
            floor: None,
            lightest: Storage::Int4,
            offload: None,
        }
    }
}

/// How numbers are stored, heaviest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// Four bytes, exact.
    F32,
    /// Two bytes, eleven significant bits.
    F16,
    /// Two bytes, eight significant bits, the range of f32.
    Bf16,
    /// One byte, and a scale per group.
    Int8,
    /// Half a byte, and a scale and a minimum per group.
    Int4,
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

/// The most exact entries, entries of a block, and blocks brought back from host memory: room for them is taken at
/// once, so a damaged snapshot must not ask for any number.
pub const MAX_ROOM: usize = 1 << 16;

impl CacheConfig {
    /// The key and value of the first number beyond [`MAX_ROOM`], if there is one.
    pub(crate) fn beyond_room(&self) -> Option<(&'static str, usize)> {
        let resident_blocks = self.offload.map_or(0, |offload| offload.resident_blocks);
        let rooms = [("residual", self.residual), ("block", self.block), ("offload.resident_blocks", resident_blocks)];
        rooms.into_iter().find(|&(_, room)| room > MAX_ROOM)
    }

    /// Bytes of one entry, key and value, of a layer.
    pub fn entry_bytes(&self, n_kv_heads: usize, head_dim: usize) -> usize {
        let bytes = |storage: Storage| storage.format(self.group, head_dim).entry_bytes(n_kv_heads, head_dim);
        bytes(self.keys) + bytes(self.values)
    }
}

impl Storage {
    /// All of them, heaviest first.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Int8, Self::Int4];

    /// The format of entries whose heads have `head_dim` numbers, of which at most `group` share a scale.
    pub fn format(self, group: usize, head_dim: usize) -> EntryFormat {
        let format = match self {
            Self::F32 => EntryFormat::F32,
            Self::F16 => EntryFormat::F16,
            Self::Bf16 => EntryFormat::BF16,
            Self::Int8 => EntryFormat::Int8 { group },
            Self::Int4 => EntryFormat::Int4 { group },
        };
        format.with_group_for(head_dim)
    }

    /// The numbers that a device must know to hold such entries; codes lie in words, which all know.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
            Self::Int8 | Self::Int4 => None,
        }
    }

    /// The next lighter storage that takes less room.
    pub fn lighter(self) -> Option<Self> {
        match self {
            Self::F32 => Some(Self::F16),
            Self::F16 | Self::Bf16 => Some(Self::Int8),
            Self::Int8 => Some(Self::Int4),
            Self::Int4 => None,
        }
    }
}

/// How much a cache may keep, for each row and layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Budget {
    /// Entries.
    Entries(usize),
    /// Bytes of keys and values as they are stored.
    Bytes(usize),
    /// A share of the positions seen, between 0 and 1.
    Share(f64),
}

impl Budget {
    /// Entries that may be kept after `n_seen` positions, where one takes `entry_bytes`.
    pub fn entries(self, n_seen: usize, entry_bytes: usize) -> usize {
        match self {
            Self::Entries(entries) => entries,
            Self::Bytes(bytes) => bytes / entry_bytes,
            Self::Share(share) => (share * n_seen as f64).ceil() as usize,
        }
    }

    /// Half of it, but no less than `floor`; `None` where the floor is reached or of another unit.
    pub fn lowered(self, floor: Self) -> Option<Self> {
        match (self, floor) {
            (Self::Entries(n), Self::Entries(floor)) if n > floor => Some(Self::Entries((n / 2).max(floor))),
            (Self::Bytes(n), Self::Bytes(floor)) if n > floor => Some(Self::Bytes((n / 2).max(floor))),
            (Self::Share(share), Self::Share(floor)) if share > floor => Some(Self::Share((share / 2.0).max(floor))),
            _ => None,
        }
    }

    /// Why it cannot be, if it cannot.
    pub(crate) fn fault(self) -> Option<&'static str> {
        match self {
            Self::Entries(0) | Self::Bytes(0) => Some("must be at least 1"),
            Self::Share(share) if !(share > 0.0 && share <= 1.0) => Some("a share lies above 0 and is at most 1"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_lowered_step_by_step_to_their_floor() {
        let floor = Budget::Share(0.1);
        let steps: Vec<Budget> = std::iter::successors(Some(Budget::Share(0.5)), |b| b.lowered(floor)).collect();
        assert_eq!(steps, [0.5, 0.25, 0.125, 0.1].map(Budget::Share));
        assert_eq!(Budget::Entries(8).lowered(Budget::Entries(8)), None);
        assert_eq!(Budget::Entries(8).lowered(floor), None, "of another unit");
        assert_eq!(Budget::Bytes(1000).entries(5, 36), 27);
        assert_eq!(Budget::Share(0.2).entries(11, 36), 3);
    }

    #[test]
    fn each_lighter_storage_takes_less() {
        let steps: Vec<Storage> = std::iter::successors(Some(Storage::F32), |s| s.lighter()).collect();
        assert_eq!(steps, [Storage::F32, Storage::F16, Storage::Int8, Storage::Int4]);
    }

    #[test]
    fn a_storage_is_called_as_configs_call_it() {
        for storage in Storage::ALL {
            assert_eq!(serde_json::to_value(storage).unwrap(), storage.to_string());
        }
    }
}
