//! A preallocated tensor whose batch rows are written and read at places of their own.
//!
//! Caches and the buffers of unfinished chunks stand on it. It counts nothing: who writes knows where.

use burn::tensor::kind::Numeric;
use burn::tensor::{DType, Device, Float, Int, Tensor, TensorData};

/// `[B, H, capacity, K]`, written along the third axis.
#[derive(Clone, Debug)]
pub struct RowStore<N: Numeric = Float> {
    values: Tensor<4, N>,
}

impl<N: Numeric> RowStore<N> {
    /// Zeros.
    pub fn new(shape: [usize; 4], dtype: DType, device: &Device) -> Self {
        Self { values: Tensor::zeros(shape, (device, dtype)) }
    }

    /// Positions that fit in a row.
    pub fn capacity(&self) -> usize {
        self.values.dims()[2]
    }

    /// Where the tensor lives.
    pub fn device(&self) -> Device {
        self.values.device()
    }

    /// Bytes that the tensor holds.
    pub fn bytes(&self) -> usize {
        self.values.shape().num_elements() * self.values.dtype().size()
    }

    /// Bytes of one position of one row.
    pub fn entry_bytes(&self) -> usize {
        let [_, n_heads, _, width] = self.values.dims();
        n_heads * width * self.values.dtype().size()
    }

    /// Writes `values [b, H, n, K]` into `rows`, row `i` from `offsets[i]` on.
    ///
    /// # Panics
    ///
    /// If a row would pass the capacity.
    pub fn write(&mut self, rows: &[usize], offsets: &[usize], values: Tensor<4, N>) {
        let [n_rows, n_heads, capacity, width] = self.values.dims();
        let n_new = values.dims()[2];
        assert!(offsets.iter().all(|o| o + n_new <= capacity), "writing past the capacity {capacity}");
        if is_all(rows, n_rows) && offsets.iter().all(|&o| o == offsets[0]) {
            let range = [0..n_rows, 0..n_heads, offsets[0]..offsets[0] + n_new, 0..width];
            self.values.inplace(|store| store.slice_assign(range, values));
            return;
        }
        for (index, (&row, &offset)) in rows.iter().zip(offsets).enumerate() {
            let value = values.clone().narrow(0, index, 1); // [1, H, n, K]
            let range = [row..row + 1, 0..n_heads, offset..offset + n_new, 0..width];
            self.values.inplace(|store| store.slice_assign(range, value));
        }
    }

    /// Positions `start..end` of `rows`: `[b, H, end - start, K]`.
    pub fn read(&self, rows: &[usize], start: usize, end: usize) -> Tensor<4, N> {
        let [n_rows, ..] = self.values.dims();
        let values = self.values.clone().narrow(2, start, end - start);
        match is_all(rows, n_rows) {
            true => values,
            false => values.select(0, indices(rows, &self.values.device())),
        }
    }

    /// All that is stored.
    pub fn read_all(&self) -> Tensor<4, N> {
        self.values.clone()
    }

    /// Replaces all that is stored.
    ///
    /// # Errors
    ///
    /// Numbers of another shape or dtype.
    pub fn write_all(&mut self, data: TensorData) -> Result<(), String> {
        let (shape, dtype) = (self.values.dims(), self.values.dtype());
        if data.shape().to_vec() != shape || data.dtype() != dtype {
            return Err(format!("is {:?} {:?}, expected {dtype:?} {shape:?}", data.dtype(), data.shape()));
        }
        self.values = Tensor::from_data(data, (&self.values.device(), dtype));
        Ok(())
    }

    /// Makes room for `capacity` positions, keeping the first `keep` of every row.
    pub fn resize(&mut self, keep: usize, capacity: usize) {
        let [n_rows, n_heads, _, width] = self.values.dims();
        let (device, dtype) = (self.values.device(), self.values.dtype());
        self.values.inplace(|store| {
            let empty = Tensor::zeros([n_rows, n_heads, capacity, width], (&device, dtype));
            match keep {
                0 => empty,
                _ => empty.slice_assign([0..n_rows, 0..n_heads, 0..keep, 0..width], store.narrow(2, 0, keep)),
            }
        });
    }

    /// Moves the given positions of one row to its beginning, in the given order.
    pub fn gather_to_front(&mut self, row: usize, positions: &[usize]) {
        if positions.is_empty() {
            return;
        }
        let indices = indices(positions, &self.values.device());
        let moved = self.values.clone().narrow(0, row, 1).select(2, indices);
        self.write(&[row], &[0], moved);
    }

    /// Keeps the given rows, in the given order.
    pub fn select_rows(&mut self, rows: &[usize]) {
        let indices = indices(rows, &self.values.device());
        self.values.inplace(|store| store.select(0, indices));
    }
}

fn is_all(rows: &[usize], n_rows: usize) -> bool {
    rows.len() == n_rows && rows.iter().enumerate().all(|(i, &row)| i == row)
}

/// Numbers as an index tensor.
pub fn indices(numbers: &[usize], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i64> = numbers.iter().map(|&number| number as i64).collect();
    Tensor::from_ints(indices.as_slice(), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(store: &RowStore) -> Vec<f32> {
        store.values.try_to_vec_as().unwrap()
    }

    #[test]
    fn rows_are_written_at_their_own_offsets() {
        let device = Device::flex();
        let mut store: RowStore = RowStore::new([3, 1, 3, 1], DType::F32, &device);
        let new = Tensor::from_floats([[[[1.0]]], [[[2.0]]]], &device);
        store.write(&[2, 0], &[1, 2], new);
        assert_eq!(values(&store), [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        store.gather_to_front(0, &[1, 2]);
        assert_eq!(values(&store)[..3], [0.0, 2.0, 2.0]);
        store.gather_to_front(2, &[1]);
        assert_eq!(values(&store)[6..], [1.0, 1.0, 0.0]);
        store.resize(2, 4);
        assert_eq!(store.capacity(), 4);
        store.select_rows(&[2, 0]);
        assert_eq!(values(&store), [1.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]);
    }
}
