//! Those that work on a run together: processes, which `mpirun` starts side by side on one machine or on several, or the
//! threads of one program, one for each graphics card.
//!
//! Every rank holds the whole model, reads its share of the rows of each update, and takes the same decisions from the
//! same sums. The first alone writes. Sums over processes are those of the message-passing library, sums over cards
//! Burn's; here is only what the run asks of them.

#[cfg(feature = "mpi")]
mod mpi;
mod threads;

use std::env;
use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use sha2::{Digest, Sha256};

pub use self::threads::{Team, check_sums};

/// Those that work on one run, seen from one of them.
pub struct Ranks {
    rank: usize,
    n_ranks: usize,
    /// Place among those of this machine.
    local_rank: usize,
    engine: Option<Box<dyn Engine>>,
}

/// What carries sums from rank to rank. All ranks make the same calls in the same order.
trait Engine {
    /// Adds up, place by place, what the ranks hold; all of them have the sums then.
    fn sum(&self, values: &mut [f64]);
    /// The same of a tensor on the device of each rank.
    fn sum_tensor(&self, values: Tensor<1>) -> Tensor<1>;
    /// Gives all ranks what the first holds.
    fn broadcast_first(&self, bytes: &mut [u8]);
    /// Ends all ranks, without waiting for any.
    fn abort(&self) -> !;
    /// Takes leave of the other ranks, who must do so too.
    fn finish(&self);
}

/// Why ranks cannot work on one run.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    /// The program can be one of several, but was built to be alone.
    #[error(
        "this is one of {0} processes that were started together, but the program was built without MPI: rebuild with \
         `cargo build --release --features photon-train/mpi`, or start it alone"
    )]
    NotBuilt(usize),
    /// The message-passing library does not start.
    #[error("MPI does not start: {0}")]
    Start(String),
    /// The cards cannot add up.
    #[error(
        "Burn's sums over several devices do not work here ({0}): is NCCL (libnccl.so.2) installed? Otherwise start \
         a process for each with mpirun, or leave --devices out"
    )]
    Collective(String),
    /// There is less to do than there are to do it.
    #[error(
        "batch_size = {batch_size} is less than the {n_ranks} processes or devices: each works on whole rows; start \
         fewer"
    )]
    TooMany {
        /// Rows of an update.
        batch_size: usize,
        /// Processes or devices.
        n_ranks: usize,
    },
    /// What must be the same everywhere is not.
    #[error("rank {rank} of {n_ranks} differs from rank 0 in its {what}: {fix}")]
    Disagree {
        /// Which process.
        rank: usize,
        /// Of how many.
        n_ranks: usize,
        /// In what it differs.
        what: &'static str,
        /// What to do.
        fix: &'static str,
    },
}

impl Ranks {
    /// One process alone.
    pub fn alone() -> Self {
        Self { rank: 0, n_ranks: 1, local_rank: 0, engine: None }
    }

