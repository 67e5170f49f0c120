//! Training learns, repeats itself, records itself, and stops as it should.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Device;
use photon_core::checkpoint::Checkpoint;
use photon_core::config::ModelConfig;
use photon_core::device::DeviceChoice;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use photon_train::config::{OptimizerConfig, RunConfig};
use photon_train::data::{Batch, Prepared, prepare};
use photon_train::eval::evaluate;
use photon_train::record::Existing;
use photon_train::replicas::Replicas;
use photon_train::step::Learner;
use photon_train::trainer::{EvalReport, Observer, Outcome, RunPlace, StepReport, TrainError, train};
use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{load, write_tiny_run};
use crate::support::{Case, flat_cases, parse, photon_case, random_rows};

/// A run in a folder of its own.
struct Run {
    folder: TempDir,
    config: RunConfig,
}

impl Run {
    fn new(overrides: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        let config = RunConfig::load(&write_tiny_run(folder.path()), &overrides).unwrap();
        Self { folder, config }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn data(&self) -> Prepared {
        let cache = self.folder.path().join("tokens");
        prepare(&self.config.train.data, &Tokenizer::bytes(), &cache, self.config.train.seq_len, &|_| {}).unwrap()
    }

    fn train_watched(&self, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
        let device = DeviceChoice::Cpu.open().unwrap();
        let place = RunPlace { folder: &self.out(), existing: Existing::Refuse, stop, observer };
        train(&self.config, &Tokenizer::bytes(), self.data(), &device, place)
    }

    fn train(&self) -> Result<Outcome, TrainError> {
        self.train_watched(&AtomicBool::new(false), &mut Unwatched)
    }

    /// The lines of `metrics.jsonl` without how long they took.
    fn metrics(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.out().join("metrics.jsonl")).unwrap();
        let line = |line| {
            let mut value: Value = serde_json::from_str(line).unwrap();
            value.as_object_mut().unwrap().remove("tokens_per_sec");
            value
        };
        text.lines().map(line).collect()
    }

    fn losses_nats(&self) -> Vec<f64> {
        self.metrics().iter().filter(|line| line["kind"] == "step").map(|line| number(line, "loss_nats")).collect()
    }
}

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {line}"))
}

struct Unwatched;

impl Observer for Unwatched {
    fn step(&mut self, _: &StepReport) {}
    fn evaluation(&mut self, _: &EvalReport) {}
}

/// Wide enough to learn a few tokens by heart.
fn rote_cases() -> Vec<Case> {
    let level = "d_model = 32\nchunk_len = 2\nconverter = { prefix_len = 1 }\n\
                 encoder = { n_layers = 1, n_heads = 2, d_ff = 64 }\n\
                 decoder = { n_layers = 1, n_heads = 2, d_ff = 64, attention = { stream = { window = 9 } } }\n";
    let photon = |n_levels: usize| Case {
        name: format!("{n_levels} levels"),
        config: parse(&format!(
            "architecture = \"photon\"\nvocab_size = 13\nd_model = 32\n{}",
            format!("[[levels]]\n{level}").repeat(n_levels)
        )),
    };
    let flat = Case {
        name: "flat".into(),
        config: parse(
            "architecture = \"flat\"\nvocab_size = 13\nd_model = 32\n\
             [stack]\nn_layers = 2\nn_heads = 2\nd_ff = 64\n",
        ),
    };
    vec![photon(2), photon(3), flat]
}

#[test]
fn one_batch_is_learnt_by_heart() {
    const MAX_STEPS: usize = 400;
    // One row: of several, nobody could tell the first tokens apart.
    let batch = Batch::full(random_rows(1, 64, 3).remove(0), 64);
    for case in rote_cases() {
        let optimizer = OptimizerConfig { weight_decay: 0.0, ..Default::default() };
        let mut model = Model::new(&case.config, 1, &Device::flex().autodiff());
        let mut learner = Learner::new(&model, &optimizer, 0.0, 1, Replicas::new(1).unwrap());
        let mut losses = Vec::new();
        while losses.last().is_none_or(|&nats| nats >= 0.05) {
            assert!(losses.len() < MAX_STEPS, "{}: {losses:?}", case.name);
            let update;
            (model, update) = learner.learn(model, &batch, 1e-2);
            losses.push(update.cross_entropy_nats);
        }
        // Fresh weights know nothing: they give every token the same chance, or nearly.
        assert!((losses[0] - 13_f64.ln()).abs() < 0.1, "{}: {}", case.name, losses[0]);
    }
}

