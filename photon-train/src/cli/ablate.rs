//! `photon-train ablate`.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail};
use clap::Args;
use photon_core::atomic_file;
use photon_core::device::DeviceChoice;
use photon_core::tokenizer::Tokenizer;
use photon_train::ablate::{
    AblateError, ArmResults, Decided, Event, Experiment, Plan, PlannedArm, PlannedRun, Results, Runner, Status, run_id,
};
use photon_train::config::RunConfig;
use photon_train::data::{Prepared, TokenStore};
use photon_train::record::Claim;
use photon_train::replicas::default_replicas;
use serde_json::{Value, json};

use self::progress::ExperimentProgress;
use super::run::{shell_word, stop_on_interrupt};
use super::{Format, grouped, log, print, progress::prepare_shown, table};

mod progress;

const EXAMPLES: &str = "\
Examples:
  # Every resolved config, its parameters, FLOPs and tokens, and how long it takes here. Trains nothing, needs no text.
  photon-train ablate experiments/levels/experiment.toml --dry-run
  # Two runs side by side. After Ctrl-C, a kill or a loss of power the same command goes on.
  photon-train ablate experiments/levels/experiment.toml --jobs 2
  # Smaller, elsewhere.
  photon-train ablate experiments/levels/experiment.toml --set budget.tokens=1e5 --set seeds=[1] --out runs/small
  # What came of it.
  photon-train report runs/ablations/levels";

