//! What holds a vector for each entry of the vocabulary: the tables of embeddings, and the head.
//!
//! WebGPU gives a kernel 128 MiB of one tensor and no more. What is larger is cut along the vocabulary, on every device
//! alike, so that a checkpoint of one serves on all.

use std::ops::Range;

use burn::module::{Module, Param};
use burn::tensor::module::{embedding, linear};
use burn::tensor::{Int, Tensor};

use super::compute::{in_f32, in_format_of};

/// Numbers of a piece, at most: 128 MiB of f32.
pub const MAX_PIECE_NUMBERS: usize = 1 << 25;

/// A vector for each token, `[V, D]`.
#[derive(Module, Debug)]
pub struct Table {
    /// The first piece, or all: `[V_0, D]`.
    weight: Param<Tensor<2>>,
    /// The other pieces, `[V_i, D]`.
    more: Vec<Param<Tensor<2>>>,
}

/// The matrix from hidden states to logits, `[D, V]`.
#[derive(Module, Debug)]
pub struct Head {
    /// The first piece, or all: `[D, V_0]`.
    weight: Param<Tensor<2>>,
    /// The other pieces, `[D, V_i]`.
    more: Vec<Param<Tensor<2>>>,
}

/// The pieces of a vocabulary with `width` numbers an entry, as equal as can be.
pub fn pieces(vocab_size: usize, width: usize, max_numbers: usize) -> impl Iterator<Item = Range<usize>> {
    let n_pieces = (vocab_size * width).div_ceil(max_numbers).max(1);
    let len = vocab_size.div_ceil(n_pieces).max(1);
    (0..vocab_size).step_by(len).map(move |start| start..(start + len).min(vocab_size))
}

/// The name of a piece in files of weights.
pub fn piece_name(of: &str, index: usize) -> String {
    match index.checked_sub(1) {
        None => format!("{of}.weight"),
        Some(index) => format!("{of}.more.{index}"),
    }
}

/// The first piece and the others.
///
/// # Panics
///
/// If there is none.
fn divided(mut pieces: Vec<Param<Tensor<2>>>) -> (Param<Tensor<2>>, Vec<Param<Tensor<2>>>) {
    let more = pieces.split_off(1);
    (pieces.remove(0), more)
}

impl Table {
    /// A table of pieces, first rows first.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub(crate) fn of_pieces(pieces: Vec<Param<Tensor<2>>>) -> Self {
        let (weight, more) = divided(pieces);
        Self { weight, more }
    }

    /// The vectors of tokens.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, D]`
    pub fn forward(&self, token_ids: Tensor<2, Int>) -> Tensor<3> {
        if self.more.is_empty() {
            return in_f32(embedding(self.weight.val(), token_ids));
        }
        let mut first = 0;
        let of_piece = |piece: &Param<Tensor<2>>| {
            let piece = piece.val();
            let n_rows = piece.dims()[0] as i64;
            let rows = token_ids.clone() - first; // [B, T]
            first += n_rows;
            let is_here = rows.clone().greater_equal_elem(0).bool_and(rows.clone().lower_elem(n_rows));
            in_f32(embedding(piece, rows.clamp(0, n_rows - 1))) * is_here.float().unsqueeze_dim(2) // [B, T, D]
        };
        let vectors = std::iter::once(&self.weight).chain(&self.more).map(of_piece);
        vectors.reduce(|sum, vectors| sum + vectors).expect("there is a first piece")
    }
}

impl Head {
    /// A head of pieces, first columns first.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub(crate) fn of_pieces(pieces: Vec<Param<Tensor<2>>>) -> Self {
        let (weight, more) = divided(pieces);
        Self { weight, more }
    }

    /// The pieces, `[D, V_i]` each.
    pub fn weights(&self) -> Vec<Tensor<2>> {
        std::iter::once(&self.weight).chain(&self.more).map(Param::val).collect()
    }

    /// Logits of hidden states.
    ///
    /// # Shapes
    ///
    /// `[.., D] -> [.., V]`
    pub fn forward<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        logits_by(&self.weights(), |weight| linear(in_format_of(&weight, hidden.clone()), weight, None))
    }
}

