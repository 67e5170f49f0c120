//! What a week of computing meets: kills at any moment, full disks, a second process, a finger on Ctrl-C.
#![cfg(unix)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use photon_train::checkpoint::Checkpoints;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{assert_says, complaint_of, load, path_of, photon_train, set, stdout_of, write_tiny_run};
use crate::runs::without_machine;
use crate::weights::Weights;

/// A run through the program, in a folder of its own.
struct Job {
    folder: TempDir,
    config: PathBuf,
    overrides: Vec<String>,
}

impl Job {
    fn new(overrides: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = write_tiny_run(folder.path());
        Self { folder, config, overrides: set(overrides) }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn args(&self) -> Vec<String> {
        let out = self.out();
        let mut args =
            vec!["run".to_owned(), self.config.display().to_string(), "--out".into(), out.display().to_string()];
        args.extend(self.overrides.iter().cloned());
        args
    }

    /// The command; with `--resume` it may be given any number of times.
    fn command(&self, more: &[&str]) -> assert_cmd::Command {
        let mut command = photon_train(self.args());
        command.args(more);
        command
    }

    fn spawn(&self, stderr: Stdio) -> Child {
        let mut command = Command::new(path_of("photon-train"));
        command.args(self.args()).arg("--resume").stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
    }

    /// The lines of `metrics.jsonl` without how long they took and how much memory.
    fn metrics(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.out().join("metrics.jsonl")).unwrap_or_default();
        // The last line may be cut where the process was killed.
        text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(without_machine).collect()
    }

    /// The step of the newest checkpoint, every file of which has been checked.
    fn newest_step(&self) -> u64 {
        let (found, damaged) = Checkpoints::of_run(&self.out()).newest_whole().unwrap();
        assert!(damaged.is_empty(), "{damaged:?}");
        found.map_or(0, |found| found.state.step)
    }

    fn assert_same(&self, expected: &Self) {
        assert_eq!(self.metrics(), expected.metrics());
        let step = expected.newest_step();
        assert_eq!(self.newest_step(), step);
        let samples = |job: &Self| fs::read(job.out().join("samples.txt")).unwrap();
        assert_eq!(samples(self), samples(expected));
        for name in ["last/model", "best/model", &format!("step-{step:08}/optimizer")] {
            let read = |job: &Self| Weights::read(&job.out().join(format!("checkpoints/{name}.safetensors")));
            assert!(read(self) == read(expected), "{name} differs");
        }
    }
}

/// Steps between the checkpoints of the runs that are killed.
const EVERY: u64 = 2;

/// Kills runs at random moments, and lets each come to its end. `PHOTON_KILLS=50 cargo test … killed` tries harder.
#[test]
fn a_run_killed_at_any_moment_goes_on_from_its_last_checkpoint() {
    let n_kills: u32 = std::env::var("PHOTON_KILLS").map_or(4, |n| n.parse().unwrap());
    let overrides =
        ["steps=60", &format!("checkpoint_every_steps={EVERY}"), "eval.every_steps=5", "ema={ decay = 0.9 }"];
    let expected = Job::new(&overrides);
    let started = Instant::now();
    stdout_of(expected.command(&[]));
    let duration_ms = started.elapsed().as_millis() as u64;

    let mut rng = ChaCha8Rng::seed_from_u64(std::process::id().into());
    let (mut killed, mut in_a_save) = (0, 0);
    while killed < n_kills {
        let job = Job::new(&overrides);
        for _ in 0..8 {
            let mut child = job.spawn(Stdio::null());
            std::thread::sleep(Duration::from_millis(rng.random_range(0..duration_ms)));
            child.kill().unwrap();
            let status = child.wait().unwrap();
            if status.success() {
                break;
            }
            assert_eq!(signal(status), Some(9), "{status}");
            killed += 1;
            assert_survived(&job);
            in_a_save += u32::from(left_over(&job.out().join("checkpoints")));
        }
        stdout_of(job.command(&["--resume"]));
        job.assert_same(&expected);
        assert!(!left_over(&job.out().join("checkpoints")));
    }
    println!("killed {killed} times, {in_a_save} of them while a checkpoint was written or removed");
}

fn signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

/// After a kill: no step before the last due checkpoint is lost, and what is there can be read.
fn assert_survived(job: &Job) {
    let steps = job.metrics().iter().filter(|line| line["kind"] == "step").count() as u64;
    let due = steps.saturating_sub(1) / EVERY * EVERY;
    let newest = job.newest_step();
    assert!(newest >= due, "{steps} steps are recorded, the newest checkpoint is step {newest}");
    for name in ["last", "best"] {
        let folder = job.out().join("checkpoints").join(name);
        if folder.join("model.safetensors").exists() {
            load(&folder);
        }
    }
}

/// Whether something half-written or half-removed lies in a folder of checkpoints.
fn left_over(checkpoints: &Path) -> bool {
    let Ok(entries) = fs::read_dir(checkpoints) else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with('.'))
}

