//! Ways to train: optimisers, parameter groups, z-loss, rows that grow, weights carried over, fewer bits.

use std::path::Path;

use burn::tensor::Device;
use photon_core::model::Model;
use photon_train::config::RunConfig;
use photon_train::data::Packing;
use serde_json::Value;

use crate::programs::assert_says;
use crate::runs::{Run, number};
use crate::weights::Weights;

fn trained(overrides: &[&str]) -> Run {
    let run = Run::new(overrides);
    run.train().unwrap();
    run
}

fn steps(run: &Run) -> Vec<Value> {
    run.metrics().into_iter().filter(|line| line["kind"] == "step").collect()
}

fn evaluations(run: &Run) -> Vec<f64> {
    let lines = run.metrics().into_iter().filter(|line| line["kind"] == "evaluation");
    lines.map(|line| number(&line["held_out"], "bits_per_byte")).collect()
}

#[test]
fn every_optimizer_learns() {
    for overrides in [
        &["optimizer.kind=muon"][..],
        &["optimizer.kind=muon", "optimizer.muon={ learning_rate = 0.02, adjust = \"original\", nesterov = false }"],
        &["optimizer.schedule=linear", "z_loss=1e-3"],
        &["optimizer.schedule={ wsd = { decay_steps = 10, shape = \"one_minus_sqrt\" } }"],
    ] {
        let run = trained(&[&["steps=40", "eval.every_steps=40"], overrides].concat());
        let [before, after] = evaluations(&run).try_into().unwrap();
        assert!(after < 0.75 * before, "{overrides:?}: {before} became {after}");
    }
}

#[test]
fn a_trunk_with_a_decay_added_is_the_run_that_was_planned_so() {
    let wsd = |decay_steps: u64| format!("optimizer.schedule={{ wsd = {{ decay_steps = {decay_steps} }} }}");
    let run = trained(&["steps=10", &wsd(0)]);
    let mut config = run.config.clone();
    config.train.steps = 16;
    config.train.optimizer.schedule = Run::new(&[&wsd(4)]).config.train.optimizer.schedule;
    run.resume_accepting(&config, &["optimizer.schedule.wsd.decay_steps"]).unwrap();
    let planned = trained(&["steps=16", &wsd(4)]);
    assert_eq!(steps(&run), steps(&planned));
    let weights = |run: &Run| Weights::read(&run.out().join("checkpoints/last/model.safetensors"));
    assert!(weights(&run) == weights(&planned));
}

#[test]
fn frozen_parts_stay_and_nothing_is_remembered_of_them() {
    for others in
        [&["replicas=2", "micro_batch_size=1"][..], &["gradient_checkpointing=true"], &["optimizer.kind=muon"]]
    {
        let groups = "optimizer.groups=[{ select = \"encoders\", frozen = true }, { select = \"encoder 2\", frozen = false }, \
                      { select = \"embeddings\", frozen = true }]";
        let run = trained(&[&["steps=4", groups], others].concat());
        let folder = run.out().join("checkpoints/step-00000004");
        let trained = Weights::read(&folder.join("model.safetensors"));
        let fresh_folder = tempfile::tempdir().unwrap();
        let fresh_file = fresh_folder.path().join("fresh.safetensors");
        let fresh = Model::new(&run.config.model, run.config.train.seed, &Device::flex());
        photon_core::checkpoint::save_weights(&fresh_file, &fresh).unwrap();
        let fresh = Weights::read(&fresh_file);
        let memory = Weights::read(&folder.join("optimizer.safetensors"));
        for (name, tensor) in &fresh.tensors {
            let is_frozen = name.starts_with("encoders.0.") || name.contains("embedding");
            assert_eq!(trained.tensors[name] == *tensor, is_frozen, "{name}");
            assert_eq!(!memory.tensors.keys().any(|it| it.starts_with(&format!("{name}."))), is_frozen, "{name}");
        }
    }
}

#[test]
fn a_z_loss_is_told_apart_from_the_cross_entropy() {
    let (plain, with_z) = (trained(&["steps=30"]), trained(&["steps=30", "z_loss=0.05"]));
    let (plain, with_z) = (steps(&plain), steps(&with_z));
    assert_eq!(plain[0]["loss_nats"], with_z[0]["loss_nats"]);
    assert!(plain.iter().all(|line| number(line, "z") == 0.0));
    // Fresh logits are near zero: the log of the number of tokens, squared.
    assert!((number(&with_z[0], "z") - 257_f64.ln().powi(2)).abs() < 0.5, "{}", with_z[0]);
    assert!(number(&with_z[29], "z") < 0.8 * number(&with_z[0], "z"), "{}", with_z[29]);
    assert_ne!(plain[1]["loss_nats"], with_z[1]["loss_nats"]);
}

