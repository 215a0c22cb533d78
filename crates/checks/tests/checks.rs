//! Each check as a whole: the environment of a container, fake libraries, a connector that listens, and
//! the exit code.

#![allow(clippy::unwrap_used)]

#[path = "checks/allreduce.rs"]
mod allreduce;
#[path = "checks/count.rs"]
mod count;
#[path = "checks/dcgm_diag.rs"]
mod dcgm_diag;
#[path = "checks/loopback.rs"]
mod loopback;
#[path = "checks/support.rs"]
mod support;
#[path = "checks/verify.rs"]
mod verify;
