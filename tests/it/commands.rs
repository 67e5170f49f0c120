//! Whole commands, run as a user runs them.

use std::path::{Path, PathBuf};

use photon_core::accounting::{cache_cost, model_cost};
use photon_core::config_file;
use photon_core::tokenizer::Tokenizer;
use photon_train::config::RunConfig;
use serde_json::Value;

use crate::programs::{
    CHEAP, assert_says, complaint_of, json_of, load, path_of, photon_infer, photon_train, program, repository, set,
    shell_words, shipped_text, stdout_of, tiny_checkpoint, write_tiny_run,
};

fn configs(folder: &str) -> Vec<PathBuf> {
    let folder = repository().join("configs").join(folder);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} has no config", folder.display());
    paths
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// `photon-train run` of a config, small, into `out`.
fn cheap_run(config: &Path, out: &Path, overrides: &[&str]) -> assert_cmd::Command {
    let mut command = photon_train(["run", &text(config), "--out", &text(out)]);
    command.args(set(CHEAP)).args(set(overrides));
    command
}

#[test]
fn every_training_config_trains() {
    let folder = tempfile::tempdir().unwrap();
    for config in configs("train") {
        let out = folder.path().join(config.file_stem().unwrap());
        let printed = stdout_of(cheap_run(&config, &out, &[]));
        assert_says(&printed, &["after 2 steps"]);
        for checkpoint in ["checkpoints/last", "checkpoints/best"] {
            load(&out.join(checkpoint));
        }
    }
}

#[test]
fn info_prints_what_the_accounting_says_of_every_model_config() {
    for path in configs("model") {
        let config = config_file::load_model(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
        let cost = model_cost(&config, 2048);
        let json = json_of(photon_train(["info", &text(&path), "--format", "json"])).remove(0);
        assert_eq!(json["parameters"], cost.parameters(), "{}", path.display());
        assert_eq!(json["start_parameters"], cost.start_parameters);
        assert_eq!(json["forward_flops_per_token"], cost.forward_flops_per_token());
        assert_eq!(json["training_flops_per_token"], cost.training_flops_per_token());
        assert_eq!(json["stages"].as_array().unwrap().len(), cost.stages.len());
        assert_eq!(json["caches"].as_array().unwrap().len(), cache_cost(&config).len());

        let table = stdout_of(photon_train(["info", &text(&path)]));
        assert_eq!(row_of(&table, "total")[0], cost.parameters() as f64, "{table}");
        assert_eq!(row_of(&table, "total")[1], cost.forward_flops_per_token().round(), "{table}");
        let listed: f64 = cost.stages.iter().map(|stage| row_of(&table, &stage.stage)[0]).sum();
        assert_eq!(listed, cost.parameters() as f64, "{table}");
    }
}

/// The numbers of the row of a table that starts with `name`.
fn row_of(table: &str, name: &str) -> Vec<f64> {
    let row = table.lines().find(|line| line.split('|').nth(1).is_some_and(|cell| cell.trim() == name));
    let row = row.unwrap_or_else(|| panic!("no row {name:?} in:\n{table}"));
    row.split('|').skip(2).filter_map(|cell| cell.replace(' ', "").parse().ok()).collect()
}

#[test]
fn info_takes_overrides_and_another_length() {
    let path = text(&repository().join("configs/model/flat-small.toml"));
    let config = config_file::load_model(path.as_ref(), &["stack.n_layers=1".into()]).unwrap();
    let args = ["info", &path, "--set", "stack.n_layers=1", "--seq-len", "100", "--format", "json"];
    let json = json_of(photon_train(args)).remove(0);
    assert_eq!(json["forward_flops_per_token"], model_cost(&config, 100).forward_flops_per_token());
}

#[test]
fn the_quickstart_ends_with_a_command_that_works() {
    let folder = tempfile::tempdir().unwrap();
    // A blank and a quote in the name: the printed line is for a shell.
    let out = folder.path().join("the captain's run");
    let printed = stdout_of(cheap_run(&repository().join("configs/train/quickstart.toml"), &out, &[]));
    let line = printed.lines().find_map(|line| line.trim().strip_prefix("cargo run --release --bin ")).unwrap();
    let mut words = shell_words(line);
    assert_eq!(words.drain(..2).collect::<Vec<_>>(), ["photon-infer", "--"]);
    let mut command = program("photon-infer");
    command.args(words).args(["--max-tokens", "8"]);
    let continued = stdout_of(command);
    assert!(continued.starts_with("The whale ") && continued.len() > "The whale \n".len(), "{continued}");
}

#[test]
fn the_recipes_run_and_a_meant_change_goes_through() {
    let folder = tempfile::tempdir().unwrap();
    let (config, out) = (repository().join("configs/train/recipes.toml"), folder.path().join("run"));
    stdout_of(cheap_run(&config, &out, &[]));
    let args =
        [&["run", &text(&config), "--out", &text(&out), "--resume"].map(str::to_owned)[..], &set(CHEAP)].concat();
    let changed = set(["steps=3", "optimizer.learning_rate=1e-4"]);
    let said = photon_train([&args[..], &changed].concat()).assert().failure().get_output().stderr.clone();
    assert_says(&String::from_utf8(said).unwrap(), &["if it is meant: --accept optimizer.learning_rate"]);
    let accept = ["--accept", "optimizer.learning_rate"].map(str::to_owned);
    let said = photon_train([&args[..], &changed, &accept].concat()).assert().success().get_output().stderr.clone();
    assert_says(&String::from_utf8(said).unwrap(), &["changed, as accepted: optimizer.learning_rate"]);
    assert_eq!(losses_of(&out).iter().filter(|loss| loss.is_number()).count(), 3);
}

#[test]
fn the_resolved_config_of_a_run_is_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let config = write_tiny_run(folder.path());
    stdout_of(cheap_run(&config, &first, &["seed=5"]));
    stdout_of(photon_train(["run", &text(&first.join("run.toml")), "--out", &text(&second)]));
    assert_eq!(losses_of(&first), losses_of(&second));
    let resolved = |run: &Path| RunConfig::load(&run.join("run.toml"), &[]).unwrap();
    assert_eq!(resolved(&first), resolved(&second));
}

