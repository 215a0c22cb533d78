//! The places of the process in the file system: its data directory and its sockets. All can
//! be deleted, moved or replaced beneath it, and nobody tells.
//!
//! A socket is made again, where nobody else has made one there. A data directory is not: what
//! is open lies in the old one.

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

use crate::tasks::said;

/// Pause between two looks at the places.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// `Places` are the data directory and the sockets of the process, with the files that they were
/// when they were opened.
pub(crate) struct Places {
    data_dir: WatchedPath,
    sockets: Vec<(Socket, Service)>,
    troubles: watch::Sender<Vec<String>>,
}

/// A `Socket` is one that is bound, and not served yet.
pub(crate) struct Socket {
    listener: UnixListener,
    path: WatchedPath,
    mode: u32,
}

/// A `Service` is what is served on a socket: by name, and how.
struct Service {
    what: &'static str,
    serve: Box<dyn Fn(UnixListener, CancellationToken) -> BoxFuture<'static, ()> + Send + Sync>,
}

/// A `Served` is a socket that is served, until it is made again or the process ends.
struct Served {
    path: WatchedPath,
    mode: u32,
    service: Service,
    task: AbortHandle,
    until: CancellationToken,
}

/// A `WatchedPath` is a path and the file that it led to. The number of a file that is open is not
/// given out again.
struct WatchedPath {
    path: PathBuf,
    shown: (u64, u64),
}

// === impl Places ===

impl Places {
    /// Begins with the data directory, which has to belong to this process by now.
    pub(crate) fn open(data_dir: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            data_dir: WatchedPath::of(data_dir)?,
            sockets: Vec::new(),
            troubles: watch::Sender::default(),
        })
    }

    /// Returns the troubles, for people.
    pub(crate) fn troubles(&self) -> watch::Receiver<Vec<String>> {
        self.troubles.subscribe()
    }

    /// Has `what` served on a socket, from [`serve`](Self::serve) on.
    pub(crate) fn add<F, E>(
        &mut self,
        what: &'static str,
        socket: Socket,
        serve: impl Fn(UnixListener, CancellationToken) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: std::error::Error + 'static,
    {
        let serve = Box::new(move |listener, until| said(what, serve(listener, until)).boxed());
        self.sockets.push((socket, Service { what, serve }));
    }

    /// Serves on the sockets, and looks after all places, until `cancel`.
    pub(crate) async fn serve(self, cancel: CancellationToken) {
        let mut tasks = JoinSet::new();
        let mut sockets: Vec<Served> = (self.sockets.into_iter())
            .map(|(socket, service)| service.start(socket, &mut tasks, &cancel))
            .collect();
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while cancel.run_until_cancelled(look.tick()).await.is_some() {
            if sockets.iter().any(|socket| socket.task.is_finished()) {
                // It has said why.
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
                wrong.extend(served.look_after(&mut tasks, &cancel).err());
            }
            say(&self.troubles, wrong);
        }
        for socket in sockets.iter().filter(|socket| socket.path.is_there()) {
            // A connection to it would only be refused.
            drop(std::fs::remove_file(&socket.path.path));
        }
        while tasks.join_next().await.is_some() {}
    }
}

// === impl Socket ===

impl Socket {
    /// Binds a socket.
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
    /// Makes the socket again where its file is gone; the error is for people.
    fn look_after(
        &mut self,
        tasks: &mut JoinSet<()>,
        cancel: &CancellationToken,
    ) -> Result<(), String> {
        if self.path.is_there() {
            return Ok(());
        }
        let what = self.service.what;
        let path = &self.path.path;
        let again = again(path, self.mode).map_err(|error| {
            format!(
                "nobody reaches {what} on {}, its file was deleted or replaced: {error:#}",
                path.display()
            )
        })?;
        tracing::warn!(path = %path.display(), "the socket of {what} was gone: it is made again");
        // Who is connected to the old one is answered, and connects again.
        self.until.cancel();
        self.until = cancel.child_token();
        self.task = tasks.spawn((self.service.serve)(again.listener, self.until.clone()));
        self.path = again.path;
        Ok(())
    }
}

/// Binds a socket where one was. Its directory is not made again: it may come back.
fn again(path: &Path, mode: u32) -> anyhow::Result<Socket> {
    if let Some(directory) = path.parent() {
        std::fs::metadata(directory)?;
    }
    Socket::bind(path, mode)
}

fn say(troubles: &watch::Sender<Vec<String>>, wrong: Vec<String>) {
    troubles.send_if_modified(|known| {
        for trouble in wrong.iter().filter(|trouble| !known.contains(trouble)) {
            tracing::error!("{trouble}");
        }
        if wrong.is_empty() && !known.is_empty() {
            tracing::info!("data directory and sockets are in their places again");
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
            shown: shown(&std::fs::metadata(path)?),
        })
    }

    fn is_there(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|metadata| shown(&metadata) == self.shown)
    }
}

fn shown(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
