//! Attention to the blocks that score best: which blocks a query takes, and the mask that follows.
//!
//! Whole sequences and steps over a cache call the same functions, so that generation looks at what training did.
//! What nobody looks at is still stored and, without an offload tier (`cache::offload`), multiplied; the choice bounds
//! what a position attends to. It is made by comparisons and carries no gradient.

mod documents;

pub use self::documents::DocumentBlocks;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use crate::cache::kv_cache::MASKED;

const SEQ: usize = 2;
const BLOCKS: usize = 2;

/// A rule that picks keys by their contents: beside a window and the first positions, the `top` best blocks.
///
/// Block `i` is the positions from `i * block` on. Only blocks that lie wholly before the window can be taken. A
/// block's score for a query position is the sum over query heads of `q · mean of the block's keys`, so all heads of
/// a layer take the same blocks; of equal scores the earlier block's counts for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPick {
    /// Newest positions that are always seen, itself included.
    pub window: usize,
    /// Positions at the beginning that are always seen.
    pub sinks: usize,
    /// Positions in a block.
    pub block: usize,
    /// Blocks that a position takes, as soon as there are so many.
    pub top: usize,
}

/// The blocks that queries take.
pub struct PickedBlocks {
    /// Zero where a query takes a block, [`MASKED`] elsewhere: `[b, n, n_blocks]`.
    pub mask: Tensor<3>,
    /// The blocks of each query, best first, and `n_blocks` where there was none left to take: `[b, n, top]`, with
    /// fewer than `top` in a sequence of fewer blocks.
    pub indices: Tensor<3, Int>,
}

impl BlockPick {
    /// Blocks that lie wholly before the window of `query`.
    pub fn n_candidates(&self, query: usize) -> usize {
        (query + 1).saturating_sub(self.window) / self.block
    }

    /// Whether `query` attends to `key` whatever the scores.
    pub fn always_sees(&self, query: usize, key: usize) -> bool {
        key <= query && (query - key < self.window || key < self.sinks)
    }

    /// The mask of what is seen whatever the scores, over the keys of positions `0..n_keys`.
    ///
    /// # Shapes
    ///
    /// `positions`: `b` lists of `n` queries, or one list for all rows; `-> [b or 1, 1, n, E]`
    pub fn fixed_mask(&self, positions: &[Vec<usize>], n_keys: usize, device: &Device) -> Tensor<4> {
        let sees = |(query, key): (usize, usize)| if self.always_sees(query, key) { 0.0 } else { MASKED };
        let pairs = positions.iter().flatten().flat_map(|&query| (0..n_keys).map(move |key| (query, key)));
        let values: Vec<f32> = pairs.map(sees).collect();
        Tensor::from_data(TensorData::new(values, [positions.len(), 1, positions[0].len(), n_keys]), device)
    }

    /// The mask of all that is seen: [`BlockPick::fixed_mask`] opened where blocks are taken.
    ///
    /// # Shapes
    ///
    /// `q: [b, H, n, K]`, `keys: [b, H_kv, E, K]` of positions `0..E`, `positions` as for `fixed`;
    /// `-> [b, 1, n, E]`, or `fixed` itself where there is nothing to take
    pub fn mask(&self, fixed: Tensor<4>, q: Tensor<4>, keys: Tensor<4>, positions: &[Vec<usize>]) -> Tensor<4> {
        let [batch, _, n_keys, _] = keys.dims();
        let n_queries = q.dims()[SEQ];
        let n_blocks = positions.iter().flatten().map(|&query| self.n_candidates(query)).max().unwrap_or(0);
        if n_blocks == 0 {
            return fixed;
        }
        let picked = self.choose(q, self.block_means(keys, n_blocks), positions).mask; // [b, n, n_blocks]
        let by_key = picked
            .reshape([batch, n_queries, n_blocks, 1])
            .expand([batch, n_queries, n_blocks, self.block])
            .reshape([batch, 1, n_queries, n_blocks * self.block]);
        let rest = Tensor::full([batch, 1, n_queries, n_keys - n_blocks * self.block], MASKED, &by_key.device());
        let picked = Tensor::cat(vec![by_key, rest], 3); // [b, 1, n, E]
        fixed.expand(picked.dims()).max_pair(picked)
    }

    /// Means of the keys of the first `n_blocks` blocks, without a gradient.
    ///
    /// # Shapes
    ///
    /// `[b, H_kv, E, K]` of positions `0..E`, `-> [b, H_kv, n_blocks, K]`
    pub fn block_means(&self, keys: Tensor<4>, n_blocks: usize) -> Tensor<4> {
        let [batch, n_heads, _, head_dim] = keys.dims();
        let whole = keys.detach().narrow(SEQ, 0, n_blocks * self.block);
        let means = whole.reshape([batch * n_heads, n_blocks, self.block, head_dim]).mean_dim(2);
        means.reshape([batch, n_heads, n_blocks, head_dim])
    }

