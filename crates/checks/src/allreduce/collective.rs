//! Collectives that a member of a gang reduces with.

pub(super) mod nccl;
pub(super) mod tcp;

use std::net::SocketAddr;

use tokio::time::Instant;

use super::messages::Test;
use crate::worker::{Measured, SeenGpu, WorkerFailure};

/// Implementation of reductions with other members.
pub(super) trait Collective {
    /// Returns the number of devices of this member, and the known GPUs.
    async fn devices(&mut self, until: Instant) -> Result<(u32, Vec<SeenGpu>), WorkerFailure>;

    /// Returns the address where other members reach this one, if the collective needs it.
    fn endpoint(&self) -> Option<SocketAddr>;

    /// Creates a group whose first member is this one; returns the id of the group.
    async fn lead(&mut self, until: Instant) -> Result<String, WorkerFailure>;

    /// Takes part in a test.
    async fn test(&mut self, test: &Test, until: Instant) -> Result<Vec<Measured>, WorkerFailure>;

    /// Continues without the topology file that was chosen for this machine.
    fn without_topology(&mut self);

    /// Drops the group: its test has ended, or is not waited for.
    fn over(&mut self);
}
