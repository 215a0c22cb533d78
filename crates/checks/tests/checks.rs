//! Tests of each check as a whole: with the environment of a container, fake libraries, a
//! listening connector, and the exit code.

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