    /// Which blocks each query takes.
    ///
    /// # Shapes
    ///
    /// `q: [b, H, n, K]`, `block_means: [b, H_kv, n_blocks, K]` of the first blocks, `positions`: `b` lists of `n`
    /// queries, or one list for all rows
    ///
    /// # Panics
    ///
    /// If there is no block.
    pub fn choose(&self, q: Tensor<4>, block_means: Tensor<4>, positions: &[Vec<usize>]) -> PickedBlocks {
        let ([batch, _, n_queries, _], [_, _, n_blocks, _]) = (q.dims(), block_means.dims());
        let (shape, device) = ([batch, n_queries, n_blocks], q.device());
        let numbers = Tensor::<1, Int>::arange(0..n_blocks as i64, &device).reshape([1, 1, n_blocks]).expand(shape);
        let n_candidates: Vec<i64> = positions.iter().flatten().map(|&query| self.n_candidates(query) as i64).collect();
        let n_candidates = TensorData::new(n_candidates, [positions.len(), n_queries, 1]);
        let n_candidates = Tensor::<3, Int>::from_data(n_candidates, &device).expand(shape);
        self.choose_among(q, block_means, numbers.greater_equal(n_candidates))
    }

    /// The same, with the blocks that a query may not take said: `is_barred [b, n, n_blocks]`.
    fn choose_among(&self, q: Tensor<4>, block_means: Tensor<4>, is_barred: Tensor<3, Bool>) -> PickedBlocks {
        let ([batch, n_heads, n_queries, head_dim], [_, n_kv_heads, n_blocks, _]) = (q.dims(), block_means.dims());
        let device = q.device();
        // A sum over heads of products is one product of heads laid end to end.
        let q = q.detach().reshape([batch * n_kv_heads, n_heads / n_kv_heads, n_queries, head_dim]).sum_dim(1);
        let q = q.reshape([batch, n_kv_heads, n_queries, head_dim]).swap_dims(1, SEQ);
        let q = q.reshape([batch, n_queries, n_kv_heads * head_dim]);
        let means = block_means.swap_dims(1, SEQ).reshape([batch, n_blocks, n_kv_heads * head_dim]);
        let scores = q.matmul(means.swap_dims(1, 2)); // [b, n, n_blocks]

        let shape = [batch, n_queries, n_blocks];
        let numbers = Tensor::<1, Int>::arange(0..n_blocks as i64, &device).reshape([1, 1, n_blocks]).expand(shape);
        let mut left = scores.mask_fill(is_barred, MASKED);
        let mut mask = Tensor::full(shape, MASKED, &device);
        let n_rounds = self.top.min(n_blocks);
        let mut indices = Vec::with_capacity(n_rounds);
        for _ in 0..n_rounds {
            let best = left.clone().max_dim(BLOCKS).expand(shape);
            let is_best = left.clone().greater_equal(best).bool_and(left.clone().greater_scalar(MASKED));
            // The first of the best; no block bears the number n_blocks.
            let first = numbers.clone().mask_fill(is_best.bool_not(), n_blocks as i64).min_dim(BLOCKS); // [b, n, 1]
            let is_taken = numbers.clone().equal(first.clone().expand(shape));
            mask = mask.mask_fill(is_taken.clone(), 0.0);
            left = left.mask_fill(is_taken, MASKED);
            indices.push(first);
        }
        PickedBlocks { mask, indices: Tensor::cat(indices, BLOCKS) }
    }

    /// The most pairs of query and key that attention looks at among `n_positions` positions.
    ///
    /// Blocks that overlap with the first positions add less, so the least favourable choice is the newest blocks.
    pub fn max_visible_pairs(&self, n_positions: usize) -> u128 {
        let pairs = |query: usize| {
            let n_before_window = (query + 1).saturating_sub(self.window);
            let (sinks, candidates) = (self.sinks.min(n_before_window), self.n_candidates(query));
            let (taken, takeable) = (candidates.min(self.top) * self.block, candidates * self.block);
            (query + 1 - n_before_window + (sinks + taken).min(sinks.max(takeable))) as u128
        };
        (0..n_positions).map(pairs).sum()
    }

    /// Pairs of query and block that are scored among `n_positions` positions.
    pub fn scored_pairs(&self, n_positions: usize) -> u128 {
        (0..n_positions).map(|query| self.n_candidates(query) as u128).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    pub(super) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.try_to_vec_as().unwrap()
    }

