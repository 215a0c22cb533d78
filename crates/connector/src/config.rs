//! Reader of the connector's configuration: NVSentinel's `config.json` and the files of the
//! transformers that it enables. The contents are interpreted by [`crate::transform::load`].

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use crate::transform::load::{self, Kind};
use crate::transform::{Transformer, augment};
use contract::findings::{FileError, MAX_FILE_BYTES};
use model::condition::MessageLimits;
use runtime::text_file;
use runtime::tls::CertificateFiles;

use crate::forward::{ForwardTarget, TargetTls};

/// Configuration read from the files.
#[derive(Debug, Default)]
pub struct ConnectorConfig {
    /// Transformers, in the order of their use.
    pub transformers: Vec<Transformer>,
    /// Limits for the messages of node conditions, which NVSentinel's connector writes.
    pub limits: MessageLimits,
    /// Service that events are forwarded to, in addition to the store.
    pub forward: Option<ForwardTarget>,
    /// Remarks about settings that were read and have no effect, for display.
    pub notes: Vec<String>,
}

/// Reason why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A file has invalid contents.
    #[error(transparent)]
    Wrong(#[from] FileError),
    /// A transformer requires a file, and the configuration names none.
    #[error("{}: pipeline: {name} needs a config file, and names none", path.display())]
    NoFile {
        /// Path of the configuration.
        path: PathBuf,
        /// Name of the transformer.
        name: &'static str,
    },
}

// === impl ConnectorConfig ===

