//! `photon-train run`.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use photon_core::accounting::model_cost;
use photon_core::device::DeviceChoice;
use photon_core::error_text::error_text;
use photon_core::tokenizer::Tokenizer;
use photon_train::config::RunConfig;
use photon_train::data::{Prepared, prepare};
use photon_train::peak::Peak;
use photon_train::plot::RunMetrics;
use photon_train::ranks::{Ranks, Team, check_sums};
use photon_train::record::{Existing, check_free};
use photon_train::report::{EvalReport, Observer, Outcome, StepReport};
use photon_train::trainer::{RunPlace, check_vocabulary, train};

use super::display::{self, DisplayChoice, RunFacts, terminal};
use super::{log, print, progress::prepare_shown};

const EXAMPLES: &str = "\
Examples:
  photon-train run configs/train/quickstart.toml --out runs/a
  # After Ctrl-C, a crash or a loss of power: go on exactly where the newest checkpoint stands. Where there is no
  # run yet one begins, so that a job may always be started like this.
  photon-train run configs/train/quickstart.toml --out runs/a --resume
  # Train longer than was planned: from here on the learning rate follows the schedule of the new length.
  photon-train run configs/train/quickstart.toml --out runs/a --resume --set steps=2400
  # Two processes on one run, here or on two machines (built with `--features photon-train/mpi`).
  mpirun -n 2 photon-train run configs/train/quickstart.toml --out runs/a
  # Four CUDA cards of this machine on one run, whose sums are NCCL's.
  photon-train run configs/train/quickstart.toml --out runs/a --device cuda --devices 4
  # Lines in place of the dashboard, on a terminal too.
  photon-train run configs/train/quickstart.toml --display plain --log-every-steps 100

To go on, everything must be as it was but `steps`, which may rise, `checkpoint_every_steps`,
`checkpoints`, `eval.histograms` and `guards`.";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct RunArgs {
    /// The run as a TOML file.
    config: PathBuf,
    /// Change a key of the config, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// CUDA cards of this machine that share the rows of each update.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    devices: u8,
    /// The run folder. Without it runs/NAME after the config's file name.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Replace the run that the folder holds.
    #[arg(long)]
    overwrite: bool,
    /// Go on with the run that the folder holds; where there is none, begin one.
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// With --resume: a key of the config that may have changed, such as optimizer.learning_rate; may be given several
    /// times.
    #[arg(long, value_name = "KEY", requires = "resume")]
    accept: Vec<String>,
    /// How to show the run.
    #[arg(long, value_enum, default_value_t = DisplayChoice::Auto)]
    display: DisplayChoice,
    /// Steps between lines of the plain display. Without it a line comes every ten seconds.
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    log_every_steps: Option<u64>,
    /// What the machine computes at most, in 10^12 FLOPs a second, from its data sheet for instance. Without it the rate
    /// of large f32 matrix products is measured.
    #[arg(long, value_name = "TFLOPS")]
    peak_tflops: Option<f64>,
    /// Save and stop when stdin ends, as by Ctrl-C: for a program that starts this one, and may itself be killed.
    #[arg(long, hide = true)]
    stop_with_stdin: bool,
}

pub(super) fn run(args: RunArgs) -> Result<()> {
    let ranks = Rc::new(Ranks::join()?);
    let stop = stop_on_interrupt(ranks.is_first())?;
    if args.stop_with_stdin {
        stop_with_stdin(stop.clone());
    }
    let (config, out, outcome) = match args.devices {
        1 => match train_on(&ranks, &args, &stop) {
            Ok(done) => done,
            Err(error) if ranks.n_ranks() > 1 => {
                log_failure(ranks.rank(), &error);
                ranks.abort();
                return Err(error);
            }
            Err(error) => return Err(error),
        },
        _ => train_on_cards(&ranks, &args, &stop)?,
    };
    ranks.finish();
    if !ranks.is_first() {
        return Ok(());
    }
    if outcome.interrupted {
        bail!(
            "interrupted after {} of {} steps; the weights are in {}\nto go on:\n  {}",
            outcome.steps,
            config.train.steps,
            out.join("checkpoints/last").display(),
            resume_command(&args, &out, ranks.n_ranks()),
        );
    }
    print(format!(
        "held-out bits per byte: {:.4} after {} steps (best {:.4})",
        outcome.last.bits_per_byte, outcome.steps, outcome.best_bits_per_byte
    ))?;
    print("try it:")?;
    print(format!(
        "  cargo run --release --bin photon-infer -- generate --model {} --prompt {}",
        shell_word(&out.join("checkpoints/best").display().to_string()),
        shell_word(&config.train.eval.sample_prompt)
    ))
}

/// A thread of this program for each card.
fn train_on_cards(alone: &Ranks, args: &RunArgs, stop: &Arc<AtomicBool>) -> Result<(RunConfig, PathBuf, Outcome)> {
    ensure!(alone.n_ranks() == 1, "mpirun starts a process for each card: leave --devices out");
    let open = (0..args.devices.into()).map(|index| args.device.open_on(index));
    let cards = open.collect::<Result<Vec<_>, _>>()?;
    ensure!(
        cards.iter().all(|card| card.name == "cuda"),
        "--devices {} takes CUDA cards, whose sums are NCCL's, and this is {}: the cores of a CPU work together anyway \
         (`replicas`), and mpirun starts a process for each device of any kind",
        args.devices,
        cards[0].name,
    );
    let team = Team::new(cards.into_iter().map(|card| card.device).collect(), true);
    Ok(team.work(|ranks| train_on(ranks, args, stop), |rank, error| log_failure(rank, &error)))
}