fn losses_of(run: &Path) -> Vec<Value> {
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss_nats"].take()).collect()
}

#[test]
fn overwrite_replaces_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (config, out) = (write_tiny_run(folder.path()), folder.path().join("run"));
    stdout_of(cheap_run(&config, &out, &["seed=1"]));
    let first = losses_of(&out);
    let mut again = cheap_run(&config, &out, &["seed=2"]);
    again.arg("--overwrite");
    stdout_of(again);
    assert_eq!(losses_of(&out).len(), first.len());
    assert_ne!(losses_of(&out), first);
}

#[test]
fn crlf_text_has_the_tokens_of_lf_text() {
    let folder = tempfile::tempdir().unwrap();
    let config = write_tiny_run(folder.path());
    stdout_of(cheap_run(&config, &folder.path().join("lf"), &[]));
    let path = folder.path().join("text.txt");
    let lf = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, lf.replace('\n', "\r\n")).unwrap();
    let mut crlf = cheap_run(&config, &folder.path().join("crlf"), &[]);
    // Stores are named by their tokens.
    assert_says(&String::from_utf8_lossy(&crlf.output().unwrap().stderr), &["tokens reused"]);
    assert_eq!(losses_of(&folder.path().join("lf")), losses_of(&folder.path().join("crlf")));
}

/// `photon-infer generate` from the tiny checkpoint, as JSON.
fn generate(args: &[&str]) -> Vec<Value> {
    let mut command = photon_infer(["generate", "--format", "json", "--model"]);
    command.arg(tiny_checkpoint()).args(args);
    json_of(command)
}

const PROMPTS: [&str; 8] = ["--prompt", "The ", "--prompt", "", "--prompt", "Captain Ahab said", "--prompt", "é"];

