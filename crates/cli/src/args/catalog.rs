//! The arguments of `catalog`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::OutputArgs;

#[derive(Args, Debug)]
pub(crate) struct CatalogArgs {
    #[command(subcommand)]
    pub command: Option<CatalogCommand>,
    /// Kind of row [default: all].
    #[arg(value_enum, value_name = "KIND")]
    pub kind: Option<CatalogKind>,
    /// Code; for DCGM also its name, as in events; for a NIC pattern its name [default: all rows of
    /// the kind].
    #[arg(value_name = "CODE")]
    pub code: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Subcommand, Debug)]
pub(crate) enum CatalogCommand {
    /// Show the differences that files of changes (TOML) make to the built-in rows.
    #[command(
        after_help = "Examples:\n  gpuwarden catalog diff site.toml\n  gpuwarden catalog diff \
                            vendor.toml site.toml -o json"
    )]
    Diff(CatalogDiffArgs),
}

#[derive(Args, Debug)]
pub(crate) struct CatalogDiffArgs {
    /// Files of changes; a later file has precedence.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CatalogKind {
    /// XID codes of GPUs.
    Xid,
    /// `SXid` codes of `NVSwitch`es.
    Sxid,
    /// Words in the lines of XID 144 to 150.
    Nvlink5,
    /// Codes of DCGM, which the GPU health monitor reports.
    Dcgm,
    /// Lines of NIC drivers.
    Nic,
}

impl CatalogKind {
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
