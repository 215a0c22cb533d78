//! NCCL, over all GPUs of the gang. Each test has a process of its own, for a communicator that hangs cannot
//! be ended in another way.

use std::net::SocketAddr;

use tokio::time::Instant;

use super::super::messages::Test;
use super::super::topology::{self, File};
use super::Collective;
use crate::refusal::Variables;
use crate::worker::{
    Failure, FromWorker, Join, Launcher, Libraries, Measured, Request, SeenGpu, Worker,
};

/// NCCL on the devices of this container.
pub(in super::super) struct Nccl {
    launcher: Launcher,
    libraries: Libraries,
    /// The topology file that NCCL is given; `None` where it is left to itself.
    topology: Option<File>,
    /// The variables that may be why NCCL refuses, and the pod that they are set in.
    variables: (Variables, String),
    /// The process of the group that is under way.
    worker: Option<Worker>,
}

// === impl Nccl ===

impl Nccl {
    pub(in super::super) fn new(
        launcher: Launcher,
        libraries: Libraries,
        topology: Option<File>,
        variables: (Variables, String),
    ) -> Self {
        Self {
            launcher,
            libraries,
            topology,
            variables,
            worker: None,
        }
    }

    /// Returns how a process is started, which alone gets the topology file.
    fn launcher(&self) -> Launcher {
        let mut launcher = self.launcher.clone();
        if let Some(file) = &self.topology {
            let path = file.path.clone().into();
            launcher.variables.push((topology::USERS.into(), path));
        }
        launcher
    }

    async fn ask(&mut self, request: &Request, until: Instant) -> Result<FromWorker, Failure> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::start(&self.launcher())?,
        };
        let asked = self.worker.insert(worker).ask(request, until).await;
        let (variables, pod) = &self.variables;
        asked.map_err(|failure| variables.explain(failure, pod))
    }
}

impl Collective for Nccl {
    async fn devices(&mut self, until: Instant) -> Result<(u32, Vec<SeenGpu>), Failure> {
        let gpus = match self
            .ask(&Request::Gpus(self.libraries.clone()), until)
            .await
        {
            Ok(FromWorker::Gpus(gpus)) => gpus,
            Ok(said) => return Err(said.unexpected()),
            Err(failure) => {
                tracing::warn!("the GPUs are not known by name: {failure}");
                Vec::new()
            }
        };
        self.over();
        let said = self
            .ask(&Request::Devices(self.libraries.clone()), until)
            .await;
        self.over();
        match said? {
            FromWorker::Devices(devices) => Ok((devices, gpus)),
            said => Err(said.unexpected()),
        }
    }

    fn endpoint(&self) -> Option<SocketAddr> {
        None
    }

    async fn lead(&mut self, until: Instant) -> Result<String, Failure> {
        self.over();
        match self
            .ask(&Request::Id(self.libraries.clone()), until)
            .await?
        {
            FromWorker::Id(id) => Ok(id),
            said => Err(said.unexpected()),
        }
    }

    async fn test(&mut self, test: &Test, until: Instant) -> Result<Vec<Measured>, Failure> {
        let join = Join {
            id: test.group.clone(),
            ranks: test.ranks,
            first: test.first,
        };
        let (libraries, benchmark) = (self.libraries.clone(), test.benchmark.clone());
        let request = if test.ranks < 2 {
            // One device has nobody to reduce with; its memory can be tested.
            Request::Copy(libraries, benchmark)
        } else {
            Request::AllReduce(libraries, join, benchmark)
        };
        match self.ask(&request, until).await? {
            FromWorker::Measured(measured) => Ok(measured),
            said => Err(said.unexpected()),
        }
    }

    fn without_topology(&mut self) {
        self.over();
        self.topology = None;
    }

    fn over(&mut self) {
        self.worker = None;
    }
}
