//! The node side: monitors that look at the machine and report to the connector.

pub mod faults;
pub mod gpu;
pub mod kernel_log;
pub mod monitor;
pub mod pods;
pub mod providers;