#[test]
fn generate_gives_each_prompt_exactly_its_tokens() {
    for n in [0, 1, 7, 40] {
        let lines = generate(&[&PROMPTS[..], &["--temperature", "0", "--max-tokens", &n.to_string()]].concat());
        let prompts: Vec<&str> = lines.iter().map(|line| line["prompt"].as_str().unwrap()).collect();
        assert_eq!(prompts, ["The ", "", "Captain Ahab said", "é"]);
        for line in lines {
            assert_eq!(line["completion_tokens"], n);
            assert_eq!(line["token_ids"].as_array().unwrap().len(), n);
            assert_eq!(line["finish_reason"], "length");
            assert_eq!(line["prompt_tokens"], line["prompt"].as_str().unwrap().len());
        }
    }
}

#[test]
fn a_seed_decides_and_greedy_needs_none() {
    let args = |seed, temperature| {
        [&PROMPTS[..], &["--max-tokens", "24", "--seed", seed, "--temperature", temperature]].concat()
    };
    let sampled = generate(&args("1", "1.0"));
    assert_eq!(sampled, generate(&args("1", "1.0")));
    assert_ne!(sampled, generate(&args("2", "1.0")));
    let greedy = generate(&args("1", "0"));
    assert_eq!(greedy, generate(&args("2", "0")));
    // With one candidate there is nothing to draw.
    assert_eq!(greedy, generate(&[&args("3", "1.0")[..], &["--top-k", "1"]].concat()));
    assert_eq!(greedy, generate(&[&args("3", "1.0")[..], &["--top-p", "1e-9"]].concat()));
}

#[test]
fn rows_of_a_batch_are_the_runs_of_their_prompts() {
    let rest = ["--max-tokens", "24", "--temperature", "0"];
    let batch = generate(&[&PROMPTS[..], &rest].concat());
    for (row, prompt) in batch.iter().zip(PROMPTS.chunks(2)) {
        assert_eq!(*row, generate(&[prompt, &rest].concat())[0]);
    }
    // Each row draws from a stream of its own, the first from that of a prompt alone.
    let rest = ["--max-tokens", "24", "--temperature", "1.0", "--seed", "5"];
    let batch = generate(&[&PROMPTS[..], &rest].concat());
    assert_eq!(batch[0], generate(&[&PROMPTS[..2], &rest].concat())[0]);
}

#[test]
fn a_stop_text_ends_a_row_before_itself() {
    let args = ["--prompt", "The ", "--max-tokens", "48", "--temperature", "0"];
    let whole = generate(&args).remove(0);
    let whole = whole["text"].as_str().unwrap();
    let stop: String = whole.chars().skip(5).take(3).collect();
    let stopped = generate(&[&args[..], &["--stop", &stop, "--stop", "never to be seen"]].concat()).remove(0);
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(stopped["text"], whole[..whole.find(&stop).unwrap()]);
    assert!(stopped["completion_tokens"].as_u64().unwrap() < 48);
}

