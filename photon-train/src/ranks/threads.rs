//! Ranks that are threads of one program, each with a device of its own. Gradients are summed on the devices by Burn's
//! collective (NCCL), where the devices have one; the few numbers that decide something pass through shared memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::rc::Rc;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, Tensor};

use super::{Engine, Ranks, RanksError, through_host};

/// The threads of a run, one for each device.
pub struct Team {
    devices: Vec<Device>,
    /// Whether gradients are summed on the devices.
    has_collective: bool,
    meeting: Barrier,
    /// What each rank brought to the meeting.
    brought: Mutex<Vec<Vec<f64>>>,
}

impl Team {
    /// One thread for each of these devices, without gradients; on CUDA cards sums are NCCL's, elsewhere they go through
    /// the host.
    pub fn new(devices: Vec<Device>, has_collective: bool) -> Arc<Self> {
        let n_ranks = devices.len();
        let brought = Mutex::new(vec![Vec::new(); n_ranks]);
        Arc::new(Self { devices, has_collective, meeting: Barrier::new(n_ranks), brought })
    }

    /// Does the same work on every rank, the first on this thread; the first's result. A rank that fails is told to `fail`,
    /// and ends the program, as one that panics does: the others would wait for it for ever.
    pub fn work<T, E>(
        self: &Arc<Self>,
        work: impl Fn(&Rc<Ranks>) -> Result<T, E> + Sync,
        fail: impl Fn(usize, E) + Sync,
    ) -> T {
        let as_rank = |rank: usize| {
            let ranks = Rc::new(self.rank(rank));
            match catch_unwind(AssertUnwindSafe(|| work(&ranks))) {
                Ok(Ok(value)) => return value,
                Ok(Err(error)) => fail(rank, error),
                // The panic has told of itself.
                Err(_) => (),
            }
            process::exit(1)
        };
        let as_rank = &as_rank;
        thread::scope(|scope| {
            for rank in 1..self.devices.len() {
                scope.spawn(move || drop(as_rank(rank)));
            }
            as_rank(0)
        })
    }

    /// One of the threads, as the run sees it.
    fn rank(self: &Arc<Self>, rank: usize) -> Ranks {
        let member = Member { rank, team: self.clone() };
        Ranks { rank, n_ranks: self.devices.len(), local_rank: rank, engine: Some(Box::new(member)) }
    }

    fn brought(&self) -> MutexGuard<'_, Vec<Vec<f64>>> {
        // A thread that panics ends the program.
        self.brought.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread of the team.
struct Member {
    rank: usize,
    team: Arc<Team>,
}

impl Member {
    /// What all have brought, once all have; in the order of the ranks, so that all see the same sums.
    fn meet<T>(&self, own: Vec<f64>, look: impl FnOnce(&[Vec<f64>]) -> T) -> T {
        self.team.brought()[self.rank] = own;
        self.team.meeting.wait();
        let seen = look(&self.team.brought());
        // Nobody brings anything new before all have seen this.
        self.team.meeting.wait();
        seen
    }
}

impl Engine for Member {
    fn sum(&self, values: &mut [f64]) {
        self.meet(values.to_vec(), |brought| {
            for (index, value) in values.iter_mut().enumerate() {
                *value = brought.iter().map(|values| values[index]).sum();
            }
        });
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Tensor<1> {
        match self.team.has_collective {
            true => all_reduce(values, ReduceOperation::Sum, self.team.devices.clone()).resolve(),
            false => through_host(values, |values| {
                let mut sums: Vec<f64> = values.iter().map(|&value| value.into()).collect();
                self.sum(&mut sums);
                values.iter_mut().zip(sums).for_each(|(value, sum)| *value = sum as f32);
            }),
        }
    }

    fn broadcast_first(&self, bytes: &mut [u8]) {
        let own = bytes.iter().map(|&byte| byte.into()).collect();
        let first = self.meet(own, |brought| brought[0].clone());
        for (byte, first) in bytes.iter_mut().zip(first) {
            *byte = first as u8;
        }
    }

    fn abort(&self) -> ! {
        process::exit(1)
    }

    fn finish(&self) {}
}

/// Whether the devices of several ranks can add up: once before a run, because a collective that does not work would end it in
/// its first step.
///
/// # Errors
///
/// If the sum is wrong or cannot be had.
pub fn check_sums(ranks: &Ranks, device: &Device) -> Result<(), RanksError> {
    if ranks.n_ranks() == 1 {
        return Ok(());
    }
    let one = Tensor::<1>::ones([1], device);
    let sum = ranks.sum_tensor(one).try_into_vec_as::<f32>();
    let sum = sum.map_err(|error| RanksError::Collective(error.to_string()))?;
    match sum[..] == [ranks.n_ranks() as f32] {
        true => Ok(()),
        false => Err(RanksError::Collective(format!("{} ones gave {sum:?}", ranks.n_ranks()))),
    }
}
