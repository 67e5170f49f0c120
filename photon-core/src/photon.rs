//! The hierarchical model: this file reads like the paper's figure, and is the only one that names every stage.
//!
//! # Which vector conditions which chunk
//!
//! Only the top level is shifted: chunk g of level L-1 is conditioned on top latent g-1, the first on a learned
//! start latent, as is the first of every document that is kept apart. Below the top nothing is shifted: what decoder l+1 emits for unit i conditions unit i's own
//! contents. Contents are teacher-forced: upper decoders read encoder latents, the token decoder reads tokens.
//!
//! With L = 2, C = (2, 2) and tokens t0...t7, the logits of t6: top latent 0 (of t0...t3) conditions the second
//! meta-chunk; decoder 2 reads the level-1 latent of (t4, t5) and emits the conditioning of (t6, t7); the token
//! decoder starts from that prefix. Seen: t0...t5. The logits of t7 have seen t6 besides.
//!
//! Generation may put something cheaper in the place of the latents below the top: [`crate::advance`].

use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor};

use crate::advance::AdvanceRule;
use crate::cache::row_store::RowStore;
use crate::config::PhotonConfig;
use crate::decoder::{Decoder, DecoderInput, Wanted};
use crate::documents::Documents;
use crate::encoder::Encoder;
use crate::infer_config::{InferPlan, Stage};
use crate::init::Initializer;
use crate::model::Hidden;
use crate::nn::vocabulary::{Head, Table};
use crate::state::PhotonState;
use crate::watch::{Output, Watch};

/// The hierarchical language model.
///
/// # Source
///
/// PHOTON, arXiv 2512.20687 v2; where the paper is silent, `ARCHITECTURE.md` says what was chosen.
#[derive(Module, Debug)]
pub struct Photon {
    /// The tokens as the first chunker reads them.
    pub encoder_embedding: Table,
    /// Finest first.
    pub encoders: Vec<Encoder>,
    /// Stands for the top latent before the first, `[D_L]`.
    pub start_latent: Param<Tensor<1>>,
    /// Finest first.
    pub decoders: Vec<Decoder>,
    /// The tokens as the token decoder reads them.
    pub decoder_embedding: Table,
    head: Head,
    #[module(skip)]
    config: PhotonConfig,
}

/// What decoder l emitted for the units of level l-1, beside the latents that it stood for; l ≥ 2.
#[derive(Clone, Debug)]
pub struct Reconstruction {
    /// The level of the units, l-1.
    pub level: usize,
    /// `H^{l-1}`, `[B, M, D]`.
    pub emitted: Tensor<3>,
    /// `X^{l-1}`, `[B, M, D]`.
    pub latents: Tensor<3>,
}

impl Photon {
    /// Fresh weights.
    pub fn new(config: &PhotonConfig, init: &mut Initializer) -> Self {
        let levels = 1..=config.n_levels();
        Self {
            encoder_embedding: init.embedding(config.vocab_size, config.chunker_input_width(1)),
            encoders: levels.clone().map(|level| Encoder::new(config, level, init)).collect(),
            start_latent: init.vector(config.width(config.n_levels())),
            decoders: levels.map(|level| Decoder::new(config, level, init)).collect(),
            decoder_embedding: init.embedding(config.vocab_size, config.d_model),
            head: init.head(config.d_model, config.vocab_size),
            config: config.clone(),
        }
    }

