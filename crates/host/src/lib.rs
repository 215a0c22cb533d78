//! The machine that gpuwarden runs on: its kernel log, the boot it is in, its name, its NICs.
//!
//! The only room that may hold unsafe code, and it does so only where it calls a vendor's library:
//! `rustix` offers every system call it needs in a safe form. Nothing here knows what a fault is: [`kernel_log`] delivers
//! records and says what is missing between them, and the rooms above judge the text.

pub mod boot;
#[cfg(test)]
mod c_header;
pub mod cuda;
pub mod dcgm;
pub mod disk;
pub mod gpu_probe;
pub mod gpu_reset;
pub mod identity;
pub mod kernel_log;
pub mod library;
pub mod nccl;
pub mod nics;
pub mod nvml;
pub mod program;
mod readiness;
pub mod topology;
