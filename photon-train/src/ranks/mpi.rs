//! Sums over processes by the machine's MPI.

use std::cell::RefCell;
use std::mem;

use burn::tensor::Tensor;
use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::datatype::Equivalence;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Root};

use super::{Engine, through_host};

/// Values of one message: MPI counts in 32 bits, and the room for the sums is as large.
const PIECE: usize = 1 << 24;

/// This process's place in the world of those started together.
pub(super) struct Mpi {
    world: SimpleCommunicator,
    /// Leaving it waits for all ranks, so that it must not happen on the way out of a failure.
    universe: RefCell<Option<mem::ManuallyDrop<Universe>>>,
}

impl Mpi {
    pub(super) fn start() -> Result<Self, String> {
        // Calls come from the main thread alone.
        let (universe, _) =
            mpi::initialize_with_threading(Threading::Funneled).ok_or("it was started before in this process")?;
        let world = universe.world();
        Ok(Self { world, universe: RefCell::new(Some(mem::ManuallyDrop::new(universe))) })
    }

    pub(super) fn rank_and_size(&self) -> (usize, usize) {
        let number = |n| usize::try_from(n).expect("MPI counts from 0");
        (number(self.world.rank()), number(self.world.size()))
    }

    fn sum_all<T: Equivalence + Copy>(&self, values: &mut [T]) {
        for piece in values.chunks_mut(PIECE) {
            let own = piece.to_vec();
            self.world.all_reduce_into(&own[..], piece, SystemOperation::sum());
        }
    }
}

impl Engine for Mpi {
    fn sum(&self, values: &mut [f64]) {
        self.sum_all(values);
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Tensor<1> {
        through_host(values, |values| self.sum_all(values))
    }

    fn broadcast_first(&self, bytes: &mut [u8]) {
        self.world.process_at_rank(0).broadcast_into(bytes);
    }

    fn abort(&self) -> ! {
        self.world.abort(1)
    }

    fn finish(&self) {
        self.universe.take().map(mem::ManuallyDrop::into_inner);
    }
}
