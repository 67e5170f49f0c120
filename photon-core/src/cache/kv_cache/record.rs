//! A cache as plain data and named tensors, for snapshots on disk.

use burn::tensor::{DType, TensorData};
use serde::{Deserialize, Serialize};

use super::*;
use crate::cache::entries::{Entries, EntryFormat, Layout, Packed, params_dtype};
use crate::cache::offload::TierRecord;
use crate::snapshot::Tensors;

/// What of a cache is no tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CacheRecord {
    config: CacheConfig,
    rows: Vec<CachedRow>,
    counters: Counters,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tier: Option<TierRecord>,
}

impl KvCache {
    /// The cache as data; its tensors are added to `tensors` under `name`.
    pub(crate) fn record(&self, name: &str, tensors: &mut Tensors) -> CacheRecord {
        let rows = self.all_rows();
        let columns = self.columns(&rows);
        let parts = [
            ("shared", self.shared.as_ref().map(|shared| shared.read(1, shared.n_entries()))),
            ("main", (columns.main.end > 0).then(|| self.main.read(&rows, 0, columns.main.end))),
            ("tail", self.tail.as_ref().filter(|_| columns.n_tail > 0).map(|tail| tail.read(&rows, 0, columns.n_tail))),
        ];
        for (part, segment) in parts {
            let Some(Segment { keys, values }) = segment else { continue };
            record_entries(&format!("{name}.{part}.keys"), keys, tensors);
            record_entries(&format!("{name}.{part}.values"), values, tensors);
        }
        let tier = self.tier.as_ref().map(|tier| tier.record(&format!("{name}.host"), tensors));
        CacheRecord { config: self.config.clone(), rows: self.rows.clone(), counters: self.counters, tier }
    }

    /// Becomes what was recorded.
    ///
    /// # Errors
    ///
    /// What of the record cannot be, or what tensor is missing or of another shape.
    pub(crate) fn restore(&mut self, record: CacheRecord, name: &str, tensors: &mut Tensors) -> Result<(), String> {
        let CacheRecord { config, rows, counters, tier } = record;
        if rows.len() != self.rows.len() {
            return Err(format!("{name} has {} rows, expected {}", rows.len(), self.rows.len()));
        }
        let is_ranked = config.policy.ranking().is_some();
        if let Some(row) = rows.iter().position(|row| !row.is_consistent(is_ranked)) {
            return Err(format!("{name}: the entries of row {row} contradict each other"));
        }
        if config.group == 0 || config.block == 0 || config.beyond_room().is_some() {
            return Err(format!("{name}: {config:?} cannot be"));
        }
        if let (Some(offload), pick) = (config.offload, self.layer.pick)
            && pick.is_none_or(|pick| offload.resident_blocks < pick.top)
        {
            return Err(format!("{name}: {offload:?} does not fit this model"));
        }
        let mut cache = Self::new(&config, self.layer, rows.len(), &self.device);
        (cache.rows, cache.counters) = (rows, counters);
        let all = cache.all_rows();
        let columns = cache.columns(&all);
        let mut take = |part: &str, n_rows: usize, n_entries: usize, formats: [EntryFormat; 2]| {
            let mut entries = |kind: &str, format: EntryFormat| {
                let dims = [n_rows, cache.layer.n_kv_heads, n_entries, cache.layer.head_dim];
                take_entries(&format!("{name}.{part}.{kind}"), format, dims, tensors, &cache.device)
            };
            Ok::<_, String>(Segment { keys: entries("keys", formats[0])?, values: entries("values", formats[1])? })
        };
        let stored = cache.layer.formats(&config);
        let shared = match columns.n_shared {
            0 => None,
            n_shared => Some(take("shared", 1, n_shared, stored)?),
        };
        let main = match columns.main.end {
            0 => None,
            end => Some(take("main", all.len(), end, stored)?),
        };
        let tail = match columns.n_tail {
            0 => None,
            n_tail => Some(take("tail", all.len(), n_tail, [EntryFormat::F32; 2])?),
        };
        cache.shared = shared.map(Shared::from_own);
        if let Some(main) = main {
            if columns.main.end > cache.main.capacity() {
                cache.main.resize(0, columns.main.end);
            }
            cache.main.write_segment(&all, &vec![0; all.len()], main);
        }
        match (&mut cache.tail, tail) {
            (Some(store), Some(tail)) if columns.n_tail <= store.capacity() => {
                store.write_segment(&all, &vec![0; all.len()], tail)
            }
            (_, None) => {}
            _ => return Err(format!("{name}: more exact entries than its residual window holds")),
        }
        cache.restore_tier(tier, name, tensors)?;
        *self = cache;
        Ok(())
    }
}

fn record_entries(name: &str, entries: Entries, tensors: &mut Tensors) {
    match entries {
        Entries::Dense(numbers) => drop(tensors.insert(name.into(), numbers.into_data())),
        Entries::Packed(Packed { codes, params, .. }) => {
            tensors.insert(format!("{name}.codes"), codes.into_data());
            tensors.insert(format!("{name}.params"), params.into_data());
        }
    }
}

/// Entries `[b, H, E, K]` in `format`.
fn take_entries(
    name: &str,
    format: EntryFormat,
    [n_rows, n_heads, n_entries, head_dim]: [usize; 4],
    tensors: &mut Tensors,
    device: &Device,
) -> Result<Entries, String> {
    let mut take = |name: &str, shape: [usize; 4], dtypes: &[DType]| -> Result<TensorData, String> {
        let data = tensors.remove(name).ok_or(format!("{name} is missing"))?;
        match data.shape().to_vec() == shape && dtypes.contains(&data.dtype()) {
            true => Ok(data),
            false => Err(format!("{name} is {:?} {:?}, expected {dtypes:?} {shape:?}", data.dtype(), data.shape())),
        }
    };
    Ok(match format.layout(n_heads, head_dim) {
        Layout::Packed(packing) => {
            let codes = take(&format!("{name}.codes"), [n_rows, 1, n_entries, packing.n_words()], &[DType::I32])?;
            let params = [n_rows, 1, n_entries, packing.n_params()];
            let params = take(&format!("{name}.params"), params, &[DType::F16, DType::F32])?;
            Entries::Packed(Packed {
                codes: Tensor::from_data(codes, (device, DType::I32)),
                // A device without f16 keeps them in f32, wherever they come from.
                params: Tensor::from_data(params, (device, params_dtype(device))),
                packing,
            })
        }
        Layout::Dense(dtype) => {
            let numbers = take(name, [n_rows, n_heads, n_entries, head_dim], &[dtype])?;
            Entries::Dense(Tensor::from_data(numbers, (device, dtype)))
        }
    })
}
