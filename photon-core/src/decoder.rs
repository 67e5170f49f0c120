//! Down one level: a conditioning vector per chunk unfolds into one vector for each unit of the chunk, emitted
//! before that unit is seen.
//!
//! A *group* is the prefix of a chunk and the chunk's units. With C = 2 and R = 2, and `H` read out below the
//! position that emits it (a chunk-local decoder; others also run the last unit, as later groups see it):
//!
//! ```text
//! positions   p0  p1  u0 |  p0  p1  u2 | ...
//! emits           H0  H1 |      H2  H3 | ...
//! ```
//!
//! `H_i` is for unit i. The conditioning of the first group is a start latent or the vector that the level above
//! emitted for this very chunk; nothing here shifts.

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::cache::row_store::indices;
use crate::config::{DecoderAttention, PhotonConfig};
use crate::converter::Converter;
use crate::documents::Documents;
use crate::infer_config::StageCache;
use crate::init::Initializer;
use crate::nn::activations::Activations;
use crate::nn::stack::{Stack, StackState};

/// Converter and local transformer of one level.
#[derive(Module, Debug)]
pub struct Decoder {
    /// From one vector to the prefix of a chunk.
    pub converter: Converter,
    pub(crate) stack: Stack,
    chunk_len: usize,
    prefix_len: usize,
    group_len: usize,
    is_chunk_local: bool,
}

/// What a level's decoder carries from call to call.
#[derive(Clone, Debug)]
pub struct DecoderState {
    /// The transformer's.
    pub(crate) stack: StackState,
}

/// Which of the emitted vectors a caller needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// One for each new unit.
    All,
    /// The newest; a chunk-local decoder then skips all groups but the newest.
    Newest,
}

/// New units and the conditioning of the groups that start with them.
pub struct DecoderInput {
    /// `[b, n, D_below]`; absent at the very start of a sequence.
    pub units: Option<Tensor<3>>,
    /// `[b, g, D]`, one for each group that starts; absent where none does.
    pub conditioning: Option<Tensor<3>>,
}

/// One position of a call: the vector it reads and where it stands in the stream of groups.
struct Slot {
    source: Source,
    position: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Unit(usize),
    Prefix { group: usize, offset: usize },
}

impl Decoder {
    /// Fresh weights for `level` (1-based).
    pub fn new(config: &PhotonConfig, level: usize, init: &mut Initializer) -> Self {
        let level_config = &config.levels[level - 1];
        Self {
            converter: Converter::new(config, level, init),
            stack: Stack::new(config.decoder_spec(level), init),
            chunk_len: level_config.chunk_len,
            prefix_len: level_config.converter.prefix_len,
            group_len: config.group_len(level),
            is_chunk_local: level_config.decoder.attention == DecoderAttention::Chunk,
        }
    }

    /// What is emitted for every unit of whole sequences, behind the prefixes of their chunks; `documents` in chunks.
    ///
    /// # Shapes
    ///
    /// `prefixes: [B, G·R, D_below]`, `units: [B, G·C, D_below] -> [B, G·C, D_below]`
    pub fn forward(&self, prefixes: Tensor<3>, units: Tensor<3>, documents: &Documents) -> Tensor<3> {
        const IN_GROUP: usize = 2;
        let [batch, n_units, d_below] = units.dims();
        let (n_groups, n_fed) = (n_units / self.chunk_len, self.group_len - self.prefix_len);
        let prefixes = prefixes.reshape([batch, n_groups, self.prefix_len, d_below]);
        let groups = match n_fed {
            0 => prefixes,
            _ => {
                let units = units.reshape([batch, n_groups, self.chunk_len, d_below]);
                Tensor::cat(vec![prefixes, units.narrow(IN_GROUP, 0, n_fed)], IN_GROUP)
            }
        }; // [B, G, S, D]
        let groups = groups.reshape([batch, n_groups * self.group_len, d_below]);
        let out = self.stack.forward(groups, &documents.in_groups(self.group_len));
        let out = out.reshape([batch, n_groups, self.group_len, d_below]);
        out.narrow(IN_GROUP, self.prefix_len - 1, self.chunk_len).reshape([batch, n_units, d_below]) // [B, G*C, D]
    }

