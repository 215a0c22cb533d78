//! What a member of a gang reduces with.

pub(super) mod nccl;
pub(super) mod tcp;

use std::net::SocketAddr;

use tokio::time::Instant;

use super::messages::Test;
use crate::worker::{Failure, Measured, SeenGpu};

/// A way to reduce together with others.
pub(super) trait Collective {
    /// Returns the number of devices of this member, and what is known of them.
    async fn devices(&mut self, until: Instant) -> Result<(u32, Vec<SeenGpu>), Failure>;

    /// Returns the place where the others of a group reach this member, where they have to.
    fn endpoint(&self) -> Option<SocketAddr>;

    /// Makes a group that has this member as its first; returns its name.
    async fn lead(&mut self, until: Instant) -> Result<String, Failure>;

    /// Takes part in a test.
    async fn test(&mut self, test: &Test, until: Instant) -> Result<Vec<Measured>, Failure>;

    /// Goes on without the topology file that was chosen for this machine.
    fn without_topology(&mut self);

    /// Forgets the group: its test is over for everybody, or nobody waits for it any more.
    fn over(&mut self);
}