#[test]
fn one_seed_gives_one_run_and_another_seed_another() {
    // Two replicas on threads of their own must not change the order of sums either.
    for replicas in ["replicas=1", "replicas=2"] {
        let overrides = ["steps=10", "eval.every_steps=5", "seed=7", replicas, "micro_batch_size=2"];
        let [first, second] = [(); 2].map(|()| Run::new(&overrides));
        let other = Run::new(&[&overrides[..], &["seed=8"]].concat());
        for run in [&first, &second, &other] {
            run.train().unwrap();
        }
        assert_eq!(first.metrics().len(), 10 + 3);
        assert_eq!(first.metrics(), second.metrics());
        assert_ne!(first.losses_nats(), other.losses_nats());
    }
}

#[test]
fn losses_do_not_depend_on_the_number_of_replicas() {
    let case = photon_case(2, "\"full\"", "{ stream = { window = 5 } }");
    for (config, alpha) in [(case.config, 0.3), (flat_cases().remove(0).config, 0.0)] {
        let alone = losses_with(&config, alpha, 1);
        let together = losses_with(&config, alpha, 2);
        for (step, (a, b)) in alone.iter().zip(&together).enumerate() {
            // Gradients are added in one order; products inside a replica may be cut differently.
            assert!((a - b).abs() <= 1e-5, "step {step}: {a} alone, {b} together");
        }
        assert!(alone[9] < alone[0], "{alone:?}");
    }
}

/// Losses of ten updates on the same rows, one of them padded, in micro-batches of two rows.
fn losses_with(config: &ModelConfig, alpha: f64, n_replicas: usize) -> Vec<f64> {
    let mut model = Model::new(config, 1, &Device::flex().autodiff());
    let optimizer = OptimizerConfig::default();
    let mut learner = Learner::new(&model, &optimizer, alpha, 2, Replicas::new(n_replicas).unwrap());
    let mut batch = Batch::full(random_rows(6, 12, 5).concat(), 12);
    batch.lens[4] = 7;
    let mut losses = Vec::new();
    for _ in 0..10 {
        let update;
        (model, update) = learner.learn(model, &batch, 1e-2);
        losses.push(update.cross_entropy_nats);
    }
    losses
}

/// Looks into the run folder when the first evaluation is told of.
struct LooksAtStart {
    folder: PathBuf,
    looked: bool,
}

impl Observer for LooksAtStart {
    fn step(&mut self, _: &StepReport) {
        assert!(self.looked, "the first evaluation comes before the first step");
    }

    fn evaluation(&mut self, report: &EvalReport) {
        if !self.looked {
            assert_eq!(report.step, 0);
            assert!(self.folder.join("run.toml").is_file());
            assert!(self.folder.join("run.json").is_file());
            assert!(!self.folder.join("checkpoints").exists());
        }
        self.looked = true;
    }
}

#[test]
fn a_run_records_what_was_asked_for_and_what_came_of_it() {
    let run = Run::new(&["steps=30", "seed=3"]);
    let mut observer = LooksAtStart { folder: run.out(), looked: false };
    let outcome = run.train_watched(&AtomicBool::new(false), &mut observer).unwrap();
    assert!(!outcome.interrupted && outcome.steps == 30);

    assert_eq!(RunConfig::load(&run.out().join("run.toml"), &[]).unwrap(), run.config);
    let facts: Value = serde_json::from_slice(&std::fs::read(run.out().join("run.json")).unwrap()).unwrap();
    assert_eq!(facts["seed"], 3);
    assert_eq!(facts["device"], "cpu");
    assert_eq!(facts["held_out_tokens"], run.data().valid.len());
    assert_eq!(facts["parameters"], burn::module::Module::num_params(&load(&run.out().join("checkpoints/last")).model));
    assert!(facts["commit"].as_str().is_some_and(|commit| !commit.is_empty()));

    let metrics = run.metrics();
    let steps: Vec<f64> =
        metrics.iter().filter(|line| line["kind"] == "step").map(|line| number(line, "step")).collect();
    assert_eq!(steps, (1..=30).map(f64::from).collect::<Vec<_>>());
    let evaluations: Vec<&Value> = metrics.iter().filter(|line| line["kind"] == "evaluation").collect();
    assert_eq!(evaluations.iter().map(|line| number(line, "step")).collect::<Vec<_>>(), [0.0, 20.0, 30.0]);
    for line in metrics.iter().filter(|line| line["kind"] == "step") {
        for key in ["tokens", "loss_nats", "bits_per_byte", "reconstruction", "gradient_norm", "learning_rate"] {
            assert!(number(line, key).is_finite(), "{line}");
        }
    }

    let samples = std::fs::read_to_string(run.out().join("samples.txt")).unwrap();
    for (step, evaluation) in [0, 20, 30].into_iter().zip(&evaluations) {
        let sample = evaluation["sample"].as_str().unwrap();
        assert!(sample.starts_with("The "), "{sample}");
        assert!(samples.contains(&format!("--- step {step}\n{sample}\n")), "{samples}");
    }
    assert_events(&run.out().join("tensorboard"), &["train/loss_nats", "held_out/bits_per_byte"]);

    let best = evaluations[1..].iter().map(|line| number(&line["held_out"], "bits_per_byte")).fold(f64::MAX, f64::min);
    assert_eq!(outcome.best_bits_per_byte, best);
    assert_eq!(outcome.last.bits_per_byte, number(&evaluations[2]["held_out"], "bits_per_byte"));
    for (checkpoint, reported) in [("best", best), ("last", outcome.last.bits_per_byte)] {
        let found = held_out_bits(&run, &run.out().join("checkpoints").join(checkpoint));
        // The same products, perhaps cut into other pieces by the threads.
        assert!((found - reported).abs() < 1e-6, "{checkpoint}: {found}, reported {reported}");
    }
}

