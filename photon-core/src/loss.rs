//! What training minimises: cross-entropy, `alpha` times how far emitted vectors are from the latents, and a z-loss.
//!
//! `loss = CE(tokens) + alpha * sum over l >= 2 of mean(1 - cos(H^{l-1}, stop_gradient(X^{l-1})))`
//! `     + z_loss * mean(logsumexp(logits)²)` (PaLM, arXiv 2204.02311, section 5)
//!
//! All logits of a batch are never held at once. [`token_losses`] goes through the positions in pieces and, where
//! a gradient is wanted, computes it in the same pass; the result carries that gradient in a term whose value is
//! zero.

use burn::tensor::{Int, Tensor, TensorData};

use crate::config::{ModelConfig, PhotonConfig};
use crate::documents::Documents;
use crate::model::Model;
use crate::nn::compute::in_format_of;
use crate::nn::fused;
use crate::nn::vocabulary::logits_by;
use crate::photon::Reconstruction;

/// Logits that exist at the same time, at most (unless one position alone has more).
const LOGITS_AT_ONCE: usize = 1 << 20;

/// Nats of some text as bits for each of its bytes: comparable between all models, whatever their tokens.
pub fn bits_per_byte(nats: f64, n_bytes: f64) -> f64 {
    nats / std::f64::consts::LN_2 / n_bytes
}

/// Losses of a list of positions.
#[derive(Clone, Debug)]
pub struct TokenLosses {
    /// What to differentiate: `cross_entropy + z_loss * z`, `[1]`.
    pub total: Tensor<1>,
    /// Weighted sum of the cross-entropies, in nats, `[1]`.
    pub cross_entropy: Tensor<1>,
    /// Weighted sum of `logsumexp(logits)²`, `[1]`.
    pub z: Tensor<1>,
}

/// Weighted sums of the losses of `targets`; the head comes in pieces, or in one.
///
/// # Shapes
///
/// `hidden: [N, D]`, `head: [D, V_i]` each, `targets: [N]`, `weights: [N]`
pub fn token_losses(
    hidden: Tensor<2>,
    head: &[Tensor<2>],
    targets: Tensor<1, Int>,
    weights: Tensor<1>,
    z_loss: f64,
) -> TokenLosses {
    if !hidden.is_autodiff() {
        let [nats, log_sums] = nats_and_log_sums(hidden, head, targets); // [N]
        let cross_entropy = (nats * weights.clone()).sum();
        let z = (log_sums.square() * weights).sum();
        return TokenLosses { total: cross_entropy.clone() + z.clone() * z_loss, cross_entropy, z };
    }
    let inner_hidden = hidden.clone().inner();
    let inner_head: Vec<Tensor<2>> = head.iter().map(|piece| piece.clone().inner()).collect();
    let (targets, weights) = (targets.inner(), weights.inner());
    let zero = || Tensor::zeros([1], &inner_hidden.device());
    let (mut cross_entropy, mut z) = (zero(), zero());
    let mut head_gradients: Vec<Tensor<2>> = inner_head.iter().map(Tensor::zeros_like).collect();
    let mut hidden_gradients = Vec::new();
    for piece in pieces(inner_hidden.dims()[0], &inner_head) {
        let hidden = inner_hidden.clone().slice([piece.clone()]); // [n, D]
        let targets = targets.clone().slice([piece.clone()]).unsqueeze_dim::<2>(1); // [n, 1]
        let weights = weights.clone().slice([piece]).unsqueeze_dim::<2>(1); // [n, 1]
        let logits = logits(&hidden, &inner_head); // [n, V]
        let losses = fused::cross_entropy(logits, targets, weights.clone(), z_loss);
        cross_entropy = cross_entropy + (losses.nats * weights.clone()).sum();
        if z_loss > 0.0 {
            z = z + (losses.log_sums.square() * weights).sum();
        }
        let by_piece = split(losses.gradient, &inner_head); // [n, V_i] each
        let of_hidden = by_piece.iter().zip(&inner_head).map(|(gradient, head)| {
            gradient.clone().matmul(head.clone().transpose()) // [n, D]
        });
        hidden_gradients.extend(of_hidden.reduce(|sum, gradient| sum + gradient));
        let of_head = by_piece.into_iter().map(|gradient| hidden.clone().transpose().matmul(gradient)); // [D, V_i] each
        head_gradients = head_gradients.into_iter().zip(of_head).map(|(sum, gradient)| sum + gradient).collect();
    }
    let hidden_gradient = constant(Tensor::cat(hidden_gradients, 0), &hidden); // [N, D]
    let [cross_entropy, z] = [cross_entropy, z].map(|x| constant(x, &hidden));
    let of_head = head.iter().zip(head_gradients).map(|(piece, gradient)| {
        let gradient = constant(gradient, piece);
        (piece.clone() * gradient).sum()
    });
    let carrier = of_head.fold((hidden * hidden_gradient).sum(), |sum, carrier| sum + carrier);
    let value = match z_loss > 0.0 {
        true => cross_entropy.clone() + z.clone() * z_loss,
        false => cross_entropy.clone(),
    };
    TokenLosses { total: value + (carrier.clone() - carrier.detach()), cross_entropy, z }
}

