//! Logs the line that reports a reset to monitors: success closes the faults of the GPU.
//!
//! NVSentinel's job writes the line to the system log of the machine. It is written to the
//! kernel log as well, which gpuwarden prefers to read; a reader of both receives one recovery
//! twice, which changes nothing.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::GpuReset;
use crate::kernel_log::{WriteError, write_kmsg};

/// Tag of the line, as NVSentinel's reset job writes it.
pub const TAG: &str = "nvsentinel-gpu-reset";
/// Priority of the line in the system log, `daemon.err`.
const PRIORITY: u8 = 27;
/// Severity of the line in the kernel log, `err`.
const LEVEL: u8 = 3;

/// Error when the line is written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The system log does not accept the line.
    #[error("cannot write to the system log {}", at.display())]
    System {
        /// Path of the log's socket.
        at: PathBuf,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// The kernel log does not accept the line.
    #[error(transparent)]
    Kernel(#[from] WriteError),
}

/// Formats the line for one GPU.
pub fn line(result: &GpuReset) -> String {
    let success = result.failure.is_none();
    format!("GPU reset executed: {}, success: {success}", result.gpu)
}

/// Writes the line for one GPU to the first of these system log sockets that exists, and if
/// `kernel` is true to the kernel log. Returns what failed.
pub fn tell(result: &GpuReset, sockets: &[PathBuf], kernel: bool) -> Vec<LogError> {
    let line = line(result);
    let mut failed = Vec::new();
    let socket = sockets
        .iter()
        .find(|path| path.exists())
        .or(sockets.first());
    if let Some(at) = socket
        && let Err(source) = send(at, &line)
    {
        let at = at.clone();
        failed.push(LogError::System { at, source });
    }
    if kernel && let Err(error) = write_kmsg(LEVEL, &line) {
        failed.push(error.into());
    }
    failed
}

fn send(at: &Path, line: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    let text = format!("<{PRIORITY}>{TAG}: {line}");
    socket.send_to(text.as_bytes(), at).map(|_| ())
}
