//! Checks that test a pod's GPUs before its work starts: `gpuwarden check dcgm-diag`,
//! `nccl-loopback`, `nccl-allreduce`, and `verify` for other vendors' checks.
//!
//! Each check runs once, as an init container. Its settings are environment variables
//! ([`environment`]). It ends with an exit code, one line for a person, one line in the
//! termination message, and health events sent to the node's connector ([`report`]). The
//! connector also counts the check ([`count`]), and may remember that it passed recently
//! ([`cache`]). [`frame`] has the parts that all checks share. Calls to vendors' libraries,
//! which may hang or crash, are made in a child process ([`worker`]).

mod allreduce;
mod cache;
mod count;
mod dcgm_diag;
pub mod environment;
pub mod exit;
mod expected;
mod frame;
mod loopback;
mod numbers;
mod outcome;
mod refusal;
mod report;
mod verdict;
pub mod verify;
mod webhook;
pub mod witness;
pub mod worker;

pub use frame::{CheckName, run};
pub use worker::Launcher;
