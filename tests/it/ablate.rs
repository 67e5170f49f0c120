//! Experiments, run as a user runs them: two arms on bytes, killed, failing, refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use photon_core::accounting::model_cost;
use photon_core::device::DeviceChoice;
use photon_core::model::Model;
use photon_train::ablate::{Experiment, Plan, planned_flops};
use photon_train::config::RunConfig;
use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{assert_says, complaint_of, path_of, photon_train, set, some_text, stdout_of};

/// Two levels over bytes, and the flat model of its size; seconds.
const TINY: &str = r#"
question = "Does a hierarchy help?"
seeds = [1, 2]
reference = "photon"
match = ["params", "flops"]

[budget]
steps = 120

[run]
steps = 60
seq_len = 32
batch_size = 4
replicas = 1
checkpoint_every_steps = 6

[run.model]
architecture = "photon"
vocab_size = 257
d_model = 16

[[run.model.levels]]
chunk_len = 2
d_model = 16
encoder = { n_layers = 1, n_heads = 2, d_ff = 24 }
converter = { prefix_len = 1 }
decoder = { n_layers = 1, n_heads = 2, d_ff = 24, attention = { stream = { window = 12 } } }

[[run.model.levels]]
chunk_len = 2
d_model = 16
encoder = { n_layers = 1, n_heads = 2, d_ff = 24 }
converter = { prefix_len = 1 }
decoder = { n_layers = 1, n_heads = 2, d_ff = 24 }

[run.data]
paths = ["text.txt"]
held_out = { tail = { fraction = 0.1 } }

[run.optimizer]
learning_rate = 1e-2
warmup_steps = 6

[run.eval]
every_steps = 15
max_tokens = 512
sample_tokens = 0
histograms = false

[[arms]]
name = "photon"

[[arms]]
name = "flat"
kind = "flat"
"#;

const FIDELITY: &str = r#"
[measures.fidelity]
command = ["photon-infer", "fidelity", "--model", "{model}", "--text", "{held_out}", "--preset", "exact", "--context", "64",
    "--prompt", "16", "--max-tokens", "128", "--format", "json"]
"#;

/// An experiment in a folder of its own.
struct Lab {
    folder: TempDir,
}

impl Lab {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("text.txt"), some_text(8000)).unwrap();
        fs::write(folder.path().join("experiment.toml"), text).unwrap();
        Self { folder }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("experiment.toml")
    }

    fn args(&self, more: &[&str]) -> Vec<String> {
        let places = ["ablate", &self.file().display().to_string(), "--out", &self.out().display().to_string()]
            .map(str::to_owned);
        places.into_iter().chain(more.iter().map(|word| (*word).to_owned())).collect()
    }

    fn run(&self, more: &[&str]) -> String {
        stdout_of(photon_train(self.args(more)))
    }

    fn complaint(&self, more: &[&str]) -> String {
        complaint_of(photon_train(self.args(more)))
    }

    fn results_file(&self) -> Vec<u8> {
        fs::read(self.out().join("results.json")).unwrap()
    }

    fn results(&self) -> Value {
        serde_json::from_slice(&self.results_file()).unwrap()
    }

    fn dry_run(&self) -> Value {
        serde_json::from_str(&self.run(&["--dry-run", "--no-bench", "--format", "json"])).unwrap()
    }
}

fn array<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap_or_else(|| panic!("no list {key} in {value}"))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

/// The runs of all arms.
fn runs(results: &Value) -> Vec<&Value> {
    array(results, "arms").iter().flat_map(|arm| array(arm, "runs")).collect()
}

