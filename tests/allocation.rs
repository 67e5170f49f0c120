//! What caches say they hold is what the process holds for them, how much a prefill takes beside them, and that updates
//! leave nothing behind. A program of its own, for it counts every allocation.

#![expect(
    clippy::unwrap_used,
    reason = "clippy takes only the functions marked as tests for tests, not what they share"
)]

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Tensor};
use peak_alloc::PeakAlloc;
use photon_core::config::ModelConfig;
use photon_core::config_file;
use photon_core::infer_config::InferConfig;
use photon_core::model::Model;
use photon_core::state::CacheUse;
use photon_infer::session::Session;
use photon_train::config::OptimizerConfig;
use photon_train::data::Batch;
use photon_train::replicas::Replicas;
use photon_train::step::Learner;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Held by the test that counts.
static COUNTING: Mutex<()> = Mutex::new(());

const FLAT: &str = "architecture = \"flat\"\nvocab_size = 50\nd_model = 64\n\
                    [stack]\nn_layers = 2\nn_heads = 2\nd_ff = 32\n";

const PHOTON: &str = "architecture = \"photon\"\nvocab_size = 50\nd_model = 64\n\
    [[levels]]\nchunk_len = 4\nd_model = 64\n\
    encoder = { n_layers = 2, n_heads = 2, d_ff = 32 }\n\
    converter = { prefix_len = 1 }\n\
    decoder = { n_layers = 2, n_heads = 2, d_ff = 32, attention = { stream = { window = 64 } } }\n";

const PICKED: &str = "architecture = \"flat\"\nvocab_size = 50\nd_model = 64\n\
    [stack]\nn_layers = 2\nn_heads = 2\nd_ff = 32\n\
    attention = { sparse = { window = 32, sinks = 4, block = 16, pick = { top = 2 } } }\n";

const PLANS: [(&str, &str, &str); 7] = [
    ("flat, f32", FLAT, ""),
    ("flat, f16", FLAT, "[[caches]]\nstages = \"all\"\nkeys = \"f16\"\nvalues = \"f16\""),
    ("flat, int8 and int4", FLAT, "[[caches]]\nstages = \"all\"\nkeys = \"int8\"\nvalues = \"int4\"\nresidual = 20"),
    ("flat, window", FLAT, "[[caches]]\nstages = \"all\"\npolicy = { window = { recent = 100, sinks = 4 } }"),
    (
        "flat, random",
        FLAT,
        "[[caches]]\nstages = \"all\"\nkeys = \"int4\"\nvalues = \"int4\"\npolicy = { random = { budget = { share = 0.5 } } }",
    ),
    ("photon, int8", PHOTON, "[[caches]]\nstages = \"all\"\nkeys = \"int8\"\nvalues = \"int8\""),
    ("picked blocks in host memory", PICKED, "[[caches]]\nstages = \"all\"\noffload = { resident_blocks = 4 }"),
];

fn model_config(toml: &str) -> ModelConfig {
    config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap()
}

/// The frame of a state: lists of layers and rows, and its tensors without their data, each of which takes 640 bytes
/// where the build has WebGPU.
const FRAME_BYTES: usize = 120 * size_of::<Tensor<4>>();

#[test]
fn the_bytes_of_caches_are_those_that_the_process_gives_back() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, model, infer) in PLANS {
        let config = model_config(model);
        let plan = toml::from_str::<InferConfig>(infer).unwrap().plan(&config).unwrap();
        let model = Model::new(&config, 1, &Device::flex());
        let (mut state, _) = model.begin_with(2, &plan);
        // Odd pieces and single tokens, so that room was grown and given back.
        let mut n_tokens = 0;
        for n_new in [301, 1, 1, 64, 1, 500, 7] {
            let tokens: Vec<u32> = (0..n_new).map(|i| (n_tokens + i) % 50).collect();
            drop(model.extend(&mut state, &[0, 1], &[tokens.clone(), tokens]));
            n_tokens += n_new;
        }
        let sum = |of: fn(&CacheUse) -> usize| state.cache_use().iter().map(of).sum::<usize>();
        let on_host = sum(|stage| stage.offload.map_or(0, |tier| tier.host_bytes));
        let stated = state.bytes() + sum(|stage| stage.notes_bytes) + on_host;
        // Each of the many small blocks in host memory has a frame of its own.
        let most = stated + FRAME_BYTES + on_host / 8;
        let before = ALLOCATED.current_usage();
        drop(state);
        let held = before - ALLOCATED.current_usage();
        println!("{name}: {stated} bytes stated, {held} held");
        assert!((stated..=most).contains(&held), "{name}: {held} bytes were given back, {stated} stated");
    }
}

#[test]
fn what_a_prefill_takes_beside_the_caches_does_not_grow_with_the_batch() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let config = model_config(PHOTON);
    let plan = InferConfig::default().plan(&config).unwrap();
    let model = Model::new(&config, 1, &Device::flex());
    let beside_caches = |n_rows: usize| {
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let (session, _) = Session::begin(&model, &plan, &vec![vec![7; 300]; n_rows]).unwrap();
        ALLOCATED.peak_usage() - before - session.state().bytes()
    };
    beside_caches(1);
    let (few, many) = (beside_caches(32), beside_caches(512));
    println!("{few} bytes with 32 rows, {many} with 512");
    // Lists of tokens and logits are there once a row.
    assert!(many < 2 * few, "{few} bytes with 32 rows, {many} with 512");
}

#[test]
fn updates_leave_nothing_behind() {
    const N_UPDATES: usize = 40;
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let tokens: Vec<u32> = (0..256).map(|index| index * 7 % 50).collect();
    let batch = Batch::full(tokens, 64);
    for (name, toml) in [("flat", FLAT), ("photon", PHOTON)] {
        for (checkpointing, n_replicas) in [(false, 1), (false, 2), (true, 2)] {
            let device = Device::flex().autodiff();
            let device = if checkpointing { device.gradient_checkpointing() } else { device };
            let mut model = Model::new(&model_config(toml), 1, &device);
            let replicas = Replicas::new(n_replicas).unwrap();
            let mut learner = Learner::new(&model, &OptimizerConfig::default(), 0.0, 1, replicas);
            let mut usage = Vec::new();
            for _ in 0..2 {
                for _ in 0..N_UPDATES {
                    (model, _) = learner.learn(model, &batch, 1e-3);
                }
                usage.push(ALLOCATED.current_usage());
            }
            let kept = usage[1].saturating_sub(usage[0]) / N_UPDATES;
            let case = format!("{name}, {n_replicas} replicas, checkpointing {checkpointing}");
            println!("{case}: {kept} bytes an update stay");
            assert!(kept < 100, "{case}: {kept} bytes an update stay");
        }
    }
}
