//! How much memory long sequences take, each in a process of its own, because a peak is never forgotten.

use std::process::Command;

use burn::tensor::{Device, Int, Tensor};
use photon_core::loss::Objective;
use photon_core::memory::peak_memory_bytes;
use photon_core::model::Model;

use crate::support::parse;

const N_TOKENS: usize = 65_536;
const MIB: usize = 1 << 20;

/// One wide layer: pairs are what could grow beyond bounds. All of them would take 64 GiB.
fn windowed_model(device: &Device) -> Model {
    let config = parse(
        "architecture = \"flat\"\nvocab_size = 32\nd_model = 128\n\
         [stack]\nn_layers = 1\nn_heads = 4\nd_ff = 128\nattention = { window = { units = 256 } }\n",
    );
    Model::new(&config, 0, device)
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    (Tensor::<1, Int>::arange(0..N_TOKENS as i64, device) % 32).reshape([1, N_TOKENS])
}

#[test]
#[ignore = "run in a process of its own by long_sequences_take_little_memory"]
fn forward_alone() {
    let device = Device::flex();
    let logits = windowed_model(&device).forward(tokens(&device));
    assert!(logits.mean().into_scalar::<f32>().is_finite());
    assert_peak_below(512 * MIB);
}

#[test]
#[ignore = "run in a process of its own by long_sequences_take_little_memory"]
fn training_alone() {
    let device = Device::flex().autodiff();
    let model = windowed_model(&device);
    let objective = Objective::new(&model.config(), 0.0, &[N_TOKENS]);
    let loss = objective.loss(&model, tokens(&device), &[N_TOKENS]).total;
    loss.backward();
    assert_peak_below(1024 * MIB);
}

fn assert_peak_below(most: usize) {
    let Some(peak) = peak_memory_bytes() else { return };
    assert!(peak < most, "{} MiB, at most {} were expected", peak / MIB, most / MIB);
}

#[test]
fn long_sequences_take_little_memory() {
    for test in ["memory::forward_alone", "memory::training_alone"] {
        let output =
            Command::new(std::env::current_exe().unwrap()).args(["--exact", "--ignored", test]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{test}: {text}");
    }
}