/// What each piece of a head gives, side by side, in f32.
pub(crate) fn logits_by<const D: usize>(head: &[Tensor<2>], of: impl Fn(Tensor<2>) -> Tensor<D>) -> Tensor<D> {
    in_f32(match head {
        [all] => of(all.clone()),
        pieces => Tensor::cat(pieces.iter().cloned().map(of).collect(), D - 1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::Initializer;
    use burn::tensor::Device;

    const VOCAB_SIZE: usize = 7;
    const WIDTH: usize = 3;

    fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
        x.try_into_vec_as().unwrap()
    }

    #[test]
    fn pieces_are_as_few_and_as_equal_as_can_be() {
        let lens = |vocab_size, width, most| -> Vec<usize> {
            pieces(vocab_size, width, most).map(|piece| piece.len()).collect()
        };
        assert_eq!(lens(7, 3, 21), [7]);
        assert_eq!(lens(7, 3, 20), [4, 3]);
        assert_eq!(lens(7, 3, 9), [3, 3, 1]);
        assert_eq!(lens(32_000, 1664, MAX_PIECE_NUMBERS), [16_000, 16_000]);
        assert_eq!(lens(49_152, 576, MAX_PIECE_NUMBERS), [49_152]);
        assert_eq!(["a.weight", "a.more.0"], [0, 1].map(|index| piece_name("a", index))[..]);
    }

    #[test]
    fn a_table_in_pieces_gives_what_the_whole_one_does_and_learns_what_it_learns() {
        let device = Device::flex().autodiff();
        let whole = Initializer::new(1, 1.0, &device).embedding(VOCAB_SIZE, WIDTH);
        let rows = whole.weight.val().inner();
        let cut = pieces(VOCAB_SIZE, WIDTH, 9)
            .map(|piece| Param::from_tensor(Tensor::from_inner(rows.clone().slice([piece]))))
            .collect();
        let cut = Table::of_pieces(cut);
        assert_eq!(cut.more.len(), 2);
        let ids = Tensor::<2, Int>::from_data([[0, 6, 3, 3], [2, 5, 4, 1]], &device);
        let factors = Tensor::<1, Int>::arange(0..8 * WIDTH as i64, &device).float().reshape([2, 4, WIDTH]);
        let [(expected, gradient), (found, found_gradient)] = [&whole, &cut].map(|table| {
            let vectors = table.forward(ids.clone());
            let grads = (vectors.clone() * factors.clone()).sum().backward();
            let pieces = std::iter::once(&table.weight).chain(&table.more);
            let gradient = pieces.flat_map(|piece| numbers(piece.val().grad(&grads).unwrap())).collect::<Vec<_>>();
            (numbers(vectors.inner()), gradient)
        });
        assert_eq!(found, expected);
        assert_eq!(found_gradient, gradient);
    }

    #[test]
    fn a_head_in_pieces_gives_the_logits_of_the_whole_one() {
        let device = Device::flex();
        let whole = Initializer::new(1, 1.0, &device).head(WIDTH, VOCAB_SIZE);
        let matrix = whole.weight.val();
        let cut = pieces(VOCAB_SIZE, WIDTH, 9).map(|piece| Param::from_tensor(matrix.clone().slice([0..WIDTH, piece])));
        let cut = Head::of_pieces(cut.collect());
        let hidden = Tensor::<1, Int>::arange(0..2 * 4 * WIDTH as i64, &device).float().reshape([2, 4, WIDTH]);
        let [expected, found] = [&whole, &cut].map(|head| numbers(head.forward(hidden.clone())));
        let difference = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 1e-5, "{difference}");
    }
}
