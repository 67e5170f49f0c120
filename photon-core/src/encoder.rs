//! Up one level: chunks of the level below become latents that have seen everything before them.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use crate::cache::row_store::RowStore;
use crate::chunker::Chunker;
use crate::config::PhotonConfig;
use crate::documents::Documents;
use crate::infer_config::StageCache;
use crate::init::Initializer;
use crate::nn::activations::Activations;
use crate::nn::stack::{Stack, StackState};

/// Chunker and causal transformer of one level.
#[derive(Module, Debug)]
pub struct Encoder {
    /// From the units of a chunk to one vector.
    pub chunker: Chunker,
    pub(crate) stack: Stack,
    chunk_len: usize,
    d_unit: usize,
}

/// What a level's encoder carries from call to call.
#[derive(Clone, Debug)]
pub struct EncoderState {
    /// The units of the unfinished chunk, `[B, 1, C, D_in]`.
    pub(crate) unfinished: RowStore,
    /// The transformer's; without caches once an advance rule has done without it.
    pub(crate) stack: StackState,
}

impl Encoder {
    /// Fresh weights for `level` (1-based).
    pub fn new(config: &PhotonConfig, level: usize, init: &mut Initializer) -> Self {
        Self {
            chunker: Chunker::new(config, level, init),
            stack: Stack::new(config.encoder_spec(level), init),
            chunk_len: config.levels[level - 1].chunk_len,
            d_unit: config.chunker_input_width(level),
        }
    }

    /// Latents of whole chunks, from the start of the sequence, of what the chunker made of them; `documents` in chunks.
    ///
    /// # Shapes
    ///
    /// `[B, M, D] -> [B, M, D]`
    pub fn forward(&self, chunks: Tensor<3>, documents: &Documents) -> Tensor<3> {
        self.stack.forward(chunks, documents)
    }

    /// Takes up new units of the level below; returns the latents of the chunks that they complete, if any.
    ///
    /// `n_before` counts the units that each row had taken up before. Rows whose chunk completes in this call
    /// must all be at the same place in it.
    ///
    /// # Shapes
    ///
    /// `[b, n, D_in] -> [b, m, D]` for `b` rows of the state
    pub fn extend(
        &self,
        state: &mut EncoderState,
        rows: &[usize],
        n_before: &[usize],
        units: Tensor<3>,
    ) -> Option<Tensor<3>> {
        let chunks = self.gather(state, rows, n_before, units)?; // [b, m, D]
        let n_chunks = chunks.dims()[1];
        let positions: Vec<Vec<usize>> =
            n_before.iter().map(|n| n / self.chunk_len).map(|first| (first..first + n_chunks).collect()).collect();
        Some(self.stack.step(chunks, &mut state.stack, rows, &positions))
    }

    /// As [`Encoder::extend`] without the transformer: the chunker's output for the chunks that complete, if any.
    ///
    /// # Shapes
    ///
    /// `[b, n, D_in] -> [b, m, D]` for `b` rows of the state
    pub fn gather(
        &self,
        state: &mut EncoderState,
        rows: &[usize],
        n_before: &[usize],
        units: Tensor<3>,
    ) -> Option<Tensor<3>> {
        let [batch, n_new, d_unit] = units.dims();
        let n_waiting = n_before[0] % self.chunk_len;
        let n_chunks = (n_waiting + n_new) / self.chunk_len;
        if n_chunks == 0 {
            let offsets: Vec<usize> = n_before.iter().map(|n| n % self.chunk_len).collect();
            state.unfinished.write(rows, &offsets, units.reshape([batch, 1, n_new, d_unit]));
            return None;
        }
        assert!(n_before.iter().all(|n| n % self.chunk_len == n_waiting), "rows of one call share their place");

        let units = match n_waiting {
            0 => units,
            _ => {
                let waiting = state.unfinished.read(rows, 0, n_waiting).reshape([batch, n_waiting, d_unit]);
                Tensor::cat(vec![waiting, units], 1)
            }
        };
        let (n_used, n_left) = (n_chunks * self.chunk_len, (n_waiting + n_new) % self.chunk_len);
        if n_left > 0 {
            let left = units.clone().narrow(1, n_used, n_left).reshape([batch, 1, n_left, d_unit]);
            state.unfinished.write(rows, &vec![0; batch], left);
        }
        Some(self.chunker.forward(units.narrow(1, 0, n_used))) // [b, m, D]
    }

    /// The state before any unit.
    pub fn start(&self, n_rows: usize, cache: &StageCache, activations: Activations, device: &Device) -> EncoderState {
        EncoderState {
            unfinished: RowStore::new([n_rows, 1, self.chunk_len, self.d_unit], DType::F32, device),
            stack: self.stack.start(n_rows, &cache.config, cache.n_newest, activations, device),
        }
    }
}

impl EncoderState {
    /// Gives up the transformer's caches; the units of the unfinished chunk stay.
    pub(crate) fn release_caches(&mut self) {
        self.stack.caches = Vec::new();
    }

    /// Keeps the given rows, in the given order.
    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        self.unfinished.select_rows(rows);
        self.stack.select_rows(rows);
    }
}
