//! Listening on a path of the file system, without taking it from another process.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;

/// Longest socket path (octets): `sun_path` has 108, one of them for the final zero.
pub const MAX_PATH_LENGTH: usize = 107;

/// Most connections that wait to be accepted. The kernel caps this at `net.core.somaxconn`.
const BACKLOG: i32 = 1024;

/// Reason why a socket path cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path is longer than the kernel allows.
    #[error(
        "socket path {} has {} bytes, {MAX_PATH_LENGTH} are possible: choose a shorter one",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong {
        /// Path that was requested.
        path: PathBuf,
    },
    /// The path is not a socket; it is left unchanged.
    #[error(
        "{} exists and is not a socket: remove it or choose another socket path",
        path.display()
    )]
    NotASocket {
        /// Path that was requested.
        path: PathBuf,
    },
    /// Another process accepts connections at the path.
    #[error(
        "another process serves {}: stop it or choose another socket path (`ss -xlp` names it)",
        path.display()
    )]
    InUse {
        /// Path that was requested.
        path: PathBuf,
    },
    /// The operating system refused a step.
    #[error("cannot {step} {}", path.display())]
    Io {
        /// Action that failed, for example "create directory".
        step: &'static str,
        /// File or directory of the action.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Listens on a Unix socket at `path` whose file has the permission bits `mode`.
///
/// Processes with write permission on the file may connect: `0o666` admits every user. A
/// missing parent directory is created. A socket file without a listener, left by a process
/// that ended, is replaced. If two processes start at the same instant on the same path, the
/// later one gets the path.
///
/// # Errors
///
/// If the path is too long, is served by a live process or is not a socket, and if the
/// operating system refuses a step.
///
/// # Panics
///
/// Outside a Tokio runtime, like all of Tokio's listeners.
pub fn bind(path: &Path, mode: u32) -> Result<UnixListener, BindError> {
    if path.as_os_str().as_bytes().len() > MAX_PATH_LENGTH {
        return Err(BindError::PathTooLong {
            path: path.to_owned(),
        });
    }
    let failed = |step, path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| BindError::Io { step, path, source }
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed("create directory", parent))?;
    }
    let address =
        SocketAddrUnix::new(path).map_err(|err| failed("use as socket path", path)(err.into()))?;
    remove_stale(path, &address)?;

    let listen = || -> Result<StdUnixListener, Errno> {
        let socket = stream_socket()?;
        // The file is created with the socket's own mode less the umask, so it is never open to
        // more users than requested.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
        net::bind(&socket, &address)?;
        net::listen(&socket, BACKLOG)?;
        Ok(socket.into())
    };
    let listener = listen().map_err(|err| failed("listen on", path)(err.into()))?;
    fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))?;
    UnixListener::from_std(listener).map_err(failed("listen on", path))
}

/// Removes a socket file that no process listens on.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), BindError> {
    let failed = |step| {
        let path = path.to_owned();
        move |source: io::Error| BindError::Io { step, path, source }
    };
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(err) => return Err(failed("look at")(err)),
    };
    if !metadata.file_type().is_socket() {
        return Err(BindError::NotASocket {
            path: path.to_owned(),
        });
    }
    // Non-blocking: a process with a full backlog is alive too (EAGAIN), and must not make this
    // one wait.
    match stream_socket().and_then(|socket| net::connect(&socket, address)) {
        Ok(()) | Err(Errno::AGAIN) => Err(BindError::InUse {
            path: path.to_owned(),
        }),
        Err(Errno::CONNREFUSED) => match fs::remove_file(path) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove stale socket")(err))
            }
            _ => Ok(()),
        },
        Err(Errno::NOENT) => Ok(()),
        Err(err) => Err(failed("find out who serves")(err.into())),
    }
}

fn stream_socket() -> Result<std::os::fd::OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream as StdUnixStream;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn creates_directories_and_sets_the_mode() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [0o666, 0o600, 0o770] {
            let path = dir.path().join(format!("a/b/{mode:o}.sock"));
            let listener = bind(&path, mode).unwrap();
            assert_eq!(mode_of(&path), mode);
            let client = StdUnixStream::connect(&path).unwrap();
            let (_server, _) = listener.accept().await.unwrap();
            drop(client);
        }
    }

    #[tokio::test]
    async fn a_live_listener_keeps_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("live.sock");
        let _live = bind(&path, 0o666).unwrap();
        let err = bind(&path, 0o666).unwrap_err();
        assert!(matches!(err, BindError::InUse { .. }), "{err}");
        let start = format!("another process serves {}", path.display());
        assert!(err.to_string().starts_with(&start), "{err}");
        StdUnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn a_listener_with_a_full_backlog_is_alive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("full.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let listener = stream_socket().unwrap();
        net::bind(&listener, &address).unwrap();
        net::listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let client = stream_socket().unwrap();
            match net::connect(&client, &address) {
                Ok(()) => waiting.push(client),
                Err(err) => break assert_eq!(err, Errno::AGAIN),
            }
        }
        assert!(matches!(bind(&path, 0o666), Err(BindError::InUse { .. })));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stale.sock");
        drop(bind(&path, 0o600).unwrap());
        assert!(path.exists());
        let _listener = bind(&path, 0o666).unwrap();
        assert_eq!(mode_of(&path), 0o666);
        StdUnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link, &dir.path().to_owned()] {
            let err = bind(path, 0o666).unwrap_err();
            assert!(matches!(err, BindError::NotASocket { .. }), "{err}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    }

    #[tokio::test]
    async fn path_length() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().as_os_str().len() + 1;
        let longest = dir.path().join("x".repeat(MAX_PATH_LENGTH - base));
        bind(&longest, 0o666).unwrap();
        let err = bind(&dir.path().join("x".repeat(108 - base)), 0o666).unwrap_err();
        assert!(matches!(err, BindError::PathTooLong { .. }), "{err}");
        assert!(
            err.to_string().contains("has 108 bytes, 107 are possible"),
            "{err}"
        );
    }

    #[tokio::test]
    async fn the_system_is_quoted_on_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let err = bind(&file.join("x.sock"), 0o666).unwrap_err();
        assert!(
            matches!(
                err,
                BindError::Io {
                    step: "create directory",
                    ..
                }
            ),
            "{err}"
        );
        assert!(std::error::Error::source(&err).is_some());
    }
}