/// Updates that a benchmark takes the time of, and those before.
const BENCH_STEPS: usize = 2;
const BENCH_WARMUP_STEPS: usize = 1;
/// Of held-out text that measures look at, at most.
const HELD_OUT_TOKENS: usize = 1 << 20;

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct AblateArgs {
    /// The experiment as a TOML file.
    experiment: PathBuf,
    /// Change a key of the file, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The experiment's folder. Without it runs/ablations/NAME.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Runs side by side; the cores are divided among them.
    #[arg(long, default_value = "1")]
    jobs: NonZero<usize>,
    /// Show what would be run, and run nothing.
    #[arg(long)]
    dry_run: bool,
    /// With --dry-run: do not take the time of a few updates of each arm.
    #[arg(long, requires = "dry_run")]
    no_bench: bool,
    /// With --dry-run: how to print.
    #[arg(long, value_enum, default_value_t = Format::Text, requires = "dry_run")]
    format: Format,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

/// What a run on this machine gets of it.
struct Machine {
    program: PathBuf,
    device: DeviceChoice,
    threads: usize,
}

pub(super) fn run(args: &AblateArgs) -> Result<()> {
    let experiment = Experiment::load(&args.experiment, &args.set)?;
    let cores = available_parallelism().map_or(1, NonZero::get);
    let threads = (cores / args.jobs).max(1);
    let program = std::env::current_exe().context("cannot tell where this program lies")?;
    let machine = Machine { program, device: args.device, threads };
    for measure in experiment.file.measures.values() {
        measure.program(&machine.program)?;
    }
    let out = args.out.clone().unwrap_or_else(|| Path::new("runs/ablations").join(&experiment.name));
    let out = std::path::absolute(&out).with_context(|| format!("--out {}", out.display()))?;
    // A GPU works on one model at a time.
    let replicas = default_replicas(machine.device.open()?.name).min(threads);
    let mut decided = Decided::read_or(&out, Decided { replicas, tokens_per_sec: BTreeMap::new() })?;
    let plan = Plan::new(experiment, &mut decided, &mut |name, config| machine.tokens_per_sec(name, config))?;
    match args.dry_run {
        true => dry_run(args, &plan, &machine),
        false => run_all(args, &plan, &decided, &machine, &out),
    }
}

fn run_all(args: &AblateArgs, plan: &Plan, decided: &Decided, machine: &Machine, out: &Path) -> Result<()> {
    let stop = stop_on_interrupt(true)?;
    let _claim = Claim::new(out)?;
    decided.write(out)?;
    let (runs, held_out) = prepare_all(plan, out)?;
    let runner = Runner {
        plan,
        runs: &runs,
        folder: out,
        program: &machine.program,
        held_out: &held_out,
        device: args.device.to_string(),
        jobs: args.jobs.get(),
        threads: machine.threads,
        stop: &stop,
    };
    let jobs = args.jobs;
    log(format!("{} arms, {} runs, {jobs} side by side; folder: {}", plan.arms.len(), runs.len(), out.display()));
    let mut progress = ExperimentProgress::new(plan);
    let results = runner.run(&mut |event: Event| progress.show(&event))?;
    progress.end();
    let count =
        |is: fn(&Status) -> bool| results.arms.iter().flat_map(|arm| &arm.runs).filter(|run| is(&run.status)).count();
    if count(|status| *status == Status::Waiting) > 0 {
        bail!("interrupted\nto go on:\n  {}", again(args));
    }
    print(summary(&results))?;
    print(format!("results: {}", out.join("results.json").display()))?;
    let is_failed = |status: &Status| match status {
        Status::Failed { .. } => true,
        Status::Finished(outcome) => !outcome.failed_measures.is_empty(),
        Status::Waiting => false,
    };
    match count(is_failed) {
        0 => Ok(()),
        n => {
            bail!("{n} of {} runs, or measures of them, failed; what was said is in results.json and logs/", runs.len())
        }
    }
}

/// Tokenises what the arms train on, and names their runs. Also the files of held-out text that measures ask for.
fn prepare_all(plan: &Plan, out: &Path) -> Result<(Vec<PlannedRun>, Vec<PathBuf>)> {
    let needs_held_out = plan.experiment.file.measures.values().any(|measure| measure.needs_held_out());
    // Of arms on the same texts, the first.
    let mut known: Vec<(&RunConfig, String, PathBuf)> = Vec::new();
    let (mut runs, mut files) = (Vec::new(), Vec::new());
    for (index, arm) in plan.arms.iter().enumerate() {
        let train = &arm.config.train;
        let is_same = |other: &&(&RunConfig, String, PathBuf)| {
            let other = &other.0.train;
            other.data == train.data && other.tokenizer == train.tokenizer && other.seq_len >= train.seq_len
        };
        let (data_hash, file) = match known.iter().find(is_same) {
            Some((_, hash, file)) => (hash.clone(), file.clone()),
            None => {
                let tokenizer = train.load_tokenizer().with_context(|| format!("arm {:?}", arm.name))?;
                let data = prepare_arm(arm, &tokenizer, out)?;
                let hash = data.report.content_hash.clone();
                let file = out.join("held-out").join(format!("{}.txt", &hash[..12]));
                if needs_held_out {
                    write_held_out(&data.valid, &tokenizer, &file)?;
                }
                known.push((&arm.config, hash.clone(), file.clone()));
                (hash, file)
            }
        };
        for &seed in &plan.experiment.file.seeds {
            let id = run_id(&arm.run(seed), &data_hash).with_context(|| format!("arm {:?}: init_from", arm.name))?;
            runs.push(PlannedRun { arm: index, seed, id });
        }
        files.push(file);
    }
    Ok((runs, files))
}

fn prepare_arm(arm: &PlannedArm, tokenizer: &Tokenizer, out: &Path) -> Result<Prepared> {
    // Where the runs look for it.
    let cache = out.join(".tokens");
    let data = prepare_shown(&arm.config.train, tokenizer, &cache).with_context(|| format!("arm {:?}", arm.name))?;
    log(&data.report);
    Ok(data)
}

/// The held-out documents, or so many of them, with an empty line between two.
fn write_held_out(store: &TokenStore, tokenizer: &Tokenizer, path: &Path) -> Result<()> {
    let token_ids = store.read(0..store.len().min(HELD_OUT_TOKENS));
    let eos = tokenizer.eos_id();
    let documents: Vec<Vec<u8>> =
        token_ids.split(|&id| Some(id) == eos).map(|document| tokenizer.decode(document)).collect();
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)
        .and_then(|()| atomic_file::write(path, &documents.join(&b"\n\n"[..])))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A line an arm.
fn summary(results: &Results) -> String {
    let mut table = table(&["arm", "parameters", "steps", "held-out bits/byte, one a seed"]);
    for ArmResults { name, parameters, steps, runs, .. } in &results.arms {
        let bits = runs.iter().map(|run| match &run.status {
            Status::Finished(outcome) => format!("{:.4}", outcome.last.held_out.bits_per_byte),
            Status::Failed { .. } => "failed".into(),
            Status::Waiting => "waiting".into(),
        });
        let bits: Vec<String> = bits.collect();
        table.add_row(vec![name.clone(), grouped(*parameters), grouped(*steps as usize), bits.join("  ")]);
    }
    table.to_string()
}

/// What to type to go on.
fn again(args: &AblateArgs) -> String {
    let mut words = vec![args.experiment.display().to_string()];
    words.extend(args.set.iter().flat_map(|set| ["--set".to_owned(), set.clone()]));
    words.extend(args.out.iter().flat_map(|out| ["--out".to_owned(), out.display().to_string()]));
    if args.jobs.get() > 1 {
        words.extend(["--jobs".to_owned(), args.jobs.to_string()]);
    }
    if args.device != DeviceChoice::Auto {
        words.extend(["--device".to_owned(), args.device.to_string()]);
    }
    let words: Vec<String> = words.iter().map(|word| shell_word(word)).collect();
    format!("photon-train ablate {}", words.join(" "))
}

fn dry_run(args: &AblateArgs, plan: &Plan, machine: &Machine) -> Result<()> {
    let mut secs = Vec::with_capacity(plan.arms.len());
    for arm in &plan.arms {
        secs.push(match args.no_bench {
            true => None,
            false => Some(arm.tokens_of_work() / machine.tokens_per_sec(&arm.name, &arm.config)?),
        });
    }
    let n_seeds = plan.experiment.file.seeds.len() as f64;
    let total_secs: Option<f64> = secs.iter().copied().sum::<Option<f64>>();
    let total_secs = total_secs.map(|secs| secs * n_seeds / args.jobs.get() as f64);
    let method = match args.no_bench {
        true => "not estimated (--no-bench)".to_owned(),
        false => format!(
            "from {BENCH_STEPS} updates of each arm, alone on {} threads, and evaluations by their tokens; {} runs side by \
             side are taken to be as fast as one",
            machine.threads, args.jobs
        ),
    };
    if args.format == Format::Json {
        let arms: Vec<Value> = plan.arms.iter().zip(&secs).map(|(arm, secs)| arm_json(arm, *secs)).collect();
        return print(json!({
            "name": plan.experiment.name,
            "reference": plan.arms[plan.reference].name,
            "seeds": plan.experiment.file.seeds,
            "jobs": args.jobs,
            "time_from": method,
            "estimated_secs": total_secs,
            "arms": arms,
        }));
    }
    let mut costs = table(&[
        "arm",
        "parameters",
        "FLOPs/token",
        "steps",
        "tokens",
        "training FLOPs",
        "cache bytes/token",
        "minutes a run",
    ]);
    for (arm, secs) in plan.arms.iter().zip(&secs) {
        print(format!("# arm {:?}{}\n{}", arm.name, fitted(arm), arm.config.to_toml()))?;
        let cache = photon_train::ablate::cache_results(&arm.caches, arm.config.train.seq_len);
        costs.add_row(vec![
            arm.name.clone(),
            grouped(arm.parameters),
            grouped(arm.flops_per_token.round() as usize),
            grouped(arm.config.train.steps as usize),
            grouped(arm.tokens as usize),
            format!("{:.4e}", arm.training_flops),
            format!("{:.1}", cache.iter().map(|cache| cache.bytes_per_token).sum::<f64>()),
            secs.map_or("-".into(), |secs| format!("{:.1}", secs / 60.0)),
        ]);
    }
    print(format!(
        "reference: {:?}; FLOPs of training; cache in f16 at the training length\n",
        plan.arms[plan.reference].name
    ))?;
    print(costs)?;
    let hours = total_secs.map_or(String::new(), |secs| format!(": {:.2} hours in all", secs / 3600.0));
    print(format!("\n{} arms, {n_seeds} seeds{hours}; time {method}", plan.arms.len()))
}

/// Which widths were fitted.
fn fitted(arm: &PlannedArm) -> String {
    let values: Vec<String> = arm.fitted.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    if values.is_empty() { String::new() } else { format!(", fitted: {}", values.join(", ")) }
}

fn arm_json(arm: &PlannedArm, secs: Option<f64>) -> Value {
    json!({
        "name": arm.name,
        "match": arm.matching,
        "fitted": arm.fitted.iter().cloned().collect::<BTreeMap<String, i64>>(),
        "parameters": arm.parameters,
        "training_flops_per_token": arm.flops_per_token,
        "steps": arm.config.train.steps,
        "tokens": arm.tokens,
        "training_flops": arm.training_flops,
        "caches": photon_train::ablate::cache_results(&arm.caches, arm.config.train.seq_len),
        "estimated_secs": secs,
        "differences": arm.differences,
        "config": arm.config.to_toml(),
    })
}

impl Machine {
    /// What a few updates in a process of their own reach.
    fn tokens_per_sec(&self, name: &str, config: &RunConfig) -> Result<f64, AblateError> {
        let failed = |reason: String| AblateError::Asked(format!("arm {name:?}: no benchmark: {reason}"));
        let folder = tempfile::tempdir().map_err(|error| failed(error.to_string()))?;
        let file = folder.path().join("model.toml");
        let model = toml::to_string(&config.model).map_err(|error| failed(error.to_string()))?;
        std::fs::write(&file, model).map_err(|error| failed(error.to_string()))?;
        log(format!("benchmark of {name:?}"));
        let train = &config.train;
        let mut command = std::process::Command::new(&self.program);
        command.arg("bench").arg(&file).args(["--format", "json", "--device", &self.device.to_string()]);
        for (option, value) in [
            ("--batch-size", Some(train.batch_size)),
            ("--seq-len", Some(train.seq_len)),
            ("--steps", Some(BENCH_STEPS)),
            ("--warmup-steps", Some(BENCH_WARMUP_STEPS)),
            ("--replicas", train.replicas),
            ("--micro-batch-size", train.micro_batch_size),
        ] {
            if let Some(value) = value {
                command.arg(option).arg(value.to_string());
            }
        }
        if train.gradient_checkpointing {
            command.arg("--gradient-checkpointing");
        }
        command.env("RAYON_NUM_THREADS", self.threads.to_string()).stdin(Stdio::null());
        let output = command.output().map_err(|error| failed(error.to_string()))?;
        let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let value: Value = serde_json::from_slice(&output.stdout).map_err(|_| failed(said()))?;
        value["training_tokens_per_sec"].as_f64().ok_or_else(|| failed(said()))
    }
}
