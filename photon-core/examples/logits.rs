//! Prints the logits of the training forward for a sequence of token ids, as JSON: for comparisons with other programs.
//!
//! ```sh
//! cargo run --release --example logits -- CHECKPOINT 7,1,42
//! ```

use std::error::Error;
use std::io::Write;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use photon_core::checkpoint::Checkpoint;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(folder), Some(ids), None) = (args.next(), args.next(), args.next()) else {
        return Err("usage: logits CHECKPOINT ID,ID,…".into());
    };
    let device = Device::flex();
    let ids: Vec<i64> = ids.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let n_tokens = ids.len();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, n_tokens]), &device);
    let model = Checkpoint::load(Path::new(&folder), &device)?.model;
    let logits: Vec<f32> = model.forward(ids).try_into_vec_as().map_err(|error| format!("{error:?}"))?;
    let rows: Vec<&[f32]> = logits.chunks(logits.len() / n_tokens).collect();
    Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(&rows)?)?)
}