#[test]
fn samples_of_a_prompt_are_rows_with_choices_of_their_own() {
    let rest = ["--max-tokens", "24", "--seed", "5", "--temperature", "1.0"];
    let prompts = ["--prompt", "Captain Ahab said", "--prompt", "The "];
    let sampled = generate(&[&prompts[..], &["--samples", "3"], &rest].concat());
    let rows: Vec<(&str, u64)> =
        sampled.iter().map(|row| (row["prompt"].as_str().unwrap(), row["sample"].as_u64().unwrap())).collect();
    let expected = ["Captain Ahab said", "The "].map(|prompt| [0, 1, 2].map(|sample| (prompt, sample))).concat();
    assert_eq!(rows, expected);
    // Row 0 draws as it does alone; others draw otherwise.
    assert_eq!(sampled[0], generate(&[&prompts[..2], &rest].concat())[0]);
    let texts: std::collections::BTreeSet<&str> = sampled.iter().map(|row| row["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 6);

    let greedy = generate(&[&prompts[..], &["--samples", "2", "--temperature", "0", "--max-tokens", "24"]].concat());
    let alone = generate(&[&prompts[..], &["--temperature", "0", "--max-tokens", "24"]].concat());
    for (row, line) in greedy.iter().enumerate() {
        assert_eq!(line["text"], alone[row / 2]["text"]);
    }
}

#[test]
fn what_the_caches_did_is_told_on_request() {
    let args = ["--prompt", "Captain Ahab said", "--max-tokens", "40", "--temperature", "0"];
    let stages_of = |rest: &[&str]| {
        let mut lines = generate(&[&args[..], &["--stats"], rest].concat());
        lines.pop().unwrap()["caches"].as_array().unwrap().clone()
    };
    let exact = stages_of(&[]);
    let names: Vec<&str> = exact.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["encoder 1", "encoder 2", "decoder 1", "decoder 2"]);
    // Nothing is taken up after the last token.
    assert_eq!(exact[0]["entries"], (17 + 39) / 2);
    assert_eq!((&exact[0]["storage"], &exact[0]["evicted_entries"]), (&"f32/f32".into(), &0.into()));

    // One prompt, stored once for all its samples.
    let shared = stages_of(&["--samples", "3"]);
    let [used, used_by_three] = [&exact, &shared].map(|stages| stages[0]["used_bytes"].as_u64().unwrap());
    assert!(shared[0]["shared_bytes"].as_u64().unwrap() > 0 && used_by_three < 3 * used, "{shared:?}");

    let set = ["--set", "caches.0.policy.random.budget.entries=8", "--set", "caches.0.block=2"];
    let evicting = stages_of(&[&["--preset", "int8-int4", "--set", "caches.0.stages=encoder 1"], &set[..]].concat());
    assert_eq!((&evicting[0]["storage"], &evicting[0]["policy"]), (&"int8/int4".into(), &"random".into()));
    assert!(evicting[0]["evicted_entries"].as_u64().unwrap() > 0, "{evicting:?}");
    assert!(evicting[0]["entries"].as_u64().unwrap() <= 8, "{evicting:?}");

    let mut command = photon_infer(["generate", "--stats", "--model"]);
    command.arg(tiny_checkpoint()).args(args).args(["--preset", "tiny-memory"]);
    let output = command.assert().success().get_output().clone();
    let table = String::from_utf8(output.stderr).unwrap();
    assert_says(&table, &["storing, ms", "int4/int4", "tova", "window"]);
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("Captain Ahab said"));
}

#[test]
fn text_is_printed_after_its_prompt() {
    let model = text(tiny_checkpoint());
    let args = ["generate", "--model", &model, "--max-tokens", "12", "--temperature", "0", "--prompt", "The "];
    let completion = generate(&["--max-tokens", "12", "--temperature", "0", "--prompt", "The "]).remove(0);
    let completion = completion["text"].as_str().unwrap();
    assert_eq!(stdout_of(photon_infer(args)), format!("The {completion}\n"));
    let several = stdout_of(photon_infer([&args[..], &["--prompt", "A "]].concat()));
    assert_says(&several, &[&format!("--- 0\nThe {completion}\n"), "--- 1\nA "]);
}

#[test]
fn inference_is_measured_on_checkpoints_and_configs() {
    let sizes =
        ["--prompt-tokens", "9", "--decode-tokens", "4", "--repeats", "1", "--batch-size", "2", "--device", "cpu"];
    let checkpoint = text(tiny_checkpoint());
    let config = |name: &str| text(&repository().join("configs/model").join(name));
    let (photon, flat) = (config("photon-3l-tiny.toml"), config("flat-small.toml"));
    for (source, grows, entries) in [
        (vec!["--model", &checkpoint], "encoder 2", 12 / 4),
        (vec!["--config", &photon], "encoder 1", 12 / 4),
        (vec!["--config", &flat, "--set", "stack.n_layers=1"], "stack", 12 + 1),
    ] {
        let json = json_of(photon_infer([&["bench", "--format", "json"], &source[..], &sizes].concat())).remove(0);
        assert_eq!(json.as_array().unwrap().len(), 1);
        let json = &json[0];
        for key in ["prefill_tokens_per_sec", "decode_tokens_per_sec", "time_to_first_token_secs"] {
            assert!(json[key].as_f64().unwrap() > 0.0, "{json}");
        }
        assert_eq!(json["config"]["batch_size"], 2);
        assert_eq!(json["device"], "cpu");
        let caches = json["caches"].as_array().unwrap();
        let cache = caches.iter().find(|cache| cache["stage"] == grows).unwrap();
        // Nothing is taken up after the last token.
        assert_eq!(cache["entries"], entries, "{json}");

        let table = stdout_of(photon_infer([&["bench"], &source[..], &sizes].concat()));
        assert_says(&table, &["device cpu, weights f32, prompt 9, decode 4", "decode tokens/s", grows, "total"]);
    }
}

