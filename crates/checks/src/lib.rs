//! The checks that test a pod's GPUs before its work starts: `gpuwarden check dcgm-diag`,
//! `nccl-loopback`, `nccl-allreduce`, and `verify` for the checks of others.
//!
//! Each runs once, as an init container. Its settings are environment variables ([`environment`]); it ends
//! with an exit code, one line for a person, one line in the termination message, and health events at the
//! node's connector ([`report`]), which counts it, too ([`count`]), and may know that it has passed lately
//! ([`cache`]). [`frame`] is what all of them share. Calls of the vendor's libraries are made in a child
//! process ([`worker`]), which may hang or crash.

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

pub use frame::{Check, run};
pub use worker::Launcher;
