//! The data directory and the sockets of the process, which can be deleted, moved or replaced at
//! any time without notice.
//!
//! A deleted socket is bound again, unless another process has bound one at the path. A data
//! directory cannot be recreated: the open files are in the old one.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use runtime::unix_grpc;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::tasks::log_failure;

/// Interval between two checks.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// The data directory and the sockets of the process, each with the identity of the file at the
/// time it was opened.
pub(crate) struct ProcessPaths {
    data_dir: WatchedPath,
    sockets: Vec<(Socket, Service)>,
    troubles: watch::Sender<Vec<String>>,
}

/// A socket that is bound and not yet served.
pub(crate) struct Socket {
    listener: UnixListener,
    path: WatchedPath,
    mode: u32,
}

/// A named service on a socket.
struct Service {
    what: &'static str,
    serve: Box<dyn Fn(UnixListener, CancellationToken) -> BoxFuture<'static, ()> + Send + Sync>,
}

/// A socket that is served, until it is bound again or the process ends.
struct Served {
    path: WatchedPath,
    mode: u32,
    service: Service,
    task: AbortHandle,
    until: CancellationToken,
}

/// A path, and the device and inode of its file when it was opened. The inode number is not
/// reused while the file is open.
struct WatchedPath {
    path: PathBuf,
    id: (u64, u64),
}

// === impl ProcessPaths ===

impl ProcessPaths {
    /// Starts with the data directory. The caller holds its lock.
    pub(crate) fn open(data_dir: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            data_dir: WatchedPath::of(data_dir)?,
            sockets: Vec::new(),
            troubles: watch::Sender::default(),
        })
    }

    /// Returns the current problems, as messages for people.
    pub(crate) fn troubles(&self) -> watch::Receiver<Vec<String>> {
        self.troubles.subscribe()
    }

    /// Adds a service on a socket. It runs once [`serve`](Self::serve) is called.
    pub(crate) fn add<F, E>(
        &mut self,
        what: &'static str,
        socket: Socket,
        serve: impl Fn(UnixListener, CancellationToken) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: std::error::Error + 'static,
    {
        let serve =
            Box::new(move |listener, until| log_failure(what, serve(listener, until)).boxed());
        self.sockets.push((socket, Service { what, serve }));
    }

    /// Serves the sockets and checks all paths, until `cancel`.
    pub(crate) async fn serve(self, cancel: CancellationToken) {
        let mut tasks = JoinSet::new();
        let mut sockets: Vec<Served> = (self.sockets.into_iter())
            .map(|(socket, service)| service.start(socket, &mut tasks, &cancel))
            .collect();
        let mut ticks = tokio::time::interval(CHECK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while cancel.run_until_cancelled(ticks.tick()).await.is_some() {
            if sockets.iter().any(|socket| socket.task.is_finished()) {
                // The service has logged the reason.
                return;
            }
            let mut wrong = Vec::new();
            if !self.data_dir.is_there() {
                wrong.push(format!(
                    "the data directory {} was deleted, moved or replaced: what is stored now is \
                     lost when this process ends; move it back, or restart gpuwarden",
                    self.data_dir.path.display()
                ));
            }
            for served in &mut sockets {
                wrong.extend(served.check(&mut tasks, &cancel).err());
            }
            report(&self.troubles, wrong);
        }
        for socket in sockets.iter().filter(|socket| socket.path.is_there()) {
            // Nothing serves the socket now.
            drop(std::fs::remove_file(&socket.path.path));
        }
        while tasks.join_next().await.is_some() {}
    }
}

// === impl Socket ===

impl Socket {
    pub(crate) fn bind(path: &Path, mode: u32) -> anyhow::Result<Self> {
        Ok(Self {
            listener: unix_grpc::bind(path, mode)?,
            path: WatchedPath::of(path)?,
            mode,
        })
    }
}

// === impl Service ===

impl Service {
    fn start(self, socket: Socket, tasks: &mut JoinSet<()>, cancel: &CancellationToken) -> Served {
        let until = cancel.child_token();
        let task = tasks.spawn((self.serve)(socket.listener, until.clone()));
        Served {
            path: socket.path,
            mode: socket.mode,
            service: self,
            task,
            until,
        }
    }
}

// === impl Served ===

impl Served {
    /// Binds the socket again if its file is gone. The error is a message for people.
    fn check(&mut self, tasks: &mut JoinSet<()>, cancel: &CancellationToken) -> Result<(), String> {
        if self.path.is_there() {
            return Ok(());
        }
        let what = self.service.what;
        let path = &self.path.path;
        let bound = rebind(path, self.mode).map_err(|error| {
            format!(
                "{what} is unreachable on {}, its file was deleted or replaced: {error:#}",
                path.display()
            )
        })?;
        tracing::warn!(path = %path.display(), "the socket of {what} was deleted: it is bound again");
        // Requests on open connections are answered; then the clients reconnect.
        self.until.cancel();
        self.until = cancel.child_token();
        self.task = tasks.spawn((self.service.serve)(bound.listener, self.until.clone()));
        self.path = bound.path;
        Ok(())
    }
}

/// Binds a socket again. A missing directory is not created: it may come back, if it was moved
/// or unmounted.
fn rebind(path: &Path, mode: u32) -> anyhow::Result<Socket> {
    if let Some(directory) = path.parent() {
        std::fs::metadata(directory)?;
    }
    Socket::bind(path, mode)
}

fn report(troubles: &watch::Sender<Vec<String>>, wrong: Vec<String>) {
    troubles.send_if_modified(|known| {
        for trouble in wrong.iter().filter(|trouble| !known.contains(trouble)) {
            tracing::error!("{trouble}");
        }
        if wrong.is_empty() && !known.is_empty() {
            tracing::info!("the data directory and the sockets are back in their places");
        }
        let changed = *known != wrong;
        *known = wrong;
        changed
    });
}

// === impl WatchedPath ===

impl WatchedPath {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            id: file_id(&std::fs::metadata(path)?),
        })
    }

    fn is_there(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|metadata| file_id(&metadata) == self.id)
    }
}

fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
