//! Several processes on one run: the same curve, one writer, and an end to all when one of them dies.

#[cfg(feature = "mpi")]
mod together;

#[cfg(not(feature = "mpi"))]
#[test]
fn one_of_several_processes_without_mpi_says_how_to_get_it() {
    use crate::programs::{assert_says, complaint_of, photon_train, write_tiny_run};

    let folder = tempfile::tempdir().unwrap();
    let config = write_tiny_run(folder.path());
    let mut command = photon_train(["run".as_ref(), config.as_os_str()]);
    command.env("OMPI_COMM_WORLD_SIZE", "2");
    assert_says(&complaint_of(command), &["one of 2 processes", "--features photon-train/mpi"]);
}