fn held_out_bits(run: &Run, checkpoint: &Path) -> f64 {
    let train = &run.config.train;
    let replicas = Replicas::new(1).unwrap();
    let valid = run.data().valid;
    let Checkpoint { model, tokenizer } = load(checkpoint);
    evaluate(&model, &tokenizer, &valid, train.seq_len, train.eval.max_tokens, &replicas).bits_per_byte
}

/// One file of events, whole records, with a curve of each name.
fn assert_events(folder: &Path, curves: &[&str]) {
    let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    assert!(files[0].display().to_string().contains("tfevents"), "{files:?}");
    let bytes = std::fs::read(&files[0]).unwrap();
    for curve in curves {
        assert!(bytes.windows(curve.len()).any(|window| window == curve.as_bytes()), "no {curve}");
    }
    // A record: length, its checksum, the event, the event's checksum.
    let mut at = 0;
    while at < bytes.len() {
        let len = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        at += 8 + 4 + len + 4;
    }
    assert_eq!(at, bytes.len(), "the last record is cut short");
}

/// Sets the flag after a step.
struct StopsAfter<'a> {
    step: u64,
    stop: &'a AtomicBool,
}

impl Observer for StopsAfter<'_> {
    fn step(&mut self, report: &StepReport) {
        if report.step == self.step {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluation(&mut self, _: &EvalReport) {}
}

#[test]
fn a_run_that_is_stopped_keeps_its_weights() {
    let run = Run::new(&["steps=50", "eval.every_steps=3"]);
    let stop = AtomicBool::new(false);
    let outcome = run.train_watched(&stop, &mut StopsAfter { step: 3, stop: &stop }).unwrap();
    assert!(outcome.interrupted);
    assert_eq!(outcome.steps, 3);
    assert_eq!(run.losses_nats().len(), 3);
    // They are those of the third step, which is evaluated too.
    let found = held_out_bits(&run, &run.out().join("checkpoints/last"));
    assert!((found - outcome.last.bits_per_byte).abs() < 1e-6, "{found}, reported {outcome:?}");
    assert_ne!(number(&run.metrics()[0]["held_out"], "bits_per_byte"), outcome.last.bits_per_byte);
}

#[test]
fn a_run_stopped_before_its_first_step_still_has_weights() {
    let run = Run::new(&[]);
    let outcome = run.train_watched(&AtomicBool::new(true), &mut Unwatched).unwrap();
    assert!(outcome.interrupted);
    assert_eq!(outcome.steps, 0);
    load(&run.out().join("checkpoints/last"));
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run() {
    for (overrides, at_step) in [
        // The first update ruins the weights, the second step notices.
        (&["steps=20", "eval.every_steps=1000"][..], 2),
        // Noticed by the evaluation before anything is saved.
        (&["steps=1", "eval.sample_tokens=0"], 1),
        (&["steps=1"], 1),
    ] {
        let run = Run::new(&[overrides, &["optimizer.learning_rate=1e30", "optimizer.warmup_steps=1"]].concat());
        match run.train() {
            Err(TrainError::NotFinite { step }) => assert_eq!(step, at_step),
            other => panic!("{overrides:?}: {other:?}"),
        }
        assert!(!run.out().join("checkpoints").exists());
    }
}

#[test]
fn a_run_that_only_gets_worse_still_has_a_best_checkpoint() {
    let run = Run::new(&["steps=3", "optimizer.learning_rate=30.0", "optimizer.warmup_steps=1"]);
    let outcome = run.train().unwrap();
    let fresh = number(&run.metrics()[0]["held_out"], "bits_per_byte");
    assert!(outcome.last.bits_per_byte > fresh, "the rate is high enough to do harm");
    assert_eq!(outcome.best_bits_per_byte, outcome.last.bits_per_byte);
    load(&run.out().join("checkpoints/best"));
}
