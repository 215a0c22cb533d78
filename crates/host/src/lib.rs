//! Access to the machine that gpuwarden runs on: kernel log, boot, host name, GPUs and NICs.
//!
//! The only room that may hold unsafe code, and only where it calls a vendor's library:
//! `rustix` offers every system call that is needed in a safe form. This room knows nothing of
//! faults: [`kernel_log`] delivers records and reports losses, and the rooms above interpret
//! the text.

pub mod boot;
#[cfg(test)]
mod c_header;
pub mod cuda;
pub mod dcgm;
pub mod disk;
pub mod gpu_probe;
pub mod gpu_reset;
pub mod identity;
pub mod job;
pub mod kernel_log;
pub mod library;
pub mod nccl;
pub mod nics;
pub mod nvml;
pub mod program;
mod readiness;
pub mod topology;