    /// The training forward: for every token, the hidden state that predicts it from the tokens before.
    ///
    /// Any length works: the sequence is padded to whole meta-chunks, and what the padding adds is dropped. Documents start
    /// with meta-chunks.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, D_0]`
    pub fn hidden(&self, token_ids: Tensor<2, Int>, documents: &Documents, watch: &mut dyn Watch) -> Hidden {
        let [batch, n_tokens] = token_ids.dims();
        // In the units of every level, finest first.
        let in_units = |level| documents.in_units(self.config.tokens_per_unit(level));
        let documents: Vec<Documents> = (1..=self.config.n_levels()).map(in_units).collect();
        let token_ids = pad_tokens(token_ids, n_tokens.next_multiple_of(self.config.meta_chunk_tokens()));

        // Up: every level's units, finest first. `units[l]` is what decoder l+1 reads.
        let tokens = self.decoder_embedding.forward(token_ids.clone());
        let mut units = vec![watch.see(Output::DecoderEmbedding, tokens)]; // [B, T, D_0]
        let mut below = watch.see(Output::Embedding, self.encoder_embedding.forward(token_ids)); // [B, T, D_embed]
        for ((encoder, documents), level) in self.encoders.iter().zip(&documents).zip(1..) {
            let chunks = watch.see(Output::Chunker(level), encoder.chunker.forward(below)); // [B, M_l, D_l]
            below = watch.see(Output::Encoder(level), encoder.forward(chunks, documents)); // [B, M_l, D_l]
            units.push(below.clone());
        }

        // Turn: the top level alone is shifted by one.
        let [_, n_top, d_top] = below.dims();
        let start = self.start(batch); // [B, 1, D_L]
        let mut conditioning = match n_top {
            1 => start,
            _ => Tensor::cat(vec![start, below.slice([0..batch, 0..n_top - 1, 0..d_top])], 1),
        };
        conditioning = documents[self.config.n_levels() - 1].begin_with(self.start_latent.val(), conditioning); // [B, M_L, D_L]

        // Down: each level emits one vector for every unit of the level below.
        let mut reconstructions = Vec::with_capacity(self.decoders.len() - 1);
        for (level, decoder) in self.decoders.iter().enumerate().rev() {
            let contents = units.swap_remove(level);
            let prefixes = decoder.converter.forward(conditioning);
            let prefixes = watch.see(Output::Converter(level + 1), prefixes); // [B, G*R, D_level]
            conditioning = decoder.forward(prefixes, contents.clone(), &documents[level]);
            conditioning = watch.see(Output::Decoder(level + 1), conditioning); // [B, M_level, D_level]
            if level > 0 {
                reconstructions.push(Reconstruction { level, emitted: conditioning.clone(), latents: contents });
            }
        }
        Hidden { tokens: conditioning.narrow(1, 0, n_tokens), reconstructions }
    }

    /// The state before any token, and the hidden state of the first.
    ///
    /// # Shapes
    ///
    /// `-> [B, D_0]`
    pub fn begin(&self, n_rows: usize, plan: &InferPlan) -> (PhotonState, Tensor<2>) {
        let device = self.start_latent.val().device();
        let encoder_start = |(index, encoder): (usize, &Encoder)| {
            encoder.start(n_rows, plan.cache(Stage::Encoder(index + 1)), plan.activations, &device)
        };
        let decoder_start = |(index, decoder): (usize, &Decoder)| {
            decoder.start(n_rows, plan.cache(Stage::Decoder(index + 1)), plan.activations, &device)
        };
        let emitted = |level| RowStore::new([n_rows, 1, 1, self.config.width(level)], DType::F32, &device);
        let mut state = PhotonState {
            n_tokens: vec![0; n_rows],
            rule: AdvanceRule::Hierarchical,
            encoders: self.encoders.iter().enumerate().map(encoder_start).collect(),
            emitted: (1..self.config.n_levels()).map(emitted).collect(),
            decoders: self.decoders.iter().enumerate().map(decoder_start).collect(),
        };
        let rows: Vec<usize> = (0..n_rows).collect();
        let no_units = vec![None; self.decoders.len()];
        let hidden = self.descend(&mut state, &rows, no_units, Some(self.start(n_rows)));
        (state, hidden)
    }

    /// Takes up tokens of `rows` whose work is equal (see [`Photon::work`]); returns the hidden state of the next.
    ///
    /// # Shapes
    ///
    /// `[b, n] -> [b, D_0]`
    pub fn extend(&self, state: &mut PhotonState, rows: &[usize], token_ids: Tensor<2, Int>) -> Tensor<2> {
        match state.rule {
            AdvanceRule::Hierarchical => self.take_up(state, rows, token_ids),
            // What stands for a unit may be emitted only when the token before its first is taken up.
            AdvanceRule::Chunk | AdvanceRule::Recursive => {
                let steps = token_ids.split(1, 1).into_iter().map(|token| self.take_up(state, rows, token));
                steps.last().expect("a call brings at least one token")
            }
        }
    }

    /// One pass up and down; under `recursive` for a single token.
    fn take_up(&self, state: &mut PhotonState, rows: &[usize], token_ids: Tensor<2, Int>) -> Tensor<2> {
        let n_new = token_ids.dims()[1];

        // Up: a level has new units when chunks of the level below complete.
        let mut units = vec![Some(self.decoder_embedding.forward(token_ids.clone()))]; // [b, n, D_0]
        let mut below = Some(self.encoder_embedding.forward(token_ids)); // [b, n, D_embed]
        for level in 1..=self.encoders.len() {
            below = below.and_then(|new| self.complete(state, rows, level, new)); // [b, m_l, D_l]
            units.push(below.clone());
        }

        // Down: new top latents condition new groups.
        let top = units.pop().flatten();
        let hidden = self.descend(state, rows, units, top);
        rows.iter().for_each(|&row| state.n_tokens[row] += n_new);
        hidden
    }

