//! What a run shows of itself, while it goes and afterwards.

use std::fs;
use std::path::{Path, PathBuf};

use photon_core::accounting::model_cost;
use photon_core::tokenizer::Tokenizer;
use photon_train::config::RunConfig;
use photon_train::data::prepare;
use photon_train::eval::evaluate;
use photon_train::histogram::{Spread, stage_histograms};
use photon_train::replicas::Replicas;
use serde_json::Value;
use tempfile::TempDir;

use crate::data::write_mixed_run;
use crate::programs::{assert_says, complaint_of, load, photon_train, set, stdout_of, write_tiny_run};
use crate::runs::{Run, number};

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Runs of the program in a folder of their own.
struct Watched {
    folder: TempDir,
    config: PathBuf,
}

impl Watched {
    fn new(write: impl Fn(&Path) -> PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = write(folder.path());
        Self { folder, config }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs it; what it said on stderr.
    fn run(&self, name: &str, overrides: &[&str], args: &[&str]) -> String {
        let mut command = photon_train(["run", &text(&self.config), "--out", &text(&self.out(name))]);
        let assert = command.args(set(overrides)).args(args).assert().success();
        String::from_utf8(assert.get_output().stderr.clone()).unwrap()
    }

    fn metrics(&self, name: &str, kind: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.out(name).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["kind"] == kind).collect()
    }
}

#[test]
fn each_source_is_evaluated_beside_the_whole() {
    let watched = Watched::new(write_mixed_run);
    let said = watched.run("run", &["steps=4", "eval.every_steps=2", "eval.max_tokens=256"], &[]);
    let last = watched.metrics("run", "evaluation").pop().unwrap();
    let sources = last["sources"].as_object().unwrap();
    assert_eq!(sources.keys().collect::<Vec<_>>(), ["book", "lines"]);
    let bits = |name: &str| number(&last["sources"][name], "bits_per_byte");
    assert_says(&said, &[&format!("(best); book {:.4}, lines {:.4}", bits("book"), bits("lines"))]);

    let config = RunConfig::load(&watched.out("run").join("run.toml"), &[]).unwrap();
    let tokens = watched.folder.path().join(".tokens");
    let data = prepare(&config.train.data, &Tokenizer::bytes(), &tokens, config.train.seq_len, &|_| {}).unwrap();
    let model = load(&watched.out("run").join("checkpoints/last")).model;
    let replicas = Replicas::new(1).unwrap();
    for (name, store) in &data.valid_sources {
        // Both together look at as many tokens as the whole.
        let found = evaluate(&model, &Tokenizer::bytes(), store, config.train.seq_len, 128, &replicas);
        assert_eq!(found.n_tokens as f64, number(&last["sources"][name], "n_tokens"));
        assert!((found.bits_per_byte - bits(name)).abs() < 1e-6, "{name}: {found:?}, told {}", bits(name));
    }
    assert_ne!(bits("book"), bits("lines"));
}

#[test]
fn a_text_alone_is_no_source() {
    let run = Run::new(&["steps=2"]);
    run.train().unwrap();
    assert!(run.metrics().iter().all(|line| line["sources"].is_null()));
}

#[test]
fn the_norms_of_stages_make_up_the_norm_of_all() {
    let run = Run::new(&["steps=5"]);
    run.train().unwrap();
    let metrics = run.metrics();
    let steps: Vec<&Value> = metrics.iter().filter(|line| line["kind"] == "step").collect();
    for line in steps {
        let stages = line["stage_gradient_norms"].as_object().unwrap();
        let names = ["encoder embedding", "encoder 1", "encoder 2", "start latent", "decoder 1", "decoder 2"];
        for name in names.into_iter().chain(["decoder embedding", "head"]) {
            assert!(stages[name].as_f64().unwrap() > 0.0, "{name}: {line}");
        }
        assert_eq!(stages.len(), 8, "{line}");
        let all = stages.values().map(|norm| norm.as_f64().unwrap().powi(2)).sum::<f64>().sqrt();
        assert!((all - number(line, "gradient_norm")).abs() < 1e-9 * all, "{line}");
    }
}

#[test]
fn speed_is_told_as_a_share_of_the_peak() {
    let watched = Watched::new(write_tiny_run);
    watched.run("given", &["steps=2"], &["--peak-tflops", "0.5"]);
    let config = RunConfig::load(&watched.config, &[]).unwrap();
    let flops = model_cost(&config.model, config.train.seq_len).training_flops_per_token();
    for line in watched.metrics("given", "step") {
        let expected = number(&line, "tokens_per_sec") * flops / 0.5e12;
        assert!((number(&line, "share_of_peak") - expected).abs() < 1e-9 * expected, "{line}");
        if cfg!(target_os = "linux") {
            let memory = &line["memory"];
            assert!(number(memory, "peak_bytes") >= number(memory, "resident_bytes"), "{line}");
            assert!(number(memory, "resident_bytes") > 1e6, "{line}");
        }
    }
    let facts: Value = serde_json::from_slice(&fs::read(watched.out("given").join("run.json")).unwrap()).unwrap();
    assert_eq!(facts["peak"], serde_json::json!({ "flops_per_sec": 0.5e12, "source": "given" }));

    let said = watched.run("measured", &["steps=1"], &[]);
    assert_says(&said, &["peak: ", "GFLOP/s, measured by products of"]);
    let facts: Value = serde_json::from_slice(&fs::read(watched.out("measured").join("run.json")).unwrap()).unwrap();
    assert!(number(&facts["peak"], "flops_per_sec") > 1e8, "{facts}");
    assert!(number(&watched.metrics("measured", "step")[0], "share_of_peak") > 0.0);
}

