//! Arguments of the audit log of writes to the API server.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::roles::group;

group! {
    /// Audit log of writes to the API server. The environment variables are `NVSentinel`'s.
    #[allow(clippy::struct_field_names)] // they are the names of the flags
    pub(crate) struct AuditArgs {
        /// Record each write to the API server in an audit log (docs/audit.md) [default: false].
        #[arg(long, env = "AUDIT_ENABLED", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub audit_enabled: Option<bool>,
        /// Directory of the audit log; the file is POD_NAME-audit.log, or has the name of the
        /// command [default: /var/log/nvsentinel].
        #[arg(long, env = "AUDIT_LOG_BASE_PATH", value_name = "DIRECTORY")]
        pub audit_log_base_path: Option<PathBuf>,
        /// Largest size of the file, in MB; a full one is rotated [default: 100].
        #[arg(long, env = "AUDIT_LOG_MAX_SIZE_MB", value_name = "NUMBER")]
        pub audit_log_max_size_mb: Option<u32>,
        /// Number of older files that are kept [default: 7].
        #[arg(long, env = "AUDIT_LOG_MAX_BACKUPS", value_name = "NUMBER")]
        pub audit_log_max_backups: Option<u32>,
        /// Record the bodies of requests too, except those with Secrets and tokens [default:
        /// false].
        #[arg(long, env = "AUDIT_LOG_REQUEST_BODY", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub audit_log_request_body: Option<bool>,
    }
}