    /// The units of `level` that complete with new units of the level below, if any.
    ///
    /// # Shapes
    ///
    /// `[b, n, D_below] -> [b, m, D_level]`
    fn complete(&self, state: &mut PhotonState, rows: &[usize], level: usize, below: Tensor<3>) -> Option<Tensor<3>> {
        let n_before = units_before(&self.config, &state.n_tokens, rows, level - 1);
        let (encoder, encoder_state) = (&self.encoders[level - 1], &mut state.encoders[level - 1]);
        match state.rule {
            AdvanceRule::Chunk if level < self.encoders.len() => encoder.gather(encoder_state, rows, &n_before, below),
            AdvanceRule::Recursive if level < self.encoders.len() => {
                let chunk_len = self.config.levels[level - 1].chunk_len;
                (n_before[0] + 1).is_multiple_of(chunk_len).then(|| state.emitted_for(level, rows))
            }
            _ => encoder.extend(encoder_state, rows, &n_before, below),
        }
    }

    /// Unfolds new top latents and takes up new units, level by level; returns the newest hidden state.
    ///
    /// `units[l]` holds the new units of level l; a level with neither units nor conditioning has nothing to do.
    ///
    /// # Shapes
    ///
    /// `units[l]: [b, n_l, D_l]`, `top: [b, g, D_L] -> [b, D_0]`
    fn descend(
        &self,
        state: &mut PhotonState,
        rows: &[usize],
        units: Vec<Option<Tensor<3>>>,
        top: Option<Tensor<3>>,
    ) -> Tensor<2> {
        let mut conditioning = top;
        for (level, (decoder, contents)) in self.decoders.iter().zip(units).enumerate().rev() {
            if contents.is_none() && conditioning.is_none() {
                continue;
            }
            let n_before = units_before(&self.config, &state.n_tokens, rows, level);
            let input = DecoderInput { units: contents, conditioning };
            let decoder_state = &mut state.decoders[level];
            let emitted = decoder.extend(decoder_state, rows, &n_before, input, self.wanted(level)); // [b, n_l, D_l]
            if level > 0 {
                state.keep_emitted(level, rows, newest(emitted.clone()));
            }
            conditioning = Some(emitted);
        }
        newest(conditioning.expect("new tokens are new units of level 0"))
    }

    /// What decides which stages run for `n_new` tokens of a row: rows of equal work go through in one call.
    ///
    /// One token costs the same wherever its chunk stands, as long as equally many levels complete with it.
    pub fn work(&self, state: &PhotonState, row: usize, n_new: usize) -> (usize, usize) {
        let n_before = state.n_tokens[row];
        if n_new == 1 {
            let completes = |level: &usize| (n_before + 1).is_multiple_of(self.config.tokens_per_unit(*level));
            return (1, (1..=self.config.n_levels()).take_while(completes).count());
        }
        (n_new, n_before % self.config.meta_chunk_tokens())
    }

    /// Logits of hidden states: `[N, D_0] -> [N, V]`.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The architecture.
    pub fn config(&self) -> &PhotonConfig {
        &self.config
    }

    /// How much of decoder `level + 1`'s output the decoders below it need.
    fn wanted(&self, level: usize) -> Wanted {
        match self.decoders[..=level].iter().all(Decoder::is_chunk_local) {
            true => Wanted::Newest,
            false => Wanted::All,
        }
    }

    fn start(&self, n_rows: usize) -> Tensor<3> {
        let start = self.start_latent.val();
        let [d_top] = start.dims();
        start.reshape([1, 1, d_top]).expand([n_rows, 1, d_top])
    }
}

/// Units of `level` that the rows had before this call.
fn units_before(config: &PhotonConfig, n_tokens: &[usize], rows: &[usize], level: usize) -> Vec<usize> {
    rows.iter().map(|&row| n_tokens[row] / config.tokens_per_unit(level)).collect()
}

/// Pads on the right with token 0: `[B, T] -> [B, T']`. By causality no earlier output changes.
fn pad_tokens(token_ids: Tensor<2, Int>, n_padded: usize) -> Tensor<2, Int> {
    let [batch, n_tokens] = token_ids.dims();
    if n_tokens == n_padded {
        return token_ids;
    }
    let padding = Tensor::zeros([batch, n_padded - n_tokens], &token_ids.device());
    Tensor::cat(vec![token_ids, padding], 1)
}

/// The last position: `[b, n, D] -> [b, D]`.
fn newest(x: Tensor<3>) -> Tensor<2> {
    let [batch, n_positions, d_model] = x.dims();
    x.narrow(1, n_positions - 1, 1).reshape([batch, d_model])
}
