//! The configuration files of all rooms, as people write them.

#![allow(missing_docs, unreachable_pub)]

#[path = "configuration/files.rs"]
mod files;
#[path = "configuration/names.rs"]
mod names;