/// A constant in the graph of `beside`, which may keep less than usual for the backward pass.
fn constant<const D: usize>(x: Tensor<D>, beside: &Tensor<2>) -> Tensor<D> {
    let strategy = beside.gradient_checkpointing_strategy().expect("a graph has a strategy");
    Tensor::from_inner(x).with_gradient_checkpointing_strategy(strategy)
}

/// The cross-entropy of each target, in nats.
///
/// # Shapes
///
/// `hidden: [N, D]`, `head: [D, V_i]` each, `targets: [N] -> [N]`
pub fn token_nats(hidden: Tensor<2>, head: &[Tensor<2>], targets: Tensor<1, Int>) -> Tensor<1> {
    let [nats, _] = nats_and_log_sums(hidden, head, targets);
    nats
}

/// The cross-entropy of each target in nats, and the likeliest token in its place, `[N]` each.
///
/// # Shapes
///
/// `hidden: [N, D]`, `head: [D, V_i]` each, `targets: [N]`
pub fn token_nats_and_likeliest(
    hidden: Tensor<2>,
    head: &[Tensor<2>],
    targets: Tensor<1, Int>,
) -> (Tensor<1>, Tensor<1, Int>) {
    let (nats, likeliest): (Vec<_>, Vec<_>) = pieces(hidden.dims()[0], head)
        .map(|piece| {
            let logits = logits(&hidden.clone().slice([piece.clone()]), head); // [n, V]
            let likeliest = logits.clone().argmax(1); // [n, 1]
            let [nats, _] = nats_and_log_sums_of(logits, targets.clone().slice([piece]));
            (nats, likeliest)
        })
        .unzip();
    (Tensor::cat(nats, 0).squeeze_dim(1), Tensor::cat(likeliest, 0).squeeze_dim(1))
}

/// The cross-entropy of each target, and the log of the softmax's denominator, `[N]` each.
fn nats_and_log_sums(hidden: Tensor<2>, head: &[Tensor<2>], targets: Tensor<1, Int>) -> [Tensor<1>; 2] {
    let (nats, log_sums) = pieces(hidden.dims()[0], head)
        .map(|piece| {
            let logits = logits(&hidden.clone().slice([piece.clone()]), head); // [n, V]
            nats_and_log_sums_of(logits, targets.clone().slice([piece])).into()
        })
        .unzip();
    [nats, log_sums].map(|parts: Vec<Tensor<2>>| Tensor::cat(parts, 0).squeeze_dim(1))
}

/// The same of logits that are there: `[n, V]`, `[n] -> [n, 1]` each.
fn nats_and_log_sums_of(logits: Tensor<2>, targets: Tensor<1, Int>) -> [Tensor<2>; 2] {
    let largest = logits.clone().max_dim(1); // [n, 1]
    let shifted = logits - largest.clone();
    let target = shifted.clone().gather(1, targets.unsqueeze_dim(1)); // [n, 1]
    let log_sum = shifted.exp().sum_dim(1).log();
    [log_sum.clone() - target, log_sum + largest]
}