#[test]
fn rows_grow_and_evaluations_stay_as_they_are() {
    let stages = "curriculum=[{ until_step = 3, seq_len = 8 }, { until_step = 5, seq_len = 16, batch_size = 2 }]";
    let run = Run::new(&["steps=8", stages]);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut watch = crate::runs::StopsAfter { step: u64::MAX, stop: &stop, notices: Vec::new() };
    run.train_watched(&stop, &mut watch).unwrap();
    let shapes: Vec<(f64, f64)> = steps(&run)
        .windows(2)
        .map(|pair| (number(&pair[1], "seq_len"), number(&pair[1], "tokens") - number(&pair[0], "tokens")))
        .collect();
    // The first and the last window of an epoch may be shorter, so there are at most so many tokens.
    let expected =
        [(8.0, 128.0), (8.0, 128.0), (16.0, 32.0), (16.0, 32.0), (32.0, 128.0), (32.0, 128.0), (32.0, 128.0)];
    assert!(shapes.iter().zip(expected).all(|(a, b)| a.0 == b.0 && a.1 <= b.1 && a.1 > 0.7 * b.1), "{shapes:?}");
    let said = watch.notices.join("\n");
    assert_says(
        &said,
        &[
            "from step 0 on an update has 16 rows of 8 tokens",
            "from step 3 on an update has 2 rows of 16 tokens",
            "from step 5 on an update has 4 rows of 32 tokens",
        ],
    );
    let plain = trained(&["steps=8"]);
    assert_eq!(evaluations(&run)[0], evaluations(&plain)[0]);
    // Micro-batches hold as many tokens at every length: the cut changes sums by rounding only.
    let cut = trained(&["steps=8", stages, "micro_batch_size=1"]);
    for (a, b) in run.losses_nats().iter().zip(cut.losses_nats()) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

#[test]
fn documents_are_kept_apart_in_training_and_evaluation() {
    for (model, packing) in
        [(None, Packing::Documents), (Some(FLAT), Packing::Documents), (Some(FLAT), Packing::Stream)]
    {
        let run_of = |document_mask: bool, overrides: &[&str]| {
            let mut run = Run::of_clauses(&[&["steps=30", "eval.every_steps=30"], overrides].concat());
            if let Some(model) = model {
                run.config.model = crate::support::parse(model);
            }
            (run.config.train.data.packing, run.config.train.data.document_mask) = (packing, document_mask);
            run.train().unwrap();
            run
        };
        let (masked, plain) = (run_of(true, &[]), run_of(false, &[]));
        let [before, after] = evaluations(&masked).try_into().unwrap();
        assert!(after < 0.8 * before, "{before} became {after}");
        // The same rows, seen in another way.
        let tokens = |run: &Run| -> Vec<f64> { steps(run).iter().map(|line| number(line, "tokens")).collect() };
        assert_eq!(tokens(&masked), tokens(&plain));
        assert_ne!(evaluations(&masked)[0], evaluations(&plain)[0]);
        assert_ne!(masked.losses_nats()[0], plain.losses_nats()[0]);
        // However rows are dealt out, their documents go with them.
        let cut = run_of(true, &["replicas=2", "micro_batch_size=1"]);
        for (a, b) in masked.losses_nats().iter().zip(cut.losses_nats()) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }
}

#[test]
fn fewer_bits_learn_nearly_the_same_and_are_evaluated_in_all_of_them() {
    let plain = trained(&["steps=25"]);
    for precision in [
        "precision={ default = \"bf16\" }",
        "precision={ default = \"f16\" }",
        "precision={ stages = [{ stages = \"encoders\", compute = \"bf16\" }, { stages = \"decoder 1\", compute = \"f16\" }] }",
    ] {
        for others in [&[][..], &["gradient_checkpointing=true"]] {
            let run = trained(&[&["steps=25", precision], others].concat());
            assert_eq!(evaluations(&run)[0], evaluations(&plain)[0]);
            let (losses, expected) = (run.losses_nats(), plain.losses_nats());
            assert_ne!(losses, expected, "{precision}");
            for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
                // Three decimal digits of every product, and what comes of it in some twenty steps.
                let allowed = if step == 0 { 2e-3 } else { 5e-2 };
                assert!((loss - expected).abs() < allowed, "{precision} {others:?}, step {step}: {loss}, {expected}");
            }
        }
    }
}