    /// Seeded: scores that all but tie would be told apart in f64 alone.
    pub(super) fn random(shape: [usize; 4], seed: u64) -> Tensor<4> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    /// What `query` sees, key by key: loops over everything, in f64.
    fn seen_naively(pick: &BlockPick, q: &Tensor<4>, keys: &Tensor<4>, row: usize, query: usize) -> Vec<bool> {
        let ([_, n_heads, ..], [_, n_kv_heads, n_keys, head_dim]) = (q.dims(), keys.dims());
        let at = |x: &Tensor<4>, head: usize, position: usize| -> Vec<f64> {
            let range = [row..row + 1, head..head + 1, position..position + 1, 0..head_dim];
            values(x.clone().slice(range)).into_iter().map(f64::from).collect()
        };
        let mut scores = Vec::new();
        let mut block = 0;
        while (block + 1) * pick.block + pick.window <= query + 1 {
            let mut score = 0.0;
            for head in 0..n_heads {
                let q = at(q, head, query);
                for position in block * pick.block..(block + 1) * pick.block {
                    let key = at(keys, head / (n_heads / n_kv_heads), position);
                    score += q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / pick.block as f64;
                }
            }
            scores.push((block, score));
            block += 1;
        }
        scores.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: the earlier of equals stays before
        let taken: Vec<usize> = scores.into_iter().take(pick.top).map(|(block, _)| block).collect();
        (0..n_keys)
            .map(|key| {
                let is_near = query - query.min(key) < pick.window || key < pick.sinks;
                key <= query && (is_near || taken.contains(&(key / pick.block)))
            })
            .collect()
    }

    #[test]
    fn the_mask_is_that_of_a_naive_loop() {
        let device = Device::flex();
        let n_positions = 13;
        for (window, sinks, block, top) in [(2, 1, 2, 1), (1, 0, 1, 3), (3, 5, 3, 2), (4, 0, 2, 50), (20, 2, 2, 1)] {
            let pick = BlockPick { window, sinks, block, top };
            let q = random([2, 4, n_positions, 6], 1);
            let keys = random([2, 2, n_positions, 6], 2);
            let expected: Vec<bool> = (0..2 * n_positions)
                .flat_map(|i| seen_naively(&pick, &q, &keys, i / n_positions, i % n_positions))
                .collect();
            let positions = [(0..n_positions).collect::<Vec<_>>()];
            let fixed = pick.fixed_mask(&positions, n_positions, &device);
            let mask = pick.mask(fixed, q.clone(), keys.clone(), &positions).expand([2, 1, n_positions, n_positions]);
            let seen: Vec<bool> = values(mask).into_iter().map(|value| value == 0.0).collect();
            assert_eq!(seen, expected, "{pick:?}");

            // Rows at places of their own, with more keys than they may look at.
            let places = [vec![7, 8], vec![11, 12]];
            let newest: Vec<_> = (0..2)
                .map(|row| q.clone().slice([row..row + 1, 0..4, places[row][0]..places[row][0] + 2, 0..6]))
                .collect();
            let fixed = pick.fixed_mask(&places, n_positions, &device);
            let mask = pick.mask(fixed, Tensor::cat(newest, 0), keys.clone(), &places);
            let seen: Vec<bool> = values(mask).into_iter().map(|value| value == 0.0).collect();
            let expected: Vec<bool> =
                (0..4).flat_map(|i| seen_naively(&pick, &q, &keys, i / 2, places[i / 2][i % 2])).collect();
            assert_eq!(seen, expected, "{pick:?} at {places:?}");
        }
    }

    #[test]
    fn of_equal_blocks_the_earlier_is_taken() {
        let device = Device::flex();
        let pick = BlockPick { window: 1, sinks: 0, block: 1, top: 2 };
        let means = Tensor::from_floats([[[[1.0], [3.0], [2.0], [3.0], [3.0], [9.0]]]], &device);
        let picked = pick.choose(Tensor::ones([1, 1, 2, 1], &device), means, &[vec![5, 1]]);
        let indices: Vec<i64> = picked.indices.try_to_vec_as().unwrap();
        assert_eq!(indices, [1, 3, 0, 6], "position 5 has five candidates, position 1 one");
        let taken: Vec<bool> = values(picked.mask).into_iter().map(|value| value == 0.0).collect();
        let expected = [[false, true, false, true, false, false], [true, false, false, false, false, false]];
        assert_eq!(taken, expected.concat());
    }

    #[test]
    fn pairs_are_the_most_that_any_choice_makes_visible() {
        for (window, sinks, block, top) in [(2, 1, 2, 1), (1, 0, 1, 3), (3, 5, 3, 2), (4, 0, 2, 50), (20, 2, 2, 1)] {
            let pick = BlockPick { window, sinks, block, top };
            for n_positions in 0..30 {
                let (mut pairs, mut scored) = (0, 0);
                for query in 0..n_positions {
                    let candidates = pick.n_candidates(query);
                    scored += candidates;
                    // Every run of `top` candidates; the fullest is as full as any choice.
                    let runs = (0..=candidates.saturating_sub(top)).map(|first| {
                        let taken = first * block..(first + top).min(candidates) * block;
                        (0..=query).filter(|&key| pick.always_sees(query, key) || taken.contains(&key)).count()
                    });
                    pairs += runs.max().unwrap();
                }
                assert_eq!(pick.max_visible_pairs(n_positions), pairs as u128, "{pick:?}, {n_positions} positions");
                assert_eq!(pick.scored_pairs(n_positions), scored as u128);
            }
        }
    }
}