impl ConnectorConfig {
    /// Reads `config.json` at `path`. Relative paths in it start at its directory.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let file = load::connector(&text(path)?, &shown(path))?;
        let mut config = Self {
            transformers: Vec::new(),
            limits: file.limits,
            forward: None,
            notes: file.notes,
        };
        let place = path.parent().unwrap_or(Path::new(""));
        config.forward = file.forward.map(|forward| ForwardTarget {
            host: forward.host,
            port: forward.port,
            token: (!forward.token.is_empty()).then(|| place.join(&forward.token)),
            tls: forward.tls.map(|tls| TargetTls {
                authority: place.join(tls.authority),
                own: tls.own.map(|(certificate, key)| CertificateFiles {
                    certificate: place.join(certificate),
                    key: place.join(key),
                }),
            }),
        });
        for entry in file.pipeline {
            let named = (!entry.config.is_empty()).then(|| place.join(&entry.config));
            let transformer = config.transformer(entry.kind, path, named.as_deref())?;
            config.transformers.push(transformer);
        }
        Ok(config)
    }

    fn transformer(
        &mut self,
        kind: Kind,
        path: &Path,
        named: Option<&Path>,
    ) -> Result<Transformer, ConfigError> {
        let needed = |name| {
            named.ok_or_else(|| ConfigError::NoFile {
                path: path.to_owned(),
                name,
            })
        };
        Ok(match kind {
            Kind::MetadataAugmentor => Transformer::Augment(self.labels(named)?),
            Kind::OverrideTransformer => {
                let file = needed("OverrideTransformer")?;
                let (overrides, notes) = load::overrides(&text(file)?, &shown(file))?;
                self.notes.extend(notes);
                Transformer::Override(overrides)
            }
            Kind::Deduplicator => {
                let file = needed("Deduplicator")?;
                Transformer::Deduplicate(load::dedup(&text(file)?, &shown(file))?)
            }
        })
    }

    /// Returns the labels; those of the topology if there is no file.
    fn labels(&mut self, file: Option<&Path>) -> Result<augment::Labels, ConfigError> {
        let mut without =
            "MetadataAugmentor writes the labels of the topology only, for it ".to_owned();
        let Some(file) = file else {
            without.push_str("names no config file");
            self.notes.push(without);
            return Ok(augment::Labels::default());
        };
        match text(file) {
            Ok(text) => {
                let (labels, notes) = load::metadata(&text, &shown(file))?;
                self.notes.extend(notes);
                Ok(labels)
            }
            Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                // Writing into a String does not fail.
                let _ = write!(without, "finds no file {}", file.display());
                self.notes.push(without);
                Ok(augment::Labels::default())
            }
            Err(error) => Err(error),
        }
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn text(path: &Path) -> Result<String, ConfigError> {
    text_file::read(path, MAX_FILE_BYTES).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examples() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/connector")
    }

    #[test]
    fn the_files_of_an_installation_load_unchanged() {
        let config = ConnectorConfig::read(&examples().join("config.json")).unwrap();
        assert!(matches!(
            config.transformers.as_slice(),
            [
                Transformer::Augment(_),
                Transformer::Override(_),
                Transformer::Deduplicate(_)
            ]
        ));
        // A copy with the absolute paths that a chart writes.
        let dir = tempfile::tempdir().unwrap();
        let place = examples().canonicalize().unwrap();
        let text = std::fs::read_to_string(place.join("config.json")).unwrap();
        let absolute = text.replace("dedup.toml", place.join("dedup.toml").to_str().unwrap());
        let relative = absolute.replace(
            "\"OverrideTransformer\",\n      \"enabled\": true",
            "\"OverrideTransformer\",\n      \"enabled\": false",
        );
        let longer = relative.replace(
            "\"MaxNodeConditionMessageLength\": 1024",
            "\"MaxNodeConditionMessageLength\": 2048",
        );
        let path = dir.path().join("config.json");
        std::fs::write(&path, longer).unwrap();
        let config = ConnectorConfig::read(&path).unwrap();
        assert_eq!(config.limits.message_bytes(), 2048);
        assert!(matches!(
            config.transformers.as_slice(),
            [Transformer::Augment(labels), Transformer::Deduplicate(_)] if *labels == augment::Labels::default()
        ));
        let note = config.notes.last().unwrap();
        assert!(
            note.contains("metadata.toml") && note.contains("the labels of the topology only"),
            "{note}"
        );
    }

    #[test]
    fn files_of_the_grpc_sink_start_where_the_configuration_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let text = r#"{
            "enableGRPCSinkConnector": "true", "GRPCSinkTarget": "https://[::1]:50051",
            "GRPCSinkTokenPath": "/var/token", "GRPCSinkCAPath": "ca.crt",
            "GRPCSinkCertPath": "/own/tls.crt", "GRPCSinkKeyPath": "tls.key"
        }"#;
        std::fs::write(&path, text).unwrap();
        let target = ConnectorConfig::read(&path).unwrap().forward.unwrap();
        assert_eq!(target.to_string(), "https://[::1]:50051");
        assert_eq!(target.token, Some("/var/token".into()));
        let tls = TargetTls {
            authority: dir.path().join("ca.crt"),
            own: Some(CertificateFiles {
                certificate: "/own/tls.crt".into(),
                key: dir.path().join("tls.key"),
            }),
        };
        assert_eq!(target.tls, Some(tls));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(dir.path().join("bad.toml"), "\nsuppressionWindow = 3\n").unwrap();
        let table = [
            (
                r#"{"name": "Deduplicator", "enabled": true}"#,
                "Deduplicator needs a config file",
            ),
            (
                r#"{"name": "OverrideTransformer", "enabled": true}"#,
                "OverrideTransformer needs",
            ),
            (
                r#"{"name": "Deduplicator", "enabled": true, "config": "gone.toml"}"#,
                "cannot read ",
            ),
            (
                r#"{"name": "OverrideTransformer", "enabled": true, "config": "/dev/zero"}"#,
                "cannot read /dev/zero",
            ),
            (
                r#"{"name": "Deduplicator", "enabled": true, "config": "bad.toml"}"#,
                "bad.toml:2: suppressionWindow is 3; write text in quotes",
            ),
            (
                r#"{"name": "MetadataAugmentor", "enabled": true, "config": "bad.toml"}"#,
                "bad.toml:2: unknown key",
            ),
            (
                r#"{"name": "Augmentor", "enabled": true}"#,
                "config.json:1: pipeline[0].name is \"Augmentor\"; write MetadataAugmentor,",
            ),
        ];
        for (entry, expected) in table {
            std::fs::write(&path, format!("{{\"pipeline\": [{entry}]}}")).unwrap();
            let error = ConnectorConfig::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected), "{entry}: {error}");
        }
        let error = ConnectorConfig::read(&dir.path().join("none.json")).unwrap_err();
        assert!(error.to_string().contains("none.json"), "{error}");
    }
}