    /// Takes up new units and the conditioning of new groups; returns what is emitted for the units after them.
    ///
    /// `n_before` counts the units that each row had taken up before. Rows of one call need equal work: the same
    /// groups start after the same new units.
    ///
    /// # Shapes
    ///
    /// `-> [b, n, D_below]` (`[b, 1, D_below]` at the start, or when only the newest is wanted)
    pub fn extend(
        &self,
        state: &mut DecoderState,
        rows: &[usize],
        n_before: &[usize],
        input: DecoderInput,
        wanted: Wanted,
    ) -> Tensor<3> {
        let n_new = input.units.as_ref().map_or(0, |units| units.dims()[1]);
        let mut plans: Vec<Vec<Slot>> = n_before.iter().map(|&n| self.plan(n, n_new)).collect();
        if wanted == Wanted::Newest && self.is_chunk_local {
            plans.iter_mut().for_each(drop_earlier_groups);
        }
        let sources: Vec<Source> = plans[0].iter().map(|slot| slot.source).collect();
        assert!(
            plans.iter().all(|plan| plan.iter().map(|slot| slot.source).eq(sources.iter().copied())),
            "rows of one call need equal work"
        );
        let positions: Vec<Vec<usize>> =
            plans.iter().map(|plan| plan.iter().map(|slot| slot.position).collect()).collect();

        let x = self.gather(input, &sources); // [b, N, D]
        let device = x.device();
        let out = self.stack.step(x, &mut state.stack, rows, &positions); // [b, N, D]
        let readouts = match wanted {
            Wanted::Newest => vec![sources.len() - 1],
            Wanted::All => self.readouts(&sources),
        };
        match readouts.len() == sources.len() {
            true => out,
            false => out.select(1, indices(&readouts, &device)),
        }
    }

    /// The state before any unit.
    pub fn start(&self, n_rows: usize, cache: &StageCache, activations: Activations, device: &Device) -> DecoderState {
        DecoderState { stack: self.stack.start(n_rows, &cache.config, cache.n_newest, activations, device) }
    }

    /// Whether groups never see each other.
    pub fn is_chunk_local(&self) -> bool {
        self.is_chunk_local
    }

    /// The positions that `n_new` units after `n_before` bring, in order.
    fn plan(&self, n_before: usize, n_new: usize) -> Vec<Slot> {
        let prefix = |stream_group: usize, group: usize| {
            (0..self.prefix_len).map(move |offset| Slot {
                source: Source::Prefix { group, offset },
                position: stream_group * self.group_len + offset,
            })
        };
        if n_new == 0 {
            return prefix(0, 0).collect();
        }
        let mut slots = Vec::new();
        let mut n_started = 0;
        for index in 0..n_new {
            let (group, in_chunk) = ((n_before + index) / self.chunk_len, (n_before + index) % self.chunk_len);
            let completes = in_chunk + 1 == self.chunk_len;
            if !(completes && self.is_chunk_local) {
                let position = group * self.group_len + self.prefix_len + in_chunk;
                slots.push(Slot { source: Source::Unit(index), position });
            }
            if completes {
                slots.extend(prefix(group + 1, n_started));
                n_started += 1;
            }
        }
        slots
    }

    /// Which slots emit, one for each new unit: the end of a prefix, and a unit that is not the last of its chunk.
    /// A chunk-local decoder never runs a last unit, so there every unit emits.
    fn readouts(&self, sources: &[Source]) -> Vec<usize> {
        let emits = |index: usize| match sources[index] {
            Source::Prefix { offset, .. } => offset + 1 == self.prefix_len,
            Source::Unit(_) if self.is_chunk_local => true,
            Source::Unit(_) => !matches!(sources.get(index + 1), Some(Source::Prefix { .. })),
        };
        (0..sources.len()).filter(|&index| emits(index)).collect()
    }

    /// The vectors that the slots read: `[b, N, D]`.
    fn gather(&self, input: DecoderInput, sources: &[Source]) -> Tensor<3> {
        let n_units = input.units.as_ref().map_or(0, |units| units.dims()[1]);
        let prefix = input.conditioning.map(|conditioning| self.converter.forward(conditioning)); // [b, g*R, D]
        // A caller who wants the newest only may hand over the conditioning of the newest group only.
        let n_prefix = prefix.as_ref().map_or(0, |prefix| prefix.dims()[1]);
        let n_groups_started = sources.iter().fold(0, |n, source| match source {
            Source::Prefix { group, .. } => n.max(group + 1),
            Source::Unit(_) => n,
        });
        let n_missing = n_groups_started * self.prefix_len - n_prefix;
        assert!(n_missing == 0 || n_prefix == self.prefix_len, "conditioning for all new groups, or for the newest");
        let order: Vec<usize> = sources
            .iter()
            .map(|source| match *source {
                Source::Unit(index) => index,
                Source::Prefix { group, offset } => n_units + group * self.prefix_len + offset - n_missing,
            })
            .collect();

        let parts: Vec<Tensor<3>> = input.units.into_iter().chain(prefix).collect();
        let available = Tensor::cat(parts, 1); // [b, n + g*R, D]
        let is_identity = order.len() == available.dims()[1] && order.iter().enumerate().all(|(i, &x)| i == x);
        match is_identity {
            true => available,
            false => {
                let device = available.device();
                available.select(1, indices(&order, &device))
            }
        }
    }
}

impl DecoderState {
    /// Keeps the given rows, in the given order.
    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        self.stack.select_rows(rows);
    }
}

/// Starts the plan at the newest prefix, if it has one.
fn drop_earlier_groups(plan: &mut Vec<Slot>) {
    let is_start = |slot: &Slot| matches!(slot.source, Source::Prefix { offset: 0, .. });
    if let Some(start) = plan.iter().rposition(is_start) {
        plan.drain(..start);
    }
}