#[test]
fn a_log_has_a_line_every_so_many_steps() {
    let watched = Watched::new(write_tiny_run);
    let said = watched.run("run", &["steps=25"], &["--log-every-steps", "10"]);
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("step ") && line.contains("/25: ")).collect();
    assert_eq!(lines.len(), 2, "{said}");
    for (line, step) in lines.iter().zip([10, 20]) {
        assert!(line.starts_with(&format!("step {step}/25: loss ")), "{line}");
        assert_says(
            line,
            &[" nats, ", " bits/byte, lr ", ", gradient norm ", " tokens/s (", " % of peak), ", ", ETA "],
        );
    }
    assert!(!said.contains('\u{1b}'), "{said}");
}

#[test]
fn a_dashboard_needs_a_terminal() {
    let watched = Watched::new(write_tiny_run);
    let mut command = photon_train(["run", &text(&watched.config), "--out", &text(&watched.out("run"))]);
    command.args(["--display", "dashboard"]);
    assert_says(&complaint_of(command), &["--display dashboard: stderr is no terminal"]);
    assert!(!watched.out("run").exists());
}

#[test]
fn events_hold_curves_texts_and_histograms() {
    let watched = Watched::new(write_mixed_run);
    for (name, overrides) in [("with", &["steps=2"][..]), ("without", &["steps=2", "eval.histograms=false"])] {
        watched.run(name, overrides, &[]);
        let entry = fs::read_dir(watched.out(name).join("tensorboard")).unwrap().next().unwrap().unwrap();
        let bytes = fs::read(entry.path()).unwrap();
        let has = |tag: &str| bytes.windows(tag.len()).any(|window| window == tag.as_bytes());
        for tag in ["gradient_norm/encoder 1", "train/share_of_peak", "held_out_bits_per_byte/book", "sample", "text"] {
            assert!(has(tag), "no {tag}");
        }
        for tag in ["weights/encoder 1", "gradients/head"] {
            assert_eq!(has(tag), name == "with", "{tag}");
        }
    }
    // What is recorded decides no number.
    assert_eq!(
        watched.metrics("with", "step").iter().map(|line| number(line, "loss_nats")).collect::<Vec<_>>(),
        watched.metrics("without", "step").iter().map(|line| number(line, "loss_nats")).collect::<Vec<_>>()
    );
}

#[test]
fn histograms_count_every_weight_of_a_stage() {
    let watched = Watched::new(write_tiny_run);
    watched.run("run", &["steps=1"], &[]);
    let config = RunConfig::load(&watched.config, &[]).unwrap();
    let model = load(&watched.out("run").join("checkpoints/last")).model;
    let histograms = stage_histograms(&model, Spread::Weights);
    let cost = model_cost(&config.model, config.train.seq_len);
    let count = |name: &str| histograms.iter().find(|(stage, _)| stage == name).unwrap().1.count;
    let parameters = |names: &[&str]| -> usize {
        cost.stages.iter().filter(|stage| names.contains(&stage.stage.as_str())).map(|stage| stage.parameters).sum()
    };
    assert_eq!(count("encoder 2"), parameters(&["encoder 2", "chunker 2"]));
    assert_eq!(count("decoder 1"), parameters(&["decoder 1", "converter 1"]));
    assert_eq!(count("head"), parameters(&["head"]));
    let all: usize = histograms.iter().map(|(_, histogram)| histogram.buckets.iter().sum::<usize>()).sum();
    assert_eq!(all, cost.parameters() + cost.start_parameters);
}

#[test]
fn plot_draws_runs_beside_each_other() {
    let watched = Watched::new(write_tiny_run);
    watched.run("first", &["steps=30"], &[]);
    watched.run("second", &["steps=20"], &[]);
    // One that went on, and one with an average.
    watched.run("second", &["steps=40"], &["--resume"]);
    watched.run("third", &["steps=10", "ema={ decay = 0.9 }"], &[]);
    let page = watched.out("curves.html");
    for x in ["steps", "tokens", "hours"] {
        let mut command = photon_train(["plot", "--x", x, "--out", &text(&page)]);
        command.args(["first", "second", "third"].map(|name| watched.out(name)));
        assert_eq!(stdout_of(command), text(&page) + "\n");
        let html = fs::read_to_string(&page).unwrap();
        assert_says(&html, &["<title>first, second, third</title>", "second: 40 steps, best held-out "]);
        for title in [
            "Training loss",
            "Held-out bits per byte",
            "Learning rate",
            "Gradient norm",
            "Speed",
            "Share of the machine",
        ] {
            let chart = html.split("<figure>").find(|chart| chart.contains(&format!("\">{title}"))).unwrap();
            assert_eq!(chart.matches("<polyline").count(), 3, "{title}: {chart}");
            assert_says(chart, &[">first</text>", ">second</text>", ">third</text>", &format!(">{x}")]);
        }
    }
}

#[test]
fn plot_says_what_it_cannot_read() {
    let watched = Watched::new(write_tiny_run);
    let plot = |run: &Path, out: &str| {
        let out = text(&watched.out(out));
        complaint_of(photon_train(["plot", &text(run), "--out", &out]))
    };
    let metrics = watched.out("metrics.jsonl");
    assert_says(&plot(watched.folder.path(), "x.html"), &["cannot read", &text(&metrics)]);
    fs::write(&metrics, "").unwrap();
    assert_says(&plot(watched.folder.path(), "x.html"), &[&text(&metrics), "holds no step"]);
    fs::write(&metrics, "{\"kind\":\"step\"}\n").unwrap();
    assert_says(&plot(&metrics, "x.html"), &[&format!("{}, line 1", text(&metrics)), "missing field"]);
    assert_says(&plot(&metrics, "x.png"), &["x.png: only HTML is written"]);
    assert!(!watched.out("x.html").exists());
}
