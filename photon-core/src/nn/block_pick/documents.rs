//! Picking within documents that share a row: blocks, candidates, sinks and windows count from the start of each.

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use super::BlockPick;
use crate::cache::kv_cache::MASKED;
use crate::cache::row_store::indices;
use crate::documents::Documents;
use crate::nn::attention::pairs_mask;

const SEQ: usize = 2;
const BLOCKS: usize = 2;

/// The whole blocks of the documents of each row, numbered through the row, and which of them a query may take.
///
/// Rows have as many numbers as the row with the most blocks; nobody may take those that a row lacks.
#[derive(Clone, Debug)]
pub struct DocumentBlocks {
    pick: BlockPick,
    /// What is seen whatever the scores: `[B, 1, N, N]`.
    fixed: Tensor<4>,
    /// The keys of the blocks, counted through all rows: `[B * n_blocks * block]`.
    keys: Tensor<1, Int>,
    /// Where a query may not take a block: `[B, N, n_blocks]`.
    is_barred: Tensor<3, Bool>,
    /// The block of each key, and `n_blocks` for those behind the last whole one of their document: `[B, 1, N]`.
    block_of: Tensor<3, Int>,
}

impl DocumentBlocks {
    /// The blocks of rows of `n_positions`.
    pub fn new(pick: BlockPick, documents: &Documents, n_positions: usize, device: &Device) -> Self {
        let n_rows = documents.n_rows();
        let n_whole = |row| documents.of_row(row, n_positions).map(|document| document.len() / pick.block).sum();
        // Tensors without elements are none: there is at least one number, which nobody may take.
        let n_blocks = (0..n_rows).map(n_whole).fold(1, usize::max);
        let mut keys: Vec<usize> = Vec::with_capacity(n_rows * n_blocks * pick.block);
        let mut is_barred = vec![true; n_rows * n_positions * n_blocks];
        let mut block_of = vec![n_blocks as i64; n_rows * n_positions];
        for row in 0..n_rows {
            let mut first_block = 0;
            for document in documents.of_row(row, n_positions) {
                let n_whole = document.len() / pick.block;
                for key in document.start..document.start + n_whole * pick.block {
                    block_of[row * n_positions + key] = (first_block + (key - document.start) / pick.block) as i64;
                    keys.push(row * n_positions + key);
                }
                for query in document.clone() {
                    let first = (row * n_positions + query) * n_blocks + first_block;
                    is_barred[first..][..pick.n_candidates(query - document.start)].fill(false);
                }
                first_block += n_whole;
            }
            keys.resize((row + 1) * n_blocks * pick.block, row * n_positions);
        }
        Self {
            pick,
            fixed: pairs_mask(documents, n_positions, device, |query, key| pick.always_sees(query, key)),
            keys: indices(&keys, device),
            is_barred: Tensor::from_data(TensorData::new(is_barred, [n_rows, n_positions, n_blocks]), device),
            block_of: Tensor::from_data(TensorData::new(block_of, [n_rows, 1, n_positions]), device),
        }
    }

    /// The same for tensors without gradients.
    pub fn inner(self) -> Self {
        Self {
            fixed: self.fixed.inner(),
            keys: self.keys.inner(),
            is_barred: self.is_barred.inner(),
            block_of: self.block_of.inner(),
            ..self
        }
    }

    /// The mask of all that is seen.
    ///
    /// # Shapes
    ///
    /// `q: [B, H, N, K]`, `keys: [B, H_kv, N, K] -> [B, 1, N, N]`
    pub fn mask(&self, q: Tensor<4>, keys: Tensor<4>) -> Tensor<4> {
        let [batch, n_positions, _] = self.is_barred.dims();
        let picked = self.pick.choose_among(q, self.block_means(keys), self.is_barred.clone()).mask; // [B, N, n_blocks]
        let none = Tensor::full([batch, n_positions, 1], MASKED, &picked.device());
        let block_of = self.block_of.clone().expand([batch, n_positions, n_positions]);
        let by_key = Tensor::cat(vec![picked, none], BLOCKS).gather(BLOCKS, block_of); // [B, N, N]
        self.fixed.clone().max_pair(by_key.unsqueeze_dim(1))
    }

    /// Means of the keys of blocks, without a gradient: `[B, H_kv, N, K] -> [B, H_kv, n_blocks, K]`.
    fn block_means(&self, keys: Tensor<4>) -> Tensor<4> {
        let ([batch, n_heads, n_positions, head_dim], [_, _, n_blocks]) = (keys.dims(), self.is_barred.dims());
        let lines = keys.detach().swap_dims(1, SEQ).reshape([batch * n_positions, n_heads * head_dim]);
        let blocks = lines.select(0, self.keys.clone());
        let blocks = blocks.reshape([batch * n_blocks, self.pick.block, n_heads * head_dim]);
        blocks.mean_dim(1).reshape([batch, n_blocks, n_heads, head_dim]).swap_dims(1, SEQ)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{random, values};
    use super::*;

    #[test]
    fn the_mask_of_a_row_is_that_of_each_document_alone() {
        let (device, n_positions) = (Device::flex(), 23);
        let documents = Documents::new(vec![vec![0, 3, 13, 14], vec![0]]);
        for (window, sinks, block, top) in [(2, 1, 2, 1), (1, 0, 1, 3), (3, 5, 3, 2), (4, 0, 2, 50), (20, 2, 30, 1)] {
            let pick = BlockPick { window, sinks, block, top };
            let (q, keys) = (random([2, 4, n_positions, 6], 1), random([2, 2, n_positions, 6], 2));
            let blocks = DocumentBlocks::new(pick, &documents, n_positions, &device);
            let seen: Vec<bool> =
                values(blocks.mask(q.clone(), keys.clone())).into_iter().map(|value| value == 0.0).collect();
            let mut expected = vec![false; seen.len()];
            for (row, document) in (0..2).flat_map(|row| documents.of_row(row, n_positions).map(move |it| (row, it))) {
                let alone = |x: &Tensor<4>| x.clone().narrow(0, row, 1).narrow(SEQ, document.start, document.len());
                let positions = [(0..document.len()).collect::<Vec<_>>()];
                let fixed = pick.fixed_mask(&positions, document.len(), &device);
                let mask = values(pick.mask(fixed, alone(&q), alone(&keys), &positions));
                for (query, line) in document.clone().zip(mask.chunks(document.len())) {
                    let first = (row * n_positions + query) * n_positions + document.start;
                    let places = expected[first..][..line.len()].iter_mut();
                    places.zip(line).for_each(|(sees, value)| *sees = *value == 0.0);
                }
            }
            assert_eq!(seen, expected, "{pick:?}");
        }
    }
}
