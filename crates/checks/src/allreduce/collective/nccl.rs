//! NCCL over all GPUs of the gang. Each test has its own process, since a communicator that
//! hangs cannot be ended in another way.

use std::net::SocketAddr;

use tokio::time::Instant;

use super::super::messages::Test;
use super::super::topology::{self, File};
use super::Collective;
use crate::refusal::Variables;
use crate::worker::{
    FromWorker, Join, Launcher, Libraries, Measured, SeenGpu, Worker, WorkerFailure, WorkerRequest,
};

/// NCCL on the devices of this container.
pub(in super::super) struct Nccl {
    launcher: Launcher,
    libraries: Libraries,
    /// Topology file for NCCL; `None` leaves the choice to NCCL.
    topology: Option<File>,
    /// Variables that may make NCCL refuse, and the pod that sets them.
    variables: (Variables, String),
    /// Process of the group in use.
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

    /// Returns the launcher with the topology file, which only NCCL's processes get.
    fn launcher(&self) -> Launcher {
        let mut launcher = self.launcher.clone();
        if let Some(file) = &self.topology {
            let path = file.path.clone().into();
            launcher.variables.push((topology::USERS.into(), path));
        }
        launcher
    }

    async fn ask(
        &mut self,
        request: &WorkerRequest,
        until: Instant,
    ) -> Result<FromWorker, WorkerFailure> {
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
    async fn devices(&mut self, until: Instant) -> Result<(u32, Vec<SeenGpu>), WorkerFailure> {
        let gpus = match self
            .ask(&WorkerRequest::Gpus(self.libraries.clone()), until)
            .await
        {
            Ok(FromWorker::Gpus(gpus)) => gpus,
            Ok(answer) => return Err(answer.unexpected()),
            Err(failure) => {
                tracing::warn!("the GPUs are not known by name: {failure}");
                Vec::new()
            }
        };
        self.over();
        let answer = self
            .ask(&WorkerRequest::Devices(self.libraries.clone()), until)
            .await;
        self.over();
        match answer? {
            FromWorker::Devices(devices) => Ok((devices, gpus)),
            answer => Err(answer.unexpected()),
        }
    }

    fn endpoint(&self) -> Option<SocketAddr> {
        None
    }

    async fn lead(&mut self, until: Instant) -> Result<String, WorkerFailure> {
        self.over();
        match self
            .ask(&WorkerRequest::Id(self.libraries.clone()), until)
            .await?
        {
            FromWorker::Id(id) => Ok(id),
            answer => Err(answer.unexpected()),
        }
    }

    async fn test(&mut self, test: &Test, until: Instant) -> Result<Vec<Measured>, WorkerFailure> {
        let join = Join {
            id: test.group.clone(),
            ranks: test.ranks,
            first: test.first,
        };
        let (libraries, benchmark) = (self.libraries.clone(), test.benchmark.clone());
        let request = if test.ranks < 2 {
            // One device has no peer to reduce with; its memory can be tested.
            WorkerRequest::Copy(libraries, benchmark)
        } else {
            WorkerRequest::AllReduce(libraries, join, benchmark)
        };
        match self.ask(&request, until).await? {
            FromWorker::Measured(measured) => Ok(measured),
            answer => Err(answer.unexpected()),
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
