//! The arguments of `catalog`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::OutputArgs;

/// Arguments of `catalog`.
#[derive(Args, Debug)]
pub struct CatalogArgs {
    /// Something else to do.
    #[command(subcommand)]
    pub command: Option<CatalogCommand>,
    /// Kind of row. Without it, all are listed.
    #[arg(value_enum, value_name = "KIND")]
    pub kind: Option<CatalogKind>,
    /// The code; of DCGM's also its name, as events have it; of a NIC pattern its name. Without it,
    /// all rows of the kind are listed.
    #[arg(value_name = "CODE")]
    pub code: Option<String>,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The commands of `catalog`.
#[derive(Subcommand, Debug)]
pub enum CatalogCommand {
    /// Show what files of changes (TOML) make different from the built-in rows.
    #[command(
        after_help = "Examples:\n  gpuwarden catalog diff site.toml\n  gpuwarden catalog diff \
                            vendor.toml site.toml -o json"
    )]
    Diff(CatalogDiffArgs),
}

/// Arguments of `catalog diff`.
#[derive(Args, Debug)]
pub struct CatalogDiffArgs {
    /// Files of changes; the last has the last word.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The kinds of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CatalogKind {
    /// XID codes of GPUs.
    Xid,
    /// `SXid` codes of `NVSwitch`es.
    Sxid,
    /// The words in XID 144 to 150 lines.
    Nvlink5,
    /// Codes of DCGM, by which the GPU health monitor names what it finds.
    Dcgm,
    /// Lines of NIC drivers.
    Nic,
}

impl CatalogKind {
    /// Its word on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Xid => "xid",
            Self::Sxid => "sxid",
            Self::Nvlink5 => "nvlink5",
            Self::Dcgm => "dcgm",
            Self::Nic => "nic",
        }
    }
}