/// Says which rank ends the run of all, on a terminal that shows it.
fn log_failure(rank: usize, error: &anyhow::Error) {
    terminal::give_back();
    log(format!("error: rank {rank}: {}", error_text(&**error)));
}

/// The work of one rank; the first alone shows it.
fn train_on(ranks: &Rc<Ranks>, args: &RunArgs, stop: &Arc<AtomicBool>) -> Result<(RunConfig, PathBuf, Outcome)> {
    let config = RunConfig::load(&args.config, &args.set)?;
    let out = match &args.out {
        Some(out) => out.clone(),
        None => Path::new("runs").join(args.config.file_stem().context("the config has no file name")?),
    };
    let existing = match (args.overwrite, args.resume) {
        (true, _) => Existing::Replace,
        (_, true) => Existing::Resume,
        _ => Existing::Refuse,
    };
    if let Some(tflops) = args.peak_tflops {
        ensure!(tflops > 0.0 && tflops.is_finite(), "--peak-tflops {tflops}: must be above 0");
    }
    args.display.check()?;
    if ranks.is_first() {
        check_free(&out, existing)?;
    }
    let tokenizer = config.train.load_tokenizer()?;
    check_vocabulary(&config, &tokenizer)?;
    let device = args.device.open_on(ranks.local_rank())?;
    config.train.precision.check(&config.model, &device.device, device.name)?;
    check_sums(ranks, &device.device)?;
    // Beside the runs, so that the next run on the same text finds the tokens.
    let cache = out.parent().unwrap_or(Path::new("")).join(".tokens");
    let data = prepare_in_turn(ranks, &config, &tokenizer, &cache)?;
    let place = |observer, peak| RunPlace { folder: &out, existing, accept: &args.accept, stop, observer, peak, ranks };
    if !ranks.is_first() {
        let outcome = train(&config, &tokenizer, data, &device, place(&mut Unseen, None))?;
        return Ok((config, out, outcome));
    }
    log(&data.report);
    let among = if ranks.n_ranks() > 1 {
        format!("; {}: {}", if args.devices > 1 { "cards" } else { "processes" }, ranks.n_ranks())
    } else {
        String::new()
    };
    log(format!("device: {device}; run folder: {}{among}", out.display()));
    let peak = match args.peak_tflops {
        Some(tflops) => Peak::given(tflops * 1e12),
        None => Peak::measure(&device.device),
    };
    log(format!("peak: {peak}"));
    let facts = RunFacts {
        folder: out.display().to_string(),
        device: device.name.into(),
        parameters: model_cost(&config.model, config.train.seq_len).parameters(),
        steps: config.train.steps,
        before: args.resume.then(|| RunMetrics::read(&out).ok()).flatten(),
    };
    let mut observer = display::open(args.display, facts, args.log_every_steps, stop.clone())?;
    let outcome = train(&config, &tokenizer, data, &device, place(&mut *observer, Some(peak)));
    drop(observer);
    let outcome = outcome?;
    Ok((config, out, outcome))
}

/// The first rank tokenises; the others then find the tokens there.
fn prepare_in_turn(ranks: &Ranks, config: &RunConfig, tokenizer: &Tokenizer, cache: &Path) -> Result<Prepared> {
    let train = &config.train;
    if !ranks.is_first() {
        ranks.wait();
        return Ok(prepare(&train.data, tokenizer, cache, train.seq_len, &|_| ())?);
    }
    let data = prepare_shown(train, tokenizer, cache)?;
    ranks.wait();
    Ok(data)
}

/// What to type to go on.
fn resume_command(args: &RunArgs, out: &Path, n_ranks: usize) -> String {
    let RunArgs { config, set, device, .. } = args;
    let mut words = vec![config.display().to_string(), "--out".into(), out.display().to_string(), "--resume".into()];
    words.extend(set.iter().flat_map(|key_value| ["--set".to_owned(), key_value.clone()]));
    if *device != DeviceChoice::Auto {
        words.extend(["--device".to_owned(), device.to_string()]);
    }
    if args.devices > 1 {
        words.extend(["--devices".to_owned(), args.devices.to_string()]);
    }
    let words: Vec<String> = words.iter().map(|word| shell_word(word)).collect();
    let together = if n_ranks > 1 { format!("mpirun -n {n_ranks} ") } else { String::new() };
    format!("{together}photon-train run {}", words.join(" "))
}

/// A text as one word of a command line.
pub(super) fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-=".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        // Nothing is special inside single quotes but the quote.
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A flag that the first Ctrl-C sets; the second ends the program at once.
pub(super) fn stop_on_interrupt(is_seen: bool) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            terminal::give_back();
            std::process::exit(130);
        }
        // A dashboard says so itself.
        if is_seen && !terminal::is_held() {
            log("stopping after this step and saving (again to stop at once)");
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(stop)
}

/// Sets the flag when nothing can come from stdin any more.
fn stop_with_stdin(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        // An error says as much as the end: nobody is there.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        stop.store(true, Ordering::Relaxed);
    });
}

/// Shows nothing: what all ranks do, the first tells.
struct Unseen;

impl Observer for Unseen {
    fn step(&mut self, _: &StepReport) {}
    fn evaluation(&mut self, _: &EvalReport) {}
}