#[test]
fn models_and_presets_are_compared_in_one_session() {
    let config = |name: &str| text(&repository().join("configs/model").join(name));
    let (photon, flat) = (config("photon-3l-tiny.toml"), config("flat-small.toml"));
    let args = ["bench", "--config", &photon, "--config", &flat, "--preset", "exact,int4,recursive"];
    let sizes = ["--regime", "8k", "--prompt-tokens", "70", "--decode-tokens", "2", "--repeats", "1"];
    let command = photon_infer([&args[..], &sizes, &["--format", "json", "--device", "cpu"]].concat());
    let json = json_of(command).remove(0);
    let lines = json.as_array().unwrap();
    let pairs: Vec<(&str, &str)> =
        lines.iter().map(|line| (line["model"].as_str().unwrap(), line["preset"].as_str().unwrap())).collect();
    // A flat model has nothing that could be recursive.
    let expected = [(&*photon, "exact"), (&photon, "int4"), (&photon, "recursive"), (&flat, "exact"), (&flat, "int4")];
    assert_eq!(pairs, expected);
    let number = |line: &Value, key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
    for pair in [[0, 1], [3, 4]] {
        let [exact, int4] = pair.map(|index| number(&lines[index], "cache_used_bytes"));
        assert!(int4 < 0.2 * exact, "{exact} {int4}");
    }
    for line in lines {
        let decode = number(line, "decode_tokens_per_sec");
        let gib = number(line, "cache_allocated_bytes") / f64::from(1 << 30);
        let per_gib = number(line, "decode_tokens_per_sec_per_cache_gib");
        assert!((per_gib - decode / gib).abs() < 1e-6 * per_gib, "{line}");
        if cfg!(target_os = "linux") {
            assert!(number(line, "peak_memory_bytes") > number(line, "cache_allocated_bytes"), "{line}");
            assert!(number(line, "decode_tokens_per_sec_per_gib") < per_gib, "{line}");
        }
    }
}

#[test]
fn a_batch_fills_the_memory_given_to_its_caches() {
    let model = text(tiny_checkpoint());
    let bench = |rest: &[&str]| {
        let sizes = ["--prompt-tokens", "9", "--decode-tokens", "2", "--repeats", "1", "--format", "json"];
        let json = json_of(photon_infer([&["bench", "--model", &model], rest, &sizes].concat())).remove(0);
        let number = |key: &str| json[0][key].as_u64().unwrap();
        (json[0]["config"]["batch_size"].as_u64().unwrap(), number("cache_allocated_bytes"))
    };
    let (_, row_bytes) = bench(&[]);
    let gib = |rows: f64| (row_bytes as f64 * rows / f64::from(1 << 30)).to_string();
    assert_eq!(bench(&["--memory-gib", &gib(3.5)]), (3, 3 * row_bytes));
    let command = photon_infer(["bench", "--model", &model, "--memory-gib", &gib(0.5)]);
    assert_says(&complaint_of(command), &["the caches of one row take", "give more memory"]);
}

#[test]
fn presets_are_listed_and_shown() {
    let listed = stdout_of(photon_infer(["presets"]));
    for path in configs("infer") {
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(listed.lines().any(|line| line.split_whitespace().next() == Some(name)), "{name}: {listed}");
        let shown = stdout_of(photon_infer(["presets", name]));
        assert_eq!(shown, std::fs::read_to_string(&path).unwrap());
    }
}

