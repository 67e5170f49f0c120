//! Runs under `mpirun`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use photon_train::checkpoint::Checkpoints;
use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{assert_says, path_of, repository, set, write_run_of_clauses, write_tiny_run};
use crate::runs::{assert_same_curve, without_machine};
use crate::weights::Weights;

/// Steps of a run.
const STEPS: u64 = 50;

/// A run of a few processes, in a folder of its own.
struct Job {
    folder: TempDir,
    config: PathBuf,
    n_ranks: usize,
}

impl Job {
    fn new(n_ranks: usize) -> Self {
        Self::written(write_tiny_run, n_ranks)
    }

    fn written(write: fn(&Path) -> PathBuf, n_ranks: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = write(folder.path());
        Self { folder, config, n_ranks }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn args(&self, more: &[&str]) -> Vec<String> {
        let overrides = [&format!("steps={STEPS}"), "batch_size=6", "checkpoint_every_steps=10", "ema={ decay = 0.9 }"];
        let [config, out] = [&self.config, &self.out()].map(|path| path.display().to_string());
        let mut args = vec!["run".to_owned(), config, "--out".into(), out];
        args.extend(set(overrides));
        args.extend(more.iter().map(|&arg| arg.to_owned()));
        args
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = self.mpirun();
        command.args(["-n", &self.n_ranks.to_string()]).arg(path_of("photon-train")).args(self.args(more));
        command
    }

    /// `mpirun`, for a test: as whoever runs it, with more processes than cores.
    fn mpirun(&self) -> Command {
        let mut command = Command::new("mpirun");
        command.current_dir(repository()).arg("--oversubscribe");
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        // Those that start at the same time get into each other's way in one folder.
        command.env("TMPDIR", self.folder.path());
        command
    }

    fn run(&self, more: &[&str]) {
        let output = self.command(more).output().unwrap();
        assert!(output.status.success(), "{}", stderr_of(&output));
    }

    /// Whole lines of `metrics.jsonl`.
    fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.out().join("metrics.jsonl")).unwrap_or_default();
        text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::to_owned).collect()
    }

    fn metrics(&self) -> Vec<Value> {
        self.lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn n_steps(&self) -> u64 {
        self.metrics().iter().filter(|line| line["kind"] == "step").count() as u64
    }

    fn weights(&self) -> Weights {
        Weights::read(&self.out().join("checkpoints/last/model.safetensors"))
    }
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn two_and_three_processes_learn_what_one_does() {
    assert_equal(write_tiny_run, &[]);
}

#[test]
fn two_and_three_processes_keep_documents_apart_as_one_does() {
    // At the rate of the others the embeddings of rare bytes come near zero, where rounding is no longer small.
    assert_equal(write_run_of_clauses, &["--set", "optimizer.learning_rate=1e-3"]);
}

#[track_caller]
fn assert_equal(write: fn(&Path) -> PathBuf, more: &[&str]) {
    let alone = Job::written(write, 1);
    alone.run(more);
    let expected = alone.metrics();
    for n_ranks in [2, 3] {
        let job = Job::written(write, n_ranks);
        job.run(more);
        let found = job.metrics();
        assert_same_curve(&found, &expected, &format!("{n_ranks} processes"));
        let sample = |job: &Job| fs::read(job.out().join("samples.txt")).unwrap();
        assert_eq!(sample(&job).len(), sample(&alone).len());
    }
}

#[test]
fn a_process_that_dies_ends_all_and_the_run_goes_on_from_its_checkpoint() {
    for (n_ranks, victim) in [(2, 0), (3, 2)] {
        let expected = Job::new(n_ranks);
        expected.run(&[]);
        let job = Job::new(n_ranks);
        let mut mpirun = job.command(&[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while job.n_steps() < STEPS / 2 {
            assert!(mpirun.try_wait().unwrap().is_none(), "it ended before it was killed");
            thread::sleep(Duration::from_millis(5));
        }
        let id = children(mpirun.id())[victim].clone();
        assert!(Command::new("kill").args(["-9", &id]).status().unwrap().success());
        let output = mpirun.wait_with_output().unwrap();
        assert!(!output.status.success());
        assert_says(&stderr_of(&output), &["exited on signal 9"]);

        let (found, damaged) = Checkpoints::of_run(&job.out()).newest_whole().unwrap();
        assert!(damaged.is_empty() && found.unwrap().state.step >= 10, "{damaged:?}");
        job.run(&["--resume"]);
        let metrics = |job: &Job| -> Vec<Value> { job.lines().iter().map(|line| without_machine(line)).collect() };
        assert!(metrics(&job) == metrics(&expected), "the metrics differ");
        assert!(job.weights() == expected.weights(), "the weights differ");
    }
}

/// Processes that a process has started, oldest first.
fn children(id: u32) -> Vec<String> {
    let list = Path::new("/proc").join(id.to_string()).join("task").join(id.to_string()).join("children");
    fs::read_to_string(list).unwrap().split_whitespace().map(str::to_owned).collect()
}

#[test]
fn processes_that_do_not_fit_together_say_so() {
    let job = Job::new(2);
    let refused = job.command(&["--set", "batch_size=1"]).output().unwrap();
    assert!(!refused.status.success());
    assert_says(&stderr_of(&refused), &["batch_size = 1 is less than the 2 processes"]);

    let mut command = job.mpirun();
    command.args(["-n", "1"]).arg(path_of("photon-train")).args(job.args(&[]));
    command.args([":", "-n", "1"]).arg(path_of("photon-train")).args(job.args(&["--set", "seed=7"]));
    let refused = command.output().unwrap();
    assert!(!refused.status.success());
    assert_says(&stderr_of(&refused), &["rank 1 of 2 differs from rank 0 in its config"]);
    assert!(!job.out().join("metrics.jsonl").exists());
}
