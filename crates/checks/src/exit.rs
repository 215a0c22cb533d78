//! Exit codes of a check, as defined by the preflight ADR.

/// The check passed, or must not stop the pod.
pub const PASSED: u8 = 0;
/// The check failed, so the pod does not start.
pub const FAILED: u8 = 1;
/// A setting is invalid; nothing was checked.
pub const MISCONFIGURED: u8 = 2;

/// Returns the exit code of a process that a signal asked to end.
pub fn of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}