    /// All processes that were started together with this one; one alone where `mpirun` has not started it.
    ///
    /// # Errors
    ///
    /// If there are others and the program was built without MPI, or MPI does not start.
    pub fn join() -> Result<Self, RanksError> {
        // Set by Open MPI, and by MPICH and Slurm's PMI.
        let started_as = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].into_iter().find_map(number);
        match started_as {
            None => Ok(Self::alone()),
            Some(n_ranks) => Self::join_others(n_ranks),
        }
    }

    #[cfg(feature = "mpi")]
    fn join_others(_: usize) -> Result<Self, RanksError> {
        let engine = mpi::Mpi::start().map_err(RanksError::Start)?;
        let (rank, n_ranks) = engine.rank_and_size();
        let local_rank = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"].into_iter().find_map(number);
        Ok(Self { rank, n_ranks, local_rank: local_rank.unwrap_or(0), engine: Some(Box::new(engine)) })
    }

    #[cfg(not(feature = "mpi"))]
    fn join_others(n_ranks: usize) -> Result<Self, RanksError> {
        match n_ranks {
            0 | 1 => Ok(Self::alone()),
            _ => Err(RanksError::NotBuilt(n_ranks)),
        }
    }

    /// Which of them this is, counted from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    /// Which of those on this machine this is, counted from 0.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Whether this is the one that writes.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// This rank's share of `n` things: neighbours, shares that differ by one at most, all of them together all things.
    pub fn share(&self, n: usize) -> Range<usize> {
        share(n, self.rank, self.n_ranks)
    }

    /// Adds up what the ranks hold, place by place.
    pub fn sum(&self, values: &mut [f64]) {
        if let Some(engine) = &self.engine {
            engine.sum(values);
        }
    }

    /// Adds up what the ranks hold, each on its device.
    pub fn sum_tensor(&self, values: Tensor<1>) -> Tensor<1> {
        match &self.engine {
            Some(engine) => engine.sum_tensor(values),
            None => values,
        }
    }

    /// Whether it is so on any rank.
    pub fn any(&self, is_so: bool) -> bool {
        let mut n = [f64::from(u8::from(is_so))];
        self.sum(&mut n);
        n[0] > 0.0
    }

    /// Waits until all ranks have come here.
    pub fn wait(&self) {
        self.any(false);
    }

    /// Whether all ranks hold what the first holds; `what` it is and how to mend it, for the message.
    ///
    /// # Errors
    ///
    /// On every rank if it is not so on any, so that none goes on alone.
    pub fn agree(
        &self,
        what: &'static str,
        fix: &'static str,
        content: impl FnOnce() -> Vec<u8>,
    ) -> Result<(), RanksError> {
        let Some(engine) = &self.engine else { return Ok(()) };
        let own = Sha256::digest(content());
        let mut first = own;
        engine.broadcast_first(&mut first);
        let mut others = vec![0.0; self.n_ranks];
        others[self.rank] = f64::from(u8::from(first != own));
        self.sum(&mut others);
        match others.iter().position(|&n| n > 0.0) {
            None => Ok(()),
            Some(rank) => Err(RanksError::Disagree { rank, n_ranks: self.n_ranks, what, fix }),
        }
    }

    /// Ends a run that cannot go on: the others would wait for this rank for ever.
    pub fn abort(&self) {
        if let Some(engine) = &self.engine {
            engine.abort();
        }
    }

    /// Takes leave of the others, once all have done their work. A process that ends without it ends them too.
    pub fn finish(&self) {
        if let Some(engine) = &self.engine {
            engine.finish();
        }
    }
}

/// Sums of tensors by an engine that sums numbers: one read of the device and one write.
fn through_host(values: Tensor<1>, sum: impl FnOnce(&mut [f32])) -> Tensor<1> {
    let device = values.device();
    let mut values: Vec<f32> = values.try_into_vec_as().expect("gradients are f32");
    sum(&mut values);
    let n = values.len();
    Tensor::from_data(TensorData::new(values, [n]), &device)
}

fn number(name: &str) -> Option<usize> {
    env::var(name).ok()?.parse().ok()
}

fn share(n: usize, rank: usize, n_ranks: usize) -> Range<usize> {
    n * rank / n_ranks..n * (rank + 1) / n_ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_all_things_once() {
        for n_ranks in 1..6 {
            for n in 0..20 {
                let shares: Vec<_> = (0..n_ranks).map(|rank| share(n, rank, n_ranks)).collect();
                assert!(shares.iter().cloned().flatten().eq(0..n), "{n} things, {n_ranks} ranks");
                assert!(shares.iter().all(|share| share.len() >= n / n_ranks && share.len() <= n.div_ceil(n_ranks)));
            }
        }
    }

    #[test]
    fn one_alone_has_the_sums() {
        let ranks = Ranks::alone();
        let mut values = [1.5, 2.0];
        ranks.sum(&mut values);
        assert_eq!(values, [1.5, 2.0]);
        assert!(ranks.any(true) && !ranks.any(false) && ranks.is_first());
        assert_eq!(ranks.share(7), 0..7);
        ranks.agree("config", "", || unreachable!("there is nobody to compare with")).unwrap();
    }
}
