//! The line by which monitors hear of a reset: a success ends the faults of the GPU.
//!
//! NVSentinel's job writes it to the system log of the machine. It goes into the kernel log as well, for that
//! is what gpuwarden reads where it may; whoever reads both hears of one recovery twice, which changes nothing.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::GpuReset;
use crate::kernel_log::{WriteError, write_kmsg};

/// The tag of the line: the reset job of NVSentinel has it.
pub const TAG: &str = "nvsentinel-gpu-reset";
/// The priority of the line, `daemon.err`.
const PRIORITY: u8 = 27;
/// The same in the kernel log: an error.
const LEVEL: u8 = 3;

/// A line that was not written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// There is no system log.
    #[error("cannot write to the system log {}", at.display())]
    System {
        /// Its socket.
        at: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The kernel does not take it.
    #[error(transparent)]
    Kernel(#[from] WriteError),
}

/// Returns the line about a GPU.
pub fn line(result: &GpuReset) -> String {
    let success = result.failure.is_none();
    format!("GPU reset executed: {}, success: {success}", result.gpu)
}

/// Writes the line about a GPU to the first of these system logs that is there, and with `kernel` to the
/// kernel log. Returns what failed.
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
