//! The settings of the audit log.

use std::path::PathBuf;

use crate::args::AuditArgs;

/// Default directory of the log, as in NVSentinel.
const DIRECTORY: &str = "/var/log/nvsentinel";
/// Default size of a file (MB).
const MAX_SIZE_MB: u32 = 100;
/// Default number of older files.
const MAX_BACKUPS: u32 = 7;

/// Audit log of writes to the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditSettings {
    pub directory: PathBuf,
    /// Largest size of a file, which is then rotated (bytes).
    pub max_bytes: u64,
    /// Number of older files that are kept.
    pub backups: u32,
    /// True if lines contain the bodies of requests.
    pub with_bodies: bool,
}

// === impl AuditSettings ===

impl AuditSettings {
    /// Returns the settings; `None` if there is no audit log.
    pub(super) fn resolve(args: AuditArgs) -> Option<Self> {
        args.audit_enabled.unwrap_or(false).then(|| Self {
            directory: args.audit_log_base_path.unwrap_or_else(|| DIRECTORY.into()),
            max_bytes: u64::from(args.audit_log_max_size_mb.unwrap_or(MAX_SIZE_MB)) * 1_000_000,
            backups: args.audit_log_max_backups.unwrap_or(MAX_BACKUPS),
            with_bodies: args.audit_log_request_body.unwrap_or(false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_off_unless_it_is_wanted() {
        assert_eq!(AuditSettings::resolve(AuditArgs::default()), None);
        let place_alone = AuditArgs {
            audit_log_base_path: Some("/a".into()),
            ..AuditArgs::default()
        };
        assert_eq!(AuditSettings::resolve(place_alone), None);
        let args = AuditArgs {
            audit_enabled: Some(true),
            audit_log_max_size_mb: Some(2),
            ..AuditArgs::default()
        };
        let expected = AuditSettings {
            directory: DIRECTORY.into(),
            max_bytes: 2_000_000,
            backups: 7,
            with_bodies: false,
        };
        assert_eq!(AuditSettings::resolve(args), Some(expected));
    }
}
