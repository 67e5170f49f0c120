//! A run that was stopped, killed or hindered goes on as if nothing had been, or says why it does not.

use std::fs;
use std::path::{Path, PathBuf};

use photon_train::checkpoint::{Checkpoints, TrainState, TrainingCheckpointError};
use photon_train::config::{EmaConfig, TrainConfig};
use photon_train::trainer::TrainError;
use serde_json::Value;

use crate::programs::assert_says;
use crate::runs::{Run, StopsAfter, Unwatched};
use crate::weights::Weights;

/// The folder of a checkpoint.
fn checkpoint(run: &Run, step: u64) -> PathBuf {
    run.out().join(format!("checkpoints/step-{step:08}"))
}

fn checkpoints_of(out: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(out.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Begins a run that stops after a step.
fn stopped(overrides: &[&str], after: u64) -> Run {
    stopped_run(Run::new(overrides), after)
}

fn stopped_run(run: Run, after: u64) -> Run {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let outcome = run.train_watched(&stop, &mut StopsAfter { step: after, stop: &stop, notices: Vec::new() }).unwrap();
    assert_eq!((outcome.steps, outcome.interrupted), (after, true));
    run
}

fn whole(overrides: &[&str]) -> Run {
    let run = Run::new(overrides);
    run.train().unwrap();
    run
}

/// Where a run stands, without the names of its event files, in which there is a time.
fn state_of(run: &Run) -> TrainState {
    let mut state = Checkpoints::of_run(&run.out()).newest_whole().unwrap().0.unwrap().state;
    state.files.clear();
    state
}

/// Checks that two runs have come to the same end by the same way, to the bit.
#[track_caller]
fn assert_same(run: &Run, expected: &Run) {
    assert_eq!(run.metrics(), expected.metrics());
    let state = state_of(run);
    assert_eq!(state, state_of(expected));
    assert_eq!(fs::read(run.out().join("samples.txt")).unwrap(), fs::read(expected.out().join("samples.txt")).unwrap());
    let step = format!("checkpoints/step-{:08}", state.step);
    let mut files: Vec<PathBuf> =
        ["last", "best"].map(|name| format!("checkpoints/{name}/model.safetensors").into()).into();
    files.extend(["model", "trained", "optimizer"].map(|name| format!("{step}/{name}.safetensors").into()));
    // There are weights beside the average only where there is one.
    for file in files.iter().filter(|file| !file.ends_with("trained.safetensors") || run.config.train.ema.is_some()) {
        assert!(
            Weights::read(&run.out().join(file)) == Weights::read(&expected.out().join(file)),
            "{} differs",
            file.display()
        );
    }
}

const GROUPS: &str = "optimizer.groups=[{ select = \"encoder 1\", frozen = true }, \
                      { select = \"head\", learning_rate_factor = 0.5, weight_decay = 0.0 }]";
const CURRICULUM: &str = "curriculum=[{ until_step = 4, seq_len = 8 }, { until_step = 33, seq_len = 16 }]";

#[test]
fn a_run_in_pieces_is_the_run_in_one() {
    // An epoch has some 56 steps: the pieces end within one, and after it.
    let plain = ["steps=80", "alpha=0.3", "checkpoint_every_steps=25", "eval.every_steps=20"];
    for (name, overrides) in [
        ("plain", &[][..]),
        ("two replicas", &["replicas=2", "micro_batch_size=2", "steps=40"]),
        ("average", &["ema={ decay = 0.9 }", "steps=40"]),
        ("muon", &["optimizer.kind=muon", "steps=40", GROUPS, "z_loss=1e-3"]),
        ("rows that grow", &["steps=40", CURRICULUM, "optimizer.schedule={ wsd = { decay_steps = 12 } }"]),
        ("fewer bits", &["steps=40", "precision={ default = \"bf16\" }", "gradient_checkpointing=true"]),
        ("skips", &["guards.spike_factor=1.1", "guards.max_skips_in_a_row=60"]),
    ] {
        let overrides = [&plain[..], overrides].concat();
        let expected = whole(&overrides);
        let n_skipped = expected.metrics().iter().filter(|line| line["kind"] == "skip").count();
        assert_eq!(n_skipped > 0, name == "skips", "{name}: {n_skipped} are skipped");
        let run = stopped(&overrides, 3);
        for piece in [Some(4), Some(30), Some(63), None] {
            run.resume(piece).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        println!("{name}");
        assert_same(&run, &expected);
        // There is nothing left to do.
        run.resume(None).unwrap();
        assert_same(&run, &expected);
    }
}

#[test]
fn a_run_that_keeps_documents_apart_in_pieces_is_the_run_in_one() {
    let plain = ["steps=40", "alpha=0.3", "checkpoint_every_steps=25", "eval.every_steps=20"];
    for others in [&[CURRICULUM, "replicas=2", "micro_batch_size=2"][..], &["gradient_checkpointing=true"]] {
        let overrides = [&plain[..], others].concat();
        let expected = Run::of_clauses(&overrides);
        expected.train().unwrap();
        let run = stopped_run(Run::of_clauses(&overrides), 3);
        for piece in [Some(4), Some(30), None] {
            run.resume(piece).unwrap();
        }
        assert_same(&run, &expected);
        // Another run it cannot become.
        let mut config = run.config.clone();
        config.train.data.document_mask = false;
        let said = run.resume_as(&config).unwrap_err().to_string();
        assert_says(&said, &["data.document_mask: was true, now absent"]);
    }
}

#[test]
fn a_run_stopped_before_its_first_step_goes_on() {
    let run = Run::new(&["steps=5"]);
    run.train_watched(&std::sync::atomic::AtomicBool::new(true), &mut Unwatched).unwrap();
    run.resume(None).unwrap();
    assert_same(&run, &whole(&["steps=5"]));
}

#[test]
fn where_there_is_nothing_to_go_on_from_a_run_begins() {
    let run = Run::new(&["steps=5"]);
    let (_, notices) = run.resume(None).unwrap();
    assert_says(&notices.join("\n"), &["has no checkpoint to go on from: beginning at step 0"]);
    assert_same(&run, &whole(&["steps=5"]));
    // Killed before its first checkpoint.
    fs::remove_dir_all(run.out().join("checkpoints")).unwrap();
    run.resume(None).unwrap();
    assert_same(&run, &whole(&["steps=5"]));
}

#[test]
fn replicas_are_those_of_the_beginning_where_the_config_leaves_them_open() {
    let fixed = ["steps=8", "replicas=2", "micro_batch_size=2"];
    let mut run = stopped(&fixed, 4);
    run.config.train.replicas = None;
    run.config.train.micro_batch_size = None;
    run.resume(None).unwrap();
    assert_same(&run, &whole(&fixed));
}

#[test]
fn steps_may_rise_and_the_learning_rate_follows() {
    let mut run = whole(&["steps=10", "checkpoint_every_steps=4"]);
    run.config.train.steps = 20;
    let (outcome, notices) = run.resume(None).unwrap();
    assert_eq!(outcome.steps, 20);
    assert_says(&notices.join("\n"), &["going on from step 10 of 20", "steps raised from 10 to 20"]);
    let long = whole(&["steps=20"]);
    let rates = |run: &Run| -> Vec<Value> {
        let lines = run.metrics().into_iter().filter(|line| line["kind"] == "step");
        lines.map(|mut line| line["learning_rate"].take()).collect()
    };
    assert_ne!(rates(&run)[..10], rates(&long)[..10]);
    assert_eq!(rates(&run)[10..], rates(&long)[10..]);
    // And not fall again.
    run.config.train.steps = 10;
    let error = run.resume(None).unwrap_err().to_string();
    assert_says(&error, &["cannot go on", "steps: was 20, now 10 (it may only rise)"]);
}

#[test]
fn what_decides_no_number_may_change() {
    let mut run = stopped(&["steps=12", "checkpoint_every_steps=3"], 5);
    run.config.train.checkpoint_every_steps = 2;
    run.config.train.checkpoints.keep_last = 1;
    run.config.train.guards.max_skips_in_a_row = 2;
    run.resume(None).unwrap();
    assert_same(&run, &whole(&["steps=12"]));
    assert_eq!(checkpoints_of(&run.out()), ["best", "last", "step-00000012"]);
}

#[test]
fn another_config_or_text_is_refused_with_what_differs() {
    let run = stopped(&["steps=6"], 3);
    let before = fs::read(run.out().join("metrics.jsonl")).unwrap();
    let refused = |change: &dyn Fn(&mut TrainConfig)| {
        let mut config = run.config.clone();
        change(&mut config.train);
        let error = run.resume_as(&config).unwrap_err();
        assert!(matches!(error, TrainError::Checkpoint(TrainingCheckpointError::Differs { .. })), "{error}");
        error.to_string()
    };
    let said = refused(&|train| {
        train.optimizer.learning_rate = 0.5;
        train.batch_size = 2;
        train.seed = 9;
        train.replicas = Some(2);
        train.ema = Some(EmaConfig { decay: 0.5 });
    });
    assert_says(
        &said,
        &[
            "optimizer.learning_rate: was 0.01, now 0.5",
            "batch_size: was 4, now 2",
            "seed: was 0, now 9",
            "replicas: was 1, now 2",
            "ema.decay: was absent, now 0.5",
            "another --out",
        ],
    );
    assert!(!said.contains("data") && !said.contains("eval"), "{said}");

    let text = run.folder.path().join("text.txt");
    let whole_text = fs::read_to_string(&text).unwrap();
    fs::write(&text, whole_text.replacen("Ishmael", "Leviath", 1)).unwrap();
    assert_says(&refused(&|_| ()), &["data: was ", "other texts"]);
    // The same text elsewhere is the same text.
    let moved = run.folder.path().join("moved.txt");
    fs::write(&moved, whole_text).unwrap();
    assert_eq!(fs::read(run.out().join("metrics.jsonl")).unwrap(), before);
    let mut config = run.config.clone();
    config.train.data.paths = vec![moved.display().to_string()];
    run.resume_as(&config).unwrap();
    assert_same(&run, &whole(&["steps=6"]));
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used() {
    let overrides = ["steps=12", "checkpoint_every_steps=3", "eval.every_steps=4", "ema={ decay = 0.9 }"];
    let expected = whole(&overrides);
    for file in [
        "model.safetensors",
        "trained.safetensors",
        "optimizer.safetensors",
        "config.toml",
        "tokenizer.json",
        "run.toml",
        "state.toml",
        "manifest.toml",
    ] {
        for damage in [truncate as fn(&Path), flip_a_bit, remove] {
            let run = stopped(&overrides, 10);
            assert_eq!(state_of(&run).step, 10);
            damage(&checkpoint(&run, 10).join(file));
            let (_, notices) = run.resume(None).unwrap_or_else(|error| panic!("{file}: {error}"));
            let said = notices.join("\n");
            assert_says(&said, &["going on from step 9", "warning: a checkpoint is damaged", "step-00000010"]);
            // A list that has rotted names another file, whose hash it has wrong.
            assert!(file == "manifest.toml" || said.contains(&format!("{file} ")), "{said}");
            assert_same(&run, &expected);
            assert!(checkpoints_of(&run.out()).contains(&"damaged-step-00000010".to_owned()));
        }
    }
}

fn truncate(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}

fn flip_a_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(path, bytes).unwrap();
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

#[test]
fn a_run_without_a_whole_checkpoint_does_not_begin_anew_by_itself() {
    let run = stopped(&["steps=12", "checkpoint_every_steps=3"], 10);
    for step in [9, 10] {
        truncate(&checkpoint(&run, step).join("model.safetensors"));
    }
    let error = run.resume(None).unwrap_err().to_string();
    assert_says(&error, &["no checkpoint that is whole", "step-00000009", "step-00000010", "model.safetensors has"]);
    assert!(!run.metrics().is_empty());
}

#[test]
fn checkpoints_stay_as_the_config_says() {
    let run = whole(&[
        "steps=20",
        "checkpoint_every_steps=3",
        "eval.every_steps=100",
        "checkpoints={ keep_last = 2, keep_every_steps = 6 }",
    ]);
    let expected = ["best", "last", "step-00000006", "step-00000012", "step-00000018", "step-00000020"];
    assert_eq!(checkpoints_of(&run.out()), expected);

    // A rate that spoils the weights after the first evaluation: the best checkpoint is an old one.
    let run = whole(&[
        "steps=12",
        "checkpoint_every_steps=3",
        "eval.every_steps=4",
        "optimizer.learning_rate=3.0",
        "optimizer.warmup_steps=12",
        "guards.spike_factor=inf",
    ]);
    let best = state_of(&run).best.unwrap().step;
    assert!(best < 9, "{best}");
    let best_folder = format!("step-{best:08}");
    assert_eq!(checkpoints_of(&run.out()), ["best", "last", &best_folder, "step-00000009", "step-00000012"]);
    let weights =
        |folder: &str| fs::read(run.out().join("checkpoints").join(folder).join("model.safetensors")).unwrap();
    assert!(weights("best") == weights(&best_folder) && weights("last") == weights("step-00000012"));
}

#[test]
fn a_skipped_update_leaves_weights_and_memory_untouched() {
    let overrides = [
        "steps=80",
        "alpha=0.3",
        "checkpoint_every_steps=1",
        "checkpoints.keep_last=100",
        "guards={ spike_factor = 1.1, max_skips_in_a_row = 60 }",
    ];
    let run = whole(&[&overrides[..], &["ema={ decay = 0.9 }"]].concat());
    let metrics = run.metrics();
    let mut n_checked = [0, 0];
    for line in metrics.iter().filter(|line| line["kind"] != "evaluation" && line["step"] != 1) {
        let step = line["step"].as_u64().unwrap();
        let is_skip = line["kind"] == "skip";
        for file in ["model.safetensors", "trained.safetensors", "optimizer.safetensors"] {
            let read = |step: u64| Weights::read(&checkpoint(&run, step).join(file));
            assert_eq!(read(step) == read(step - 1), is_skip, "{file} after step {step}");
        }
        n_checked[usize::from(is_skip)] += 1;
    }
    assert!(n_checked.iter().all(|&n| n > 2), "{n_checked:?}");
    let skip = metrics.iter().find(|line| line["kind"] == "skip").unwrap();
    assert_eq!(skip["reason"], "gradient_spike");
    assert!(skip["gradient_norm"].as_f64().unwrap() > 1.1 * skip["usual_norm"].as_f64().unwrap());
}