/// `[n, D] x [D, V_i] -> [n, V]`
fn logits(hidden: &Tensor<2>, head: &[Tensor<2>]) -> Tensor<2> {
    logits_by(head, |piece| in_format_of(&piece, hidden.clone()).matmul(piece))
}

/// What belongs to each piece of the head: `[n, V] -> [n, V_i]` each.
fn split(of_logits: Tensor<2>, head: &[Tensor<2>]) -> Vec<Tensor<2>> {
    match head {
        [_] => vec![of_logits],
        pieces => of_logits.split_with_sizes(pieces.iter().map(|piece| piece.dims()[1]).collect(), 1),
    }
}

/// Positions whose logits exist at the same time.
fn pieces(n_positions: usize, head: &[Tensor<2>]) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let vocab_size: usize = head.iter().map(|piece| piece.dims()[1]).sum();
    let len = (LOGITS_AT_ONCE / vocab_size).max(1);
    (0..n_positions).step_by(len).map(move |start| start..(start + len).min(n_positions))
}

/// What a whole batch is averaged over, however it is cut into micro-batches.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    alpha: f64,
    z_loss: f64,
    scale: f64,
    n_tokens: usize,
    /// Whole units at levels 1 to L-1.
    n_units: Vec<usize>,
}

/// The loss of a micro-batch: its share of the batch's mean.
#[derive(Clone, Debug)]
pub struct LossParts {
    /// What to differentiate, `[1]`.
    pub total: Tensor<1>,
    /// The share of the mean cross-entropy, in nats, `[1]`.
    pub cross_entropy: Tensor<1>,
    /// The share of the mean of `logsumexp(logits)²`, before its weight, `[1]`; zero where that is.
    pub z: Tensor<1>,
    /// The share of the reconstruction term before `alpha`, `[1]`; zero where `alpha` is.
    pub reconstruction: Tensor<1>,
}

impl Objective {
    /// The objective of a batch whose rows hold `row_tokens` real tokens each, before any padding.
    pub fn new(config: &ModelConfig, alpha: f64, row_tokens: &[usize]) -> Self {
        let longest = row_tokens.iter().copied().max().unwrap_or(0);
        Self::of_places(config, alpha, &row_mask(row_tokens, longest), row_tokens.len())
    }

    /// The objective of a batch of `rows` equal rows, of whose places `is_real` says which hold a token that counts.
    ///
    /// Padding may stand anywhere; a unit counts when all its tokens do.
    pub fn of_places(config: &ModelConfig, alpha: f64, is_real: &[bool], rows: usize) -> Self {
        let row_len = is_real.len() / rows.max(1);
        let n_real = |mask: Vec<bool>| mask.into_iter().filter(|&is_real| is_real).count();
        let n_units = match config {
            ModelConfig::Photon(config) => (1..config.n_levels())
                .map(|level| {
                    let unit_tokens = config.tokens_per_unit(level);
                    n_real(whole_units(is_real, row_len, unit_tokens, row_len / unit_tokens))
                })
                .collect(),
            ModelConfig::Flat(_) => Vec::new(),
        };
        Self { alpha, z_loss: 0.0, scale: 1.0, n_tokens: n_real(is_real.to_vec()), n_units }
    }

    /// The same with a z-loss of this weight.
    #[must_use]
    pub fn with_z_loss(self, z_loss: f64) -> Self {
        Self { z_loss, ..self }
    }

