//! Several processes or threads on one run: the same curve, one writer, and an end to all when one of them dies.

#[cfg(feature = "mpi")]
mod together;

use std::env;
use std::process::Command;
use std::rc::Rc;

use burn::tensor::Device;
use photon_train::ranks::{Ranks, Team};

use crate::programs::{assert_says, complaint_of, photon_train, write_tiny_run};
use crate::runs::{Run, assert_same_curve, tell};
use crate::weights::Weights;

#[test]
fn threads_learn_what_one_does_and_go_on_where_they_stopped() {
    let overrides = ["steps=50", "batch_size=6", "ema={ decay = 0.9 }"];
    let alone = Run::new(&overrides);
    alone.train().unwrap();
    for n_threads in [2, 3] {
        let run = Run::new(&overrides);
        run.train_together(n_threads, None);
        assert_same_curve(&run.metrics(), &alone.metrics(), &format!("{n_threads} threads"));

        let pieces = Run::new(&overrides);
        assert!(pieces.train_together(n_threads, Some(20)).interrupted);
        pieces.train_together(n_threads, None);
        let weights = |run: &Run| Weights::read(&run.out().join("checkpoints/last/model.safetensors"));
        assert!(weights(&pieces) == weights(&run), "the weights differ");
    }
}

#[test]
fn a_thread_that_fails_or_panics_ends_all() {
    const AS_VICTIM: &str = "PHOTON_TEST_VICTIM";
    if let Some(ending) = env::var_os(AS_VICTIM) {
        let work = |ranks: &Rc<Ranks>| match (ranks.rank(), ending == "panic") {
            (1, true) => panic!("memory is full"),
            (1, false) => Err("memory is full"),
            _ => {
                ranks.wait();
                Ok(())
            }
        };
        Team::new(vec![Device::flex(); 3], false).work(work, |rank, error| tell(rank, &error));
        unreachable!("the first waits for ever");
    }
    for (ending, told) in [("error", "rank 1: memory is full"), ("panic", "memory is full")] {
        // The program that ends is this one, in a process of its own.
        let mut victim = Command::new(env::current_exe().unwrap());
        victim.args(["--exact", "ranks::a_thread_that_fails_or_panics_ends_all", "--nocapture"]).env(AS_VICTIM, ending);
        let output = victim.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{ending}");
        assert_says(&String::from_utf8_lossy(&output.stderr), &[told]);
    }
}

#[test]
fn several_devices_are_cards() {
    let folder = tempfile::tempdir().unwrap();
    let config = write_tiny_run(folder.path());
    let command = photon_train(["run".as_ref(), config.as_os_str(), "--devices".as_ref(), "2".as_ref()]);
    assert_says(&complaint_of(command), &["--devices 2 takes CUDA cards", "this is cpu", "mpirun"]);
}

#[cfg(not(feature = "mpi"))]
#[test]
fn one_of_several_processes_without_mpi_says_how_to_get_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = write_tiny_run(folder.path());
    let mut command = photon_train(["run".as_ref(), config.as_os_str()]);
    command.env("OMPI_COMM_WORLD_SIZE", "2");
    assert_says(&complaint_of(command), &["one of 2 processes", "--features photon-train/mpi"]);
}