#[test]
fn training_is_measured() {
    for name in ["photon-3l-tiny.toml", "flat-small.toml"] {
        let path = repository().join("configs/model").join(name);
        let sizes = ["--steps", "1", "--warmup-steps", "0", "--batch-size", "2", "--seq-len", "64", "--replicas", "2"];
        let json = json_of(photon_train([&["bench", &text(&path), "--format", "json"], &sizes[..]].concat())).remove(0);
        for key in ["training_tokens_per_sec", "matmul_gflops", "training_mfu"] {
            assert!(json[key].as_f64().unwrap() > 0.0, "{json}");
        }
        let cost = model_cost(&config_file::load_model(&path, &[]).unwrap(), 64);
        assert_eq!(json["training_flops_per_token"], cost.training_flops_per_token());
        assert_eq!(json["replicas"], 2);
        assert_eq!(json["micro_batch_size"], 1);
    }
}

#[test]
fn a_checkpoint_is_evaluated_on_any_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.txt");
    std::fs::write(&path, b"Call me Ishmael.\r\nSome years \xff ago").unwrap();
    let args = ["eval", &text(tiny_checkpoint()), &text(&path), "--seq-len", "8"].map(str::to_owned);
    let mut command = photon_train(&args);
    command.args(["--format", "json"]);
    let json = json_of(command).remove(0);
    let number = |key: &str| json[key].as_f64().unwrap();
    // CRLF counts once; a token ends the document.
    let n_bytes = 16.0 + 1.0 + 16.0;
    assert_eq!(number("n_tokens"), n_bytes + 1.0);
    let nats = number("nats_per_token");
    assert!((number("perplexity") - nats.exp()).abs() < 1e-9 * nats.exp());
    let bits = nats * (n_bytes + 1.0) / std::f64::consts::LN_2 / n_bytes;
    assert!((number("bits_per_byte") - bits).abs() < 1e-9 * bits, "{json}");
    assert_eq!(json["slot_nats"].as_array().unwrap().len(), 2);
    assert_says(&stdout_of(photon_train(&args)), &["tokens          34", "bits per byte", "slot 1"]);
}

#[test]
fn a_trained_tokenizer_serves_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (tokenizer, out) = (folder.path().join("tokenizer.json"), folder.path().join("run"));
    let args = ["tokenizer", &text(&shipped_text()), "--vocab-size", "300", "--out", &text(&tokenizer)];
    assert_says(&stdout_of(photon_train(args)), &["300 entries", &text(&tokenizer)]);
    assert_eq!(Tokenizer::load(&tokenizer).unwrap().vocab_size(), 300);

    let overrides = [&format!("tokenizer={}", tokenizer.display()), "model.vocab_size=300"];
    stdout_of(cheap_run(&write_tiny_run(folder.path()), &out, &overrides));
    let best = out.join("checkpoints/best");
    assert_eq!(load(&best).tokenizer.vocab_size(), 300);
    let json =
        json_of(photon_train(["eval", &text(&best), &text(&folder.path().join("text.txt")), "--format", "json"]));
    // 43 merges make fewer tokens than bytes.
    assert!(json[0]["n_tokens"].as_f64().unwrap() < 0.9 * 8000.0, "{json:?}");
    let args = ["generate", "--model", &text(&best), "--max-tokens", "5", "--format", "json", "--prompt", "the whale"];
    let line = json_of(photon_infer(args)).remove(0);
    assert!(line["prompt_tokens"].as_u64().unwrap() < 9, "{line}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_run_with_its_weights_saved() {
    use std::io::{BufRead, BufReader, Read};
    use std::process::Stdio;

    let folder = tempfile::tempdir().unwrap();
    let (config, out) = (write_tiny_run(folder.path()), folder.path().join("run"));
    let mut child = std::process::Command::new(path_of("photon-train"))
        .args(["run", &text(&config), "--out", &text(&out)])
        .args(set(["steps=1000000", "eval.every_steps=2", "checkpoint_every_steps=1000000"]))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("\nstep 2: held-out") {
        let n_bytes = stderr.read_line(&mut said).unwrap();
        assert!(n_bytes > 0, "it ended by itself: {said}");
    }
    interrupt(&child);
    stderr.read_to_string(&mut said).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    let last = out.join("checkpoints/last");
    assert_says(&said, &["stopping after this step", "error: interrupted after", &last.display().to_string()]);
    load(&last);
}

#[cfg(unix)]
fn interrupt(child: &std::process::Child) {
    let status = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}