#[test]
fn two_arms_on_bytes_come_to_a_report_and_are_not_run_again() {
    let lab = Lab::new(&(TINY.to_owned() + FIDELITY));
    let printed = lab.run(&[]);
    assert_says(&printed, &["photon", "flat", "results.json"]);
    let results = lab.results();
    assert_eq!(runs(&results).len(), 4);
    for arm in array(&results, "arms") {
        for run in array(arm, "runs") {
            assert_eq!(run["status"], "finished", "{run}");
            let folder = lab.out().join(run["id"].as_str().unwrap());
            let facts: Value = serde_json::from_slice(&fs::read(folder.join("run.json")).unwrap()).unwrap();
            let config = RunConfig::load(&folder.join("run.toml"), &[]).unwrap();
            let start = model_cost(&config.model, config.train.seq_len).start_parameters as f64;
            assert_eq!(number(&facts, "parameters"), number(arm, "parameters") + start);
            assert_eq!(facts["seed"], run["seed"]);
            assert_eq!(run["commit"], facts["commit"]);
            let metrics = fs::read_to_string(lab.out().join(run["curve"].as_str().unwrap())).unwrap();
            let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
            assert_eq!(run["last"]["held_out"], last["held_out"]);
            assert_eq!(run["last"]["step"], arm["steps"]);
            assert!(number(&run["last"]["held_out"], "bits_per_byte") < 7.0, "it learns: {run}");
            let way = &run["measures"]["fidelity"][0];
            assert!(number(way, "kl_mean_nats") < 1e-6 && way.get("decode_tokens_per_sec").is_none(), "{way}");
            assert!(!way["model"].as_str().unwrap().starts_with('/'), "{way}");
        }
    }
    let timings: Value = serde_json::from_slice(&fs::read(lab.out().join("timings.json")).unwrap()).unwrap();
    let timed = timings["runs"].as_object().unwrap().values();
    assert!(timed.clone().all(|run| number(run, "tokens_per_sec") > 0.0), "{timings}");
    assert!(timed.clone().all(|run| number(&run["measures"]["fidelity"], "0.decode_tokens_per_sec") > 0.0));
    let csv = fs::read_to_string(lab.out().join("results.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 4);
    let columns = csv.lines().map(|line| line.split(',').count());
    assert!(columns.clone().all(|n| n == columns.clone().next().unwrap()), "{csv}");

    let before = lab.results_file();
    let said = photon_train(lab.args(&[])).assert().success().get_output().stderr.clone();
    let said = String::from_utf8(said).unwrap();
    assert!(!said.contains("training \"") && !said.contains("measuring"), "{said}");
    assert!(lab.results_file() == before);

    // The same side by side, elsewhere.
    let other = Lab::new(&(TINY.to_owned() + FIDELITY));
    fs::rename(other.file(), other.folder.path().join("moved.toml")).unwrap();
    fs::write(other.file(), format!("name = {}\n{TINY}{FIDELITY}", results["name"])).unwrap();
    other.run(&["--jobs", "2"]);
    assert!(other.results_file() == before, "two side by side differ from one after the other");

    let out = lab.out().display().to_string();
    stdout_of(photon_train(["report", &out]));
    let markdown = fs::read_to_string(lab.out().join("report.md")).unwrap();
    let said = ["Does a hierarchy help?", "held-out bits/byte", "slot 1", "encoder 1", "exact", "| flat |", "±"];
    assert_says(&markdown, &said);
    let html = fs::read_to_string(lab.out().join("report.html")).unwrap();
    assert_says(&html, &["<svg", "<table>", "Quality and memory", "Quality and decoding speed", "Training loss"]);
    assert!(!html.contains("http") && !html.contains(" src="));
    let summary = stdout_of(photon_train(["report", &out, &out, "--format", "json"]));
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(array(&summary, "experiments").len(), 2);
    let flat = &summary["experiments"][0]["arms"][1];
    let mean = |arm: usize| number(&summary["experiments"][0]["arms"][arm]["bits_per_byte"], "mean");
    assert!((number(&flat["difference"], "difference") - (mean(1) - mean(0))).abs() < 1e-12);
    assert_eq!(flat["difference"]["rule"], "half_ranges");
}

/// Kills the runner at random moments, then lets it come to its end. `PHOTON_KILLS=50 cargo test … killed` tries harder.
#[cfg(unix)]
#[test]
fn a_runner_killed_at_any_moment_ends_with_the_same_results() {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    let n_kills: u32 = std::env::var("PHOTON_KILLS").map_or(4, |n| n.parse().unwrap());
    // Names are equal, so files must be.
    let text = format!("name = \"killed\"\n{TINY}{FIDELITY}");
    let expected = Lab::new(&text);
    let started = Instant::now();
    expected.run(&[]);
    let duration_ms = started.elapsed().as_millis() as u64;
    let mut rng = ChaCha8Rng::seed_from_u64(std::process::id().into());
    let lab = Lab::new(&text);
    for _ in 0..n_kills {
        let mut command = Command::new(path_of("photon-train"));
        command.args(lab.args(&["--jobs", "2"])).stdout(Stdio::null()).stderr(Stdio::null());
        let mut runner = command.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(rng.random_range(0..duration_ms)));
        runner.kill().unwrap();
        runner.wait().unwrap();
    }
    lab.run(&[]);
    assert!(lab.results_file() == expected.results_file());
    let csv = |lab: &Lab| fs::read(lab.out().join("results.csv")).unwrap();
    assert!(csv(&lab) == csv(&expected));
}

/// A runner that has just said a line with this start; what else it says, and the line.
#[cfg(unix)]
fn start_until(lab: &Lab, start: &str) -> (std::process::Child, impl std::io::Read, String) {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    let mut command = Command::new(path_of("photon-train"));
    let mut runner = command.args(lab.args(&[])).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut stderr = BufReader::new(runner.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with(start) {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "it never says: {start}");
    }
    (runner, stderr, line)
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_runs_at_a_checkpoint_and_says_how_to_go_on() {
    use std::io::Read;
    use std::process::Command;

    let text = format!("name = \"stopped\"\n{TINY}").replace("steps = 120", "steps = 900");
    let (lab, expected) = (Lab::new(&text), Lab::new(&text));
    let (mut runner, mut stderr, _) = start_until(&lab, "training");
    let interrupt = Command::new("kill").args(["-INT", &runner.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    assert!(!runner.wait().unwrap().success());
    let again = format!("photon-train ablate {}", lab.file().display());
    assert_says(&said, &["error: interrupted", "to go on:", &again]);
    assert!(runs(&lab.results()).iter().all(|run| run["status"] == "waiting"), "{}", lab.results());
    // The run that was stopped has a checkpoint of the step at hand: no other process writes there any more.
    lab.run(&[]);
    expected.run(&[]);
    assert!(lab.results_file() == expected.results_file());
}

/// What a killed runner leaves behind may still save: nobody writes beside it, and nothing fails for it.
#[cfg(unix)]
#[test]
fn a_run_whose_folder_is_in_use_waits_until_it_is_free() {
    use std::io::Read;

    use photon_train::record::Claim;

    let lab = Lab::new(&TINY.replace("seeds = [1, 2]", "seeds = [1]"));
    lab.run(&[]);
    let before = lab.results_file();
    let id = runs(&lab.results())[1]["id"].as_str().unwrap().to_owned();
    let folder = lab.out().join(&id);
    fs::remove_dir_all(&folder).unwrap();
    let claim = Claim::new(&folder).unwrap();
    let (mut runner, mut stderr, line) = start_until(&lab, "waiting for process");
    assert!(line.contains(&std::process::id().to_string()) && line.contains(&id), "{line}");
    drop(claim);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert!(runner.wait().unwrap().success(), "{rest}");
    assert!(lab.results_file() == before);
}

#[test]
fn the_numbers_of_a_dry_run_are_those_of_the_built_models() {
    let text = TINY.replace("seeds = [1, 2]", "seeds = [1]")
        + "[[arms]]\nname = \"block\"\nkind = \"block\"\n\
           [[arms]]\nname = \"longer\"\nset.model.levels.0.chunk_len = 4\n";
    let lab = Lab::new(&text);
    let plan = lab.dry_run();
    assert!(!lab.out().exists(), "a dry run writes nothing");
    let device = DeviceChoice::Cpu.open().unwrap().device;
    let arms = array(&plan, "arms");
    assert_eq!(arms.len(), 4);
    for arm in arms {
        let path = lab.folder.path().join("resolved.toml");
        fs::write(&path, arm["config"].as_str().unwrap()).unwrap();
        let config = RunConfig::load(&path, &[]).unwrap();
        let model = Model::new(&config.model, 1, &device);
        let cost = model_cost(&config.model, config.train.seq_len);
        let built = burn::module::Module::num_params(&model);
        assert_eq!(number(arm, "parameters"), (built - cost.start_parameters) as f64, "{arm}");
        assert_eq!(number(arm, "training_flops_per_token"), cost.training_flops_per_token());
        assert_eq!(number(arm, "training_flops"), planned_flops(&config));
        assert_eq!(number(arm, "tokens"), (config.train.steps * 4 * 32) as f64);
        for key in ["parameters", "training_flops"] {
            let (found, reference) = (number(arm, key), number(&arms[0], key));
            assert!((found - reference).abs() <= 0.01 * reference, "{key}: {found}, {reference}: {arm}");
        }
        // 6 of 60 steps are the warm-up.
        let share = config.train.optimizer.warmup_steps as f64 / config.train.steps as f64;
        assert!((share - 0.1).abs() < 0.02, "{share}");
    }
    assert_eq!((&arms[0]["steps"], &arms[1]["name"]), (&120.into(), &"flat".into()));
    assert_eq!(arms[3]["differences"]["model.levels.0.chunk_len"], serde_json::json!([2, 4]));
    let table = lab.run(&["--dry-run"]);
    assert_says(&table, &["# arm \"flat\"", "architecture = \"flat\"", "hours in all", "from 2 updates of each arm"]);
}

#[test]
fn an_arm_that_fails_is_recorded_and_the_others_go_on() {
    let text = TINY.replace(
        "name = \"photon\"\n",
        "name = \"photon\"\n\n[[arms]]\nname = \"wild\"\nset.optimizer.learning_rate = 1e30\n",
    );
    let lab = Lab::new(&text.replace("seeds = [1, 2]", "seeds = [1]"));
    let said = lab.complaint(&[]);
    assert_says(&said, &["failed \"wild\", seed 1", "error: 1 of 3 runs", "finished \"flat\""]);
    let results = lab.results();
    let statuses: Vec<&str> = runs(&results).iter().map(|run| run["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["finished", "failed", "finished"]);
    let error = runs(&results)[1]["error"].as_str().unwrap();
    assert!(error.contains("predict") || error.contains("skipped"), "{error}");
    stdout_of(photon_train(["report", &lab.out().display().to_string()]));
    assert_says(&fs::read_to_string(lab.out().join("report.md")).unwrap(), &["## Failed runs", "| wild |"]);
}

#[test]
fn a_measure_that_fails_costs_no_result_and_is_tried_again() {
    let measure = "[measures.wrong]\ncommand = [\"photon-infer\", \"presets\", \"no-such-preset\"]\n";
    let text = TINY.replace("seeds = [1, 2]", "seeds = [1]") + measure;
    let lab = Lab::new(&text);
    let said = lab.complaint(&[]);
    assert_says(&said, &["no measure wrong of \"photon\"", "no-such-preset"]);
    let results = lab.results();
    assert!(runs(&results).iter().all(|run| run["status"] == "finished"), "{results}");
    assert!(runs(&results)[0]["failed_measures"]["wrong"].as_str().unwrap().contains("no-such-preset"));
    let right = "[measures.wrong]\ncommand = [\"photon-train\", \"eval\", \"{best}\", \"{held_out}\", \"--format\", \"json\", \"--seq-len\", \"64\"]\n";
    fs::write(lab.file(), text.replace(measure, right)).unwrap();
    lab.run(&[]);
    let results = lab.results();
    assert!(number(&runs(&results)[1]["measures"]["wrong"], "bits_per_byte") > 0.0, "{results}");
}

#[test]
fn a_measure_by_a_program_that_is_not_there_is_refused_before_anything_runs() {
    let lab = Lab::new(&(TINY.to_owned() + FIDELITY));
    // A program alone in its folder.
    let alone = tempfile::tempdir_in(path_of("photon-train").parent().unwrap()).unwrap();
    let program = alone.path().join("photon-train");
    fs::hard_link(path_of("photon-train"), &program).unwrap();
    let output = std::process::Command::new(&program).args(lab.args(&[])).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert_says(&said, &["a measure runs photon-infer, which is not beside this program", "--workspace"]);
    assert!(!lab.out().exists());
}

#[test]
fn what_is_wrong_with_an_experiment_is_named_with_its_place() {
    let grid = |lines: &str| {
        TINY.replace("[[arms]]\nname = \"photon\"", &format!("[grid]\n{lines}\n[[arms]]\nname = \"photon\""))
    };
    let with = |from: &str, to: &str| {
        assert!(TINY.contains(from), "{from}");
        TINY.replacen(from, to, 1)
    };
    for (text, said) in [
        (with("question", "qestion"), "at `qestion`: unknown field `qestion`"),
        (with("kind = \"flat\"", "kind = \"flat\"\nsets = 1"), "unknown field `sets`"),
        (with("kind = \"flat\"", "set.model.levels.0.chunk_lenn = 4"), "arm \"flat\": "),
        (with("kind = \"flat\"", "set.model.levels.7.chunk_len = 4"), "`7` is no index of a list of 2 entries"),
        (with("kind = \"flat\"", "set.steps = 4"), "set.steps: steps follow from [budget]"),
        (with("kind = \"flat\"", "set.seed = 4"), "seeds stand in `seeds`"),
        (with("kind = \"flat\"", "kind = \"round\""), "unknown variant `round`"),
        (with("name = \"flat\"", "name = \"photon\""), "arms: \"photon\": two arms have this name"),
        (with("reference = \"photon\"", "reference = \"none\""), "names no arm; there are \"photon\", \"flat\""),
        (with("seeds = [1, 2]", "seeds = []"), "seeds = []: list at least one seed"),
        (with("seeds = [1, 2]", "seeds = [1, 1]"), "seeds = [1, 1]"),
        (with("steps = 120", "steps = 120\ntokens = 1e4"), "budget: states steps, tokens: state one of"),
        (with("steps = 120", "hours = 1"), "budget.hours: is unknown"),
        (with("steps = 120", "steps = 0"), "budget.steps = 0: must be a number above 0"),
        (with("\"flops\"]", "\"flops\", \"tokens\"]"), "take one of them"),
        (with("\"flops\"]", "\"flop\"]"), "at `match"),
        (grid("alpha = []"), "grid.alpha = []: an axis needs at least one value"),
        (grid("alpha = 0.1"), "an axis is a list of values"),
        (grid("alfa = [0.1]"), "arm \"alfa=0.1\": "),
        (with("kind = \"flat\"", "grid = true"), "there is no [grid]"),
        (with("kind = \"flat\"", "kind = \"flat\"\nfrom = \"flat\""), "in a ring"),
        (with("learning_rate = 1e-2", "lr = 1e-2"), "unknown field `lr`"),
    ] {
        let lab = Lab::new(&text);
        assert_says(&lab.complaint(&["--dry-run", "--no-bench"]), &[said]);
    }
    let missing = Lab::new(TINY);
    fs::remove_file(missing.folder.path().join("text.txt")).unwrap();
    assert_says(&missing.complaint(&[]), &["arm \"photon\"", "text.txt"]);
}

#[test]
fn budgets_that_cannot_be_matched_are_refused_with_their_numbers() {
    // Three updates of the reference: none of the other arm has as many FLOPs.
    let steps = Lab::new(&TINY.replace("steps = 120", "steps = 3"));
    let said = steps.complaint(&["--dry-run", "--no-bench"]);
    assert_says(
        &said,
        &["arm \"flat\" has ", " training FLOPs, the reference \"photon\" has ", "at most 1 %", "raise the budget"],
    );
    let coarse = "[fit]\nmultiple_of = 64\n\n[budget]";
    let text = TINY.replace("[budget]", coarse).replace("kind = \"flat\"", "set.model.levels.0.encoder.n_layers = 2");
    let said = Lab::new(&text).complaint(&["--dry-run", "--no-bench"]);
    assert_says(&said, &["arm \"flat\" has ", " parameters, the reference \"photon\" has 20280", "multiple_of"]);
}

#[test]
fn what_minutes_come_to_is_decided_once() {
    let lab = Lab::new(&TINY.replace("steps = 120", "minutes = 0.002").replace("\"flops\"", "\"tokens\""));
    lab.run(&["--set", "seeds=[1]"]);
    let (before, decided) = (lab.results_file(), fs::read(lab.out().join("decided.json")).unwrap());
    let speeds: Value = serde_json::from_slice(&decided).unwrap();
    let tokens = number(&speeds["tokens_per_sec"], "photon") * 0.12;
    let reached = number(&lab.results()["arms"][0], "tokens");
    assert!((tokens - reached).abs() <= 64.0 + 64.0, "{tokens} {reached}");
    lab.run(&["--set", "seeds=[1]"]);
    assert!(lab.results_file() == before && fs::read(lab.out().join("decided.json")).unwrap() == decided);
}

/// The six experiments that are shipped.
#[test]
fn every_shipped_experiment_is_matched() {
    let folder = crate::programs::repository().join("experiments");
    let files: Vec<PathBuf> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().join("experiment.toml"))
        .filter(|path| path.is_file())
        .collect();
    assert!(files.len() >= 6, "{files:?}");
    for file in files {
        let plan = plan_of(&file);
        assert!(plan.arms.len() > 1 && plan.experiment.file.seeds.len() > 1, "{}", file.display());
        for arm in &plan.arms {
            let reference = &plan.arms[plan.reference];
            let (found, expected) = (arm.training_flops, reference.training_flops);
            assert!((found - expected).abs() <= 0.01 * expected, "{}: {}", file.display(), arm.name);
            assert!((800_000..1_500_000).contains(&arm.parameters), "{}", arm.name);
        }
    }
}

fn plan_of(file: &Path) -> Plan {
    let experiment = Experiment::load(file, &[]).unwrap_or_else(|error| panic!("{error}"));
    let mut decided = photon_train::ablate::Decided { replicas: 1, tokens_per_sec: BTreeMap::new() };
    let plan = Plan::new(experiment, &mut decided, &mut |name, _| panic!("nobody asks how fast {name} is"));
    plan.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn overrides_change_any_key_of_an_experiment() {
    let lab = Lab::new(TINY);
    let more: Vec<String> = set(["budget.steps=200", "run.model.levels.*.encoder.d_ff=48"]);
    let more: Vec<&str> =
        more.iter().map(String::as_str).chain(["--dry-run", "--no-bench", "--format", "json"]).collect();
    let plan: Value = serde_json::from_str(&lab.run(&more)).unwrap();
    assert_eq!(plan["arms"][0]["steps"], 200);
    let config = plan["arms"][0]["config"].as_str().unwrap();
    assert_eq!(config.matches("d_ff = 48").count(), 2, "{config}");
}