    /// The same with a total, and so with gradients, times `scale`.
    #[must_use]
    pub fn scaled(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// The share of `token_ids [B, T]`, whose rows are right-padded from `row_tokens[row]` on.
    pub fn loss(&self, model: &Model, token_ids: Tensor<2, Int>, row_tokens: &[usize]) -> LossParts {
        let is_real = row_mask(row_tokens, token_ids.dims()[1]);
        self.loss_of_places(model, token_ids, &is_real)
    }

    /// The share of `token_ids [B, T]`, of which those count that `is_real [B * T]` says.
    pub fn loss_of_places(&self, model: &Model, token_ids: Tensor<2, Int>, is_real: &[bool]) -> LossParts {
        let documents = Documents::whole_rows(token_ids.dims()[0]);
        self.loss_apart(model, token_ids, is_real, &documents)
    }

    /// The share of `token_ids [B, T]`, of which those count that `is_real [B * T]` says, with documents kept apart.
    pub fn loss_apart(
        &self,
        model: &Model,
        token_ids: Tensor<2, Int>,
        is_real: &[bool],
        documents: &Documents,
    ) -> LossParts {
        let [batch, n_tokens] = token_ids.dims();
        let device = token_ids.device();
        let hidden = model.hidden_apart(token_ids.clone(), documents);
        let d_model = hidden.tokens.dims()[2];
        let share = 1.0 / self.n_tokens as f32;
        let weights = is_real.iter().map(|&real| if real { share } else { 0.0 }).collect();
        let weights = Tensor::from_data(TensorData::new::<f32, _>(weights, [batch * n_tokens]), &device);
        let TokenLosses { mut total, cross_entropy, z } = token_losses(
            hidden.tokens.reshape([batch * n_tokens, d_model]),
            &model.head().weights(),
            token_ids.reshape([batch * n_tokens]),
            weights,
            self.z_loss,
        );
        let mut reconstruction = cross_entropy.zeros_like();
        if let (Some(config), true) = (model.hierarchy(), self.alpha > 0.0) {
            for level in hidden.reconstructions {
                reconstruction = reconstruction + self.distance(config, level, is_real, n_tokens);
            }
            total = total + reconstruction.clone() * self.alpha;
        }
        if self.scale != 1.0 {
            total = total * self.scale;
        }
        LossParts { total, cross_entropy, z, reconstruction }
    }

    /// `1 - cos` between what was emitted and what it stood for, over whole units, `[1]`.
    fn distance(&self, config: &PhotonConfig, level: Reconstruction, is_real: &[bool], row_len: usize) -> Tensor<1> {
        let n_units = self.n_units[level.level - 1];
        let [batch, n_padded, _] = level.emitted.dims();
        let cosine = cosine_similarity(level.emitted, level.latents.detach()); // [B, M]
        let share = 1.0 / n_units.max(1) as f32;
        let whole = whole_units(is_real, row_len, config.tokens_per_unit(level.level), n_padded);
        let mask = whole.into_iter().map(|whole| if whole { share } else { 0.0 }).collect();
        let mask = Tensor::from_data(TensorData::new::<f32, _>(mask, [batch, n_padded]), &cosine.device());
        ((cosine.neg() + 1.0) * mask).sum()
    }
}

/// Whether all tokens of each unit of `unit_tokens` count: `n_units` for each row, none past its end.
fn whole_units(is_real: &[bool], row_len: usize, unit_tokens: usize, n_units: usize) -> Vec<bool> {
    let is_whole = |row: &[bool], unit: usize| {
        row.get(unit * unit_tokens..(unit + 1) * unit_tokens).is_some_and(|places| places.iter().all(|&real| real))
    };
    is_real.chunks(row_len.max(1)).flat_map(|row| (0..n_units).map(move |unit| is_whole(row, unit))).collect()
}

/// True for the first `row_lens[row]` of `len` places in each row, row after row.
fn row_mask(row_lens: &[usize], len: usize) -> Vec<bool> {
    row_lens.iter().flat_map(|&n| (0..len).map(move |place| place < n)).collect()
}

/// Cosine over the last axis: `[B, M, D] x [B, M, D] -> [B, M]`.
fn cosine_similarity(a: Tensor<3>, b: Tensor<3>) -> Tensor<2> {
    const WIDTH: usize = 2;
    let dot = (a.clone() * b.clone()).sum_dim(WIDTH);
    let squares = a.square().sum_dim(WIDTH) * b.square().sum_dim(WIDTH);
    (dot / (squares + 1e-12).sqrt()).squeeze_dim(WIDTH)
}