#[test]
fn a_disk_that_fills_up_during_a_save_costs_no_earlier_checkpoint() {
    let overrides = ["checkpoint_every_steps=5", "eval.every_steps=100", "seed=3"];
    let expected = Job::new(&[&overrides[..], &["steps=30"]].concat());
    stdout_of(expected.command(&[]));

    let mut job = Job::new(&[&overrides[..], &["steps=10"]].concat());
    stdout_of(job.command(&[]));
    job.overrides = set([&overrides[..], &["steps=30"]].concat());
    let before = job.newest_step();
    // Files may not grow beyond some size: to the program a full disk. The optimiser's file is the largest, then the
    // weights, then the metrics.
    let size = |name: &str| fs::metadata(job.out().join("checkpoints/step-00000010").join(name)).unwrap().len() / 1024;
    for (max_kib, file) in [
        (size("optimizer.safetensors") - 1, "optimizer.safetensors"),
        (size("model.safetensors") - 1, "model.safetensors"),
    ] {
        let mut command = assert_cmd::Command::new("bash");
        // Without the trap the system would end the program instead of refusing to write.
        command.args(["-c", "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\"", &max_kib.to_string()]);
        command.arg(path_of("photon-train")).args(job.args()).arg("--resume");
        assert_says(&complaint_of(command), &["cannot write", file, "is the disk full?"]);
        assert_eq!(job.newest_step(), before);
        assert!(!left_over(&job.out().join("checkpoints")));
        load(&job.out().join("checkpoints/last"));
    }
    // Room has been made. The schedule of the first ten steps was that of a shorter run, so only the way is compared.
    stdout_of(job.command(&["--resume"]));
    assert_eq!(job.newest_step(), 30);
    assert_eq!(job.metrics().len(), expected.metrics().len() + 1);
}

/// Starts a long run and waits until it has made steps.
fn long_job() -> (Job, Child, BufReader<std::process::ChildStderr>, String) {
    let job = Job::new(&["steps=1000000", "eval.every_steps=2", "checkpoint_every_steps=1000000"]);
    let mut child = job.spawn(Stdio::piped());
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("\nstep 4: held-out") {
        assert!(stderr.read_line(&mut said).unwrap() > 0, "it ended by itself: {said}");
    }
    (job, child, stderr, said)
}

#[test]
fn a_second_process_is_refused() {
    let (job, mut child, _stderr, _) = long_job();
    let holder = format!("in use by another process (id {})", child.id());
    for more in [&["--resume"][..], &["--overwrite"], &[]] {
        assert_says(&complaint_of(job.command(more)), &[&holder, "choose another --out"]);
    }
    assert!(child.try_wait().unwrap().is_none(), "the first goes on");
    child.kill().unwrap();
    child.wait().unwrap();
    // The lock went with the process.
    assert!(job.newest_step() >= 2);
    let said = complaint_of(job.command(&["--resume", "--set", "steps=3"]));
    assert_says(&said, &["steps: was 1000000, now 3 (it may only rise)"]);
}

#[test]
fn another_tokenizer_is_refused() {
    let job = Job::new(&["steps=4"]);
    stdout_of(job.command(&[]));
    let text = job.folder.path().join("text.txt").display().to_string();
    let tokenizer = job.folder.path().join("tokenizer.json").display().to_string();
    // As many entries as there are bytes, so that it is the tokenizer that is refused.
    stdout_of(photon_train(["tokenizer", &text, "--vocab-size", "257", "--out", &tokenizer]));
    let other = format!("tokenizer={tokenizer}");
    let said = complaint_of(job.command(&["--resume", "--set", &other, "--set", "steps=8"]));
    assert_says(&said, &["cannot go on", "tokenizer: was ", "(tokenizer.json)", "another --out"]);
}

#[test]
fn ctrl_c_prints_the_command_that_goes_on() {
    let (job, child, mut stderr, mut said) = long_job();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_says(&said, &["interrupted after", "to go on:", "photon-train run", "--resume"]);
    let line = said.lines().find_map(|line| line.trim().strip_prefix("photon-train ")).unwrap();
    let words = crate::programs::shell_words(line);
    assert_eq!(words[..4], job.args()[..4]);
    for word in ["--resume", "steps=1000000", "eval.every_steps=2"] {
        assert!(words.iter().any(|found| found == word), "{line}");
    }
    assert_eq!(job.metrics().iter().filter(|line| line["kind"] == "step").count() as u64, job.newest_step());
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let overrides = ["steps=12", "replicas=1", "eval.every_steps=4"];
    let expected = Job::new(&overrides);
    let mut one_thread = expected.command(&[]);
    one_thread.env("RAYON_NUM_THREADS", "1");
    stdout_of(one_thread);
    let job = Job::new(&overrides);
    let mut begun = job.command(&["--set", "steps=12"]);
    begun.env("RAYON_NUM_THREADS", "3");
    stdout_of(begun);
    job.assert_same(&expected);
}