#[test]
fn a_change_that_is_meant_is_accepted_and_noted() {
    let run = trained(&["steps=6"]);
    let mut config = run.config.clone();
    config.train.steps = 12;
    config.train.optimizer.learning_rate = 1e-3;
    config.train.z_loss = 1e-4;
    let refused = |config: &RunConfig, accept: &[&str]| run.resume_accepting(config, accept).unwrap_err().to_string();
    assert_says(
        &refused(&config, &["optimizer.learning_rate"]),
        &["z_loss: was absent, now 0.0001 (if it is meant: --accept z_loss)"],
    );
    run.resume_accepting(&config, &["optimizer.learning_rate", "z_loss"]).unwrap();
    let lines = steps(&run);
    assert!(number(&lines[6], "learning_rate") <= 1e-3 && number(&lines[6], "z") > 0.0);
    let note = std::fs::read_to_string(run.out().join("resumes.jsonl")).unwrap();
    let note: Value = serde_json::from_str(note.lines().last().unwrap()).unwrap();
    assert_eq!(
        note["accepted"],
        serde_json::json!([
            { "key": "optimizer.learning_rate", "was": "0.01", "now": "0.001" },
            { "key": "z_loss", "was": "absent", "now": "0.0001" },
        ])
    );
    // It is the run's own now.
    run.resume_accepting(&config, &[]).unwrap();
    // What cannot change cannot be accepted.
    config.train.seed = 9;
    config.train.batch_size = 2;
    let said = refused(&config, &["seed", "batch_size"]);
    assert_says(&said, &["seed: was 0, now 9", "batch_size: was 4, now 2"]);
    assert!(!said.contains("--accept"), "{said}");
}

#[test]
fn thawed_and_frozen_parts_go_on() {
    let groups = |frozen: &str| format!("optimizer.groups=[{{ select = \"{frozen}\", frozen = true }}]");
    let run = trained(&["steps=4", &groups("encoders")]);
    let mut config = run.config.clone();
    config.train.steps = 8;
    config.train.optimizer.groups[0].select = "decoders".parse().unwrap();
    run.resume_accepting(&config, &["optimizer.groups.0.select"]).unwrap();
    let memory = Weights::read(&run.out().join("checkpoints/step-00000008/optimizer.safetensors"));
    assert!(memory.tensors.keys().any(|name| name.starts_with("encoders.0.stack")));
    assert!(!memory.tensors.keys().any(|name| name.starts_with("decoders.")));
}

/// The tiny run with a model of its own.
fn with_model(model: &str, overrides: &[&str]) -> Run {
    let mut run = Run::new(overrides);
    run.config.model = crate::support::parse(model);
    run
}

const ONE_LEVEL: &str = "architecture = \"photon\"\nvocab_size = 257\nd_model = 16\n\
    [[levels]]\nchunk_len = 2\nd_model = 16\nencoder = { n_layers = 1, n_heads = 2, d_ff = 24 }\n\
    converter = { prefix_len = 1 }\n\
    decoder = { n_layers = 1, n_heads = 2, d_ff = 24, attention = { stream = { window = 12 } } }\n";
const FLAT: &str = "architecture = \"flat\"\nvocab_size = 257\nd_model = 16\n\
    [stack]\nn_layers = 2\nn_heads = 2\nd_ff = 24\n";

#[test]
fn a_run_begins_with_what_fits_of_another() {
    let fresh = trained(&["steps=2"]);
    for (name, model) in [("one level", ONE_LEVEL), ("flat", FLAT)] {
        let source = with_model(model, &["steps=60"]);
        source.train().unwrap();
        let folder = source.out().join("checkpoints/best");
        let run = Run::new(&["steps=4", &format!("init_from={:?}", folder.display().to_string())]);
        assert_eq!(run.config.train.init_from.as_deref().map(Path::new), Some(folder.as_path()));
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut watch = crate::runs::StopsAfter { step: 2, stop: &stop, notices: Vec::new() };
        run.train_watched(&stop, &mut watch).unwrap();
        assert_says(&watch.notices[0], &["parameters are carried over from", "fresh: ", "start_latent"]);
        let facts: Value = serde_json::from_slice(&std::fs::read(run.out().join("run.json")).unwrap()).unwrap();
        let facts = &facts["init_from"];
        assert_eq!(facts["folder"], folder.display().to_string());
        assert_eq!(facts["model_sha256"].as_str().unwrap().len(), 64);
        assert_eq!(
            facts["unplaced"].as_array().unwrap().iter().any(|it| it.as_str().unwrap().starts_with("stack.blocks.1.")),
            name == "flat"
        );
        // What was learnt is there, and after a stop the source is no longer needed.
        let (with, without) = (evaluations(&run)[0], evaluations(&fresh)[0]);
        assert!(with < without, "{name}: {with} bits/byte with what was carried over, {without} without");
        drop(source);
        run.resume(None).unwrap();
    }
}
