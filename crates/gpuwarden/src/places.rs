//! The places of the process in the file system: its data directory and its socket. Both can
//! be deleted, moved or replaced beneath it, and nobody tells.
//!
//! A socket is made again, where nobody else has made one there. A data directory is not: what
//! is open lies in the old one.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use connector::Connector;
use runtime::unix_grpc;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::tasks::said;

/// Pause between two looks at the places.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// `Places` are the bound socket and the data directory, with the files that they were when they
/// were opened.
pub(crate) struct Places {
    listener: UnixListener,
    socket: WatchedPath,
    socket_mode: u32,
    data_dir: WatchedPath,
    troubles: watch::Sender<Vec<String>>,
}

/// A `WatchedPath` is a path and the file that it led to. The number of a file that is open is not
/// given out again.
struct WatchedPath {
    path: PathBuf,
    shown: (u64, u64),
}

// === impl Places ===

impl Places {
    /// Binds the socket. The data directory has to belong to this process by now.
    pub(crate) fn open(data_dir: &Path, socket: &Path, socket_mode: u32) -> anyhow::Result<Self> {
        Ok(Self {
            listener: unix_grpc::bind(socket, socket_mode)?,
            socket: WatchedPath::of(socket)?,
            socket_mode,
            data_dir: WatchedPath::of(data_dir)?,
            troubles: watch::Sender::default(),
        })
    }

    /// Returns the troubles, for people.
    pub(crate) fn troubles(&self) -> watch::Receiver<Vec<String>> {
        self.troubles.subscribe()
    }

    /// Serves the connector on the socket, and looks after both, until `cancel`.
    pub(crate) async fn serve(self, connector: Connector, cancel: CancellationToken) {
        let Self {
            listener,
            mut socket,
            socket_mode,
            data_dir,
            troubles,
        } = self;
        let mut serving = JoinSet::new();
        let mut serve = |listener| {
            let until = cancel.child_token();
            let served = connector::serve(listener, connector.clone(), until.clone());
            (serving.spawn(said("the connector's socket", served)), until)
        };
        let (mut served, mut until) = serve(listener);
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while cancel.run_until_cancelled(look.tick()).await.is_some() {
            if served.is_finished() {
                // It has said why.
                return;
            }
            let mut wrong = Vec::new();
            if !data_dir.is_there() {
                wrong.push(format!(
                    "the data directory {} was deleted, moved or replaced: what is stored now is \
                     lost when this process ends; move it back, or restart gpuwarden",
                    data_dir.path.display()
                ));
            }
            if !socket.is_there() {
                match again(&socket.path, socket_mode) {
                    Ok((place, listener)) => {
                        let path = place.path.display();
                        tracing::warn!(%path, "the socket's file was gone: it is made again");
                        // Who is connected to the old one is answered, and connects again.
                        until.cancel();
                        socket = place;
                        (served, until) = serve(listener);
                    }
                    Err(error) => wrong.push(format!(
                        "no events are taken on the socket {}, its file was deleted or replaced: \
                         {error:#}",
                        socket.path.display()
                    )),
                }
            }
            say(&troubles, wrong);
        }
        if socket.is_there() {
            // A connection to it would only be refused.
            drop(std::fs::remove_file(&socket.path));
        }
        while serving.join_next().await.is_some() {}
    }
}

/// Binds a socket where one was. Its directory is not made again: it may come back.
fn again(path: &Path, mode: u32) -> anyhow::Result<(WatchedPath, UnixListener)> {
    if let Some(directory) = path.parent() {
        std::fs::metadata(directory)?;
    }
    let listener = unix_grpc::bind(path, mode)?;
    Ok((WatchedPath::of(path)?, listener))
}

fn say(troubles: &watch::Sender<Vec<String>>, wrong: Vec<String>) {
    troubles.send_if_modified(|known| {
        for trouble in wrong.iter().filter(|trouble| !known.contains(trouble)) {
            tracing::error!("{trouble}");
        }
        if wrong.is_empty() && !known.is_empty() {
            tracing::info!("data directory and socket are in their places again");
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
