//! The keys of a file of changes, and what can be wrong with them.

use std::collections::{BTreeMap, BTreeSet};

use contract::findings::{FileError, Findings};
use contract::{ProcessingStrategy, RecommendedAction, keys, parse_action, parse_strategy};
use serde::Deserialize;
use toml::Spanned;

use super::{Entry, MAX_OVERRIDES, MAX_OVERRIDES_BYTES, NicEntry, Nvlink5Key, Overrides};
use crate::catalog::Catalog;
use crate::catalog::rows::{Changed, hex};

/// Longest text of an entry (bytes): it becomes part of events, which have limits.
const MAX_TEXT_BYTES: usize = 500;
/// Longest error code of a cancellation (bytes).
const MAX_CODE_BYTES: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    xid: Vec<Spanned<CodeEntry>>,
    #[serde(default)]
    sxid: Vec<Spanned<CodeEntry>>,
    #[serde(default)]
    nvlink5: Vec<Spanned<Nvlink5Entry>>,
    #[serde(default)]
    nic: Vec<Spanned<NicTable>>,
    #[serde(rename = "nicDriverDetection")]
    nic_driver_detection: Option<NicDriverDetection>,
    checks: Option<Vec<Spanned<CheckEntry>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CodeEntry {
    code: u32,
    fatal: Option<bool>,
    action: Option<Spanned<String>>,
    meaning: Option<Spanned<String>>,
    reason: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nvlink5Entry {
    code: u32,
    unit: Option<String>,
    cause: Option<u32>,
    status: Option<Spanned<String>>,
    fatal: Option<bool>,
    action: Option<Spanned<String>>,
    meaning: Option<Spanned<String>>,
    reason: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NicTable {
    name: String,
    enabled: Option<bool>,
    strategy: Option<Spanned<String>>,
    fatal: Option<bool>,
    action: Option<Spanned<String>>,
    reason: Option<Spanned<String>>,
}

/// NVSentinel's file of NIC patterns.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NicDriverDetection {
    #[serde(default)]
    patterns: Vec<Spanned<NicPattern>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NicPattern {
    #[serde(default)]
    name: String,
    /// Off where it is missing, as there.
    #[serde(default)]
    enabled: bool,
    #[serde(rename = "processingStrategy")]
    processing_strategy: Option<Spanned<String>>,
}

/// NVSentinel's file of cancellations.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckEntry {
    #[serde(default)]
    name: String,
    /// Off where it is missing, as there.
    #[serde(default)]
    enabled: bool,
    #[serde(default)]
    cancellations: Vec<Spanned<CancellationEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CancellationEntry {
    #[serde(rename = "onErrorCode", default)]
    on_error_code: String,
    #[serde(rename = "cancelErrorCodes", default)]
    cancel_error_codes: Vec<String>,
}

/// Reads a file, collecting what is wrong with it.
struct Reader<'a> {
    findings: Findings<'a>,
}

pub(super) fn parse(text: &str, shown: &str) -> Result<Overrides, FileError> {
    let findings = Findings::new(text, shown);
    if text.len() > MAX_OVERRIDES_BYTES {
        let found = text.len();
        let what = format!("it has {found} bytes, at most {MAX_OVERRIDES_BYTES} are read");
        return Err(findings.stop(0, &what));
    }
    let file: File = findings.parse()?;
    let count = file.xid.len() + file.sxid.len() + file.nvlink5.len() + file.nic.len();
    if count > MAX_OVERRIDES {
        let what = format!("it has {count} entries, at most {MAX_OVERRIDES} are read");
        return Err(findings.stop(0, &what));
    }
    let mut reader = Reader { findings };
    let overrides = reader.file(file);
    reader.findings.result(overrides)
}

// === impl Reader ===

impl Reader<'_> {
    fn file(&mut self, file: File) -> Overrides {
        Overrides {
            xids: self.codes("xid", file.xid),
            sxids: self.codes("sxid", file.sxid),
            nvlink5: self.nvlink5(file.nvlink5),
            nics: self.nics(file.nic),
            nic_list: file
                .nic_driver_detection
                .map(|detection| self.nic_list(detection.patterns)),
            cancellations: file.checks.map(|checks| self.checks(checks)),
        }
    }

    fn codes(&mut self, kind: &str, entries: Vec<Spanned<CodeEntry>>) -> Vec<Entry<u32>> {
        let mut known = BTreeSet::new();
        let mut read = Vec::new();
        for entry in entries {
            let at = entry.span().start;
            let entry = entry.into_inner();
            let title = format!("{kind} {}", entry.code);
            if !known.insert(entry.code) {
                self.findings
                    .at(at, &format!("{title}: stands in the file twice"));
            }
            let verdict = self.verdict(at, &title, entry.fatal, entry.action);
            let meaning = self.short(&title, "meaning", entry.meaning);
            let changed = self.changed(at, &title, entry.reason);
            let Some(verdict) = verdict else {
                self.findings
                    .at(at, &format!("{title}: needs fatal, action or both"));
                continue;
            };
            read.push(Entry {
                key: entry.code,
                verdict,
                meaning,
                changed,
            });
        }
        read
    }

    fn nvlink5(&mut self, entries: Vec<Spanned<Nvlink5Entry>>) -> Vec<Entry<Nvlink5Key>> {
        let mut read: Vec<Entry<Nvlink5Key>> = Vec::new();
        for entry in entries {
            let at = entry.span().start;
            let entry = entry.into_inner();
            let title = format!("nvlink5 {}", entry.code);
            let status = entry.status.and_then(|status| {
                let word = hex(status.get_ref());
                if word.is_none() {
                    let given = status.get_ref();
                    self.findings.at(
                        status.span().start,
                        &format!(
                            "{title}: status '{given}' is no hexadecimal word such as 0x00000001"
                        ),
                    );
                }
                word
            });
            let key = Nvlink5Key {
                code: entry.code,
                unit: entry.unit,
                cause: entry.cause,
                status,
            };
            if !Catalog::builtin()
                .nvlink5()
                .iter()
                .any(|row| key.covers(row))
            {
                self.findings.at(
                    at,
                    &format!("{title}: there is no such row; gpuwarden catalog nvlink5 lists them"),
                );
            }
            if read.iter().any(|known| known.key == key) {
                self.findings
                    .at(at, &format!("{title}: stands in the file twice"));
            }
            let verdict = self.verdict(at, &title, entry.fatal, entry.action);
            let meaning = self.short(&title, "meaning", entry.meaning);
            let changed = self.changed(at, &title, entry.reason);
            let Some(verdict) = verdict else {
                self.findings
                    .at(at, &format!("{title}: needs fatal, action or both"));
                continue;
            };
            read.push(Entry {
                key,
                verdict,
                meaning,
                changed,
            });
        }
        read
    }

    fn nics(&mut self, entries: Vec<Spanned<NicTable>>) -> Vec<NicEntry> {
        let mut read: Vec<NicEntry> = Vec::new();
        for entry in entries {
            let at = entry.span().start;
            let entry = entry.into_inner();
            let title = format!("nic '{}'", entry.name);
            self.check_nic_name(at, &title, &entry.name);
            if read.iter().any(|known| known.name == entry.name) {
                self.findings
                    .at(at, &format!("{title}: stands in the file twice"));
            }
            let changed = self.changed(at, &title, entry.reason);
            read.push(NicEntry {
                strategy: self.strategy(&title, entry.strategy),
                verdict: self.verdict(at, &title, entry.fatal, entry.action),
                name: entry.name,
                enabled: entry.enabled,
                changed,
            });
        }
        read
    }

    fn nic_list(
        &mut self,
        patterns: Vec<Spanned<NicPattern>>,
    ) -> Vec<(String, ProcessingStrategy)> {
        let mut list: Vec<(String, ProcessingStrategy)> = Vec::new();
        for pattern in patterns {
            let at = pattern.span().start;
            let pattern = pattern.into_inner();
            if !pattern.enabled {
                continue;
            }
            let title = format!("pattern '{}'", pattern.name);
            self.check_nic_name(at, &title, &pattern.name);
            if list.iter().any(|(name, _)| *name == pattern.name) {
                self.findings
                    .at(at, &format!("{title}: stands in the file twice"));
            }
            let strategy = self
                .strategy(&title, pattern.processing_strategy)
                .unwrap_or(ProcessingStrategy::ExecuteRemediation);
            list.push((pattern.name, strategy));
        }
        list
    }

    fn checks(&mut self, checks: Vec<Spanned<CheckEntry>>) -> BTreeMap<String, Vec<String>> {
        let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for check in checks {
            let at = check.span().start;
            let check = check.into_inner();
            if !check.enabled {
                continue;
            }
            if check.name != keys::CHECK_XID {
                let (name, only) = (&check.name, keys::CHECK_XID);
                self.findings.at(
                    at,
                    &format!("check '{name}': cancellations are known for {only} only"),
                );
                continue;
            }
            for rule in check.cancellations {
                let at = rule.span().start;
                let rule = rule.into_inner();
                let source = rule.on_error_code.trim().to_owned();
                let targets = rule.cancel_error_codes.iter().map(|code| code.trim());
                let targets: Vec<String> = targets.map(str::to_owned).collect();
                if targets.is_empty() {
                    self.findings
                        .at(at, "cancellation: cancelErrorCodes is empty");
                }
                for code in targets.iter().chain([&source]) {
                    if code.is_empty() || code.len() > MAX_CODE_BYTES {
                        self.findings.at(
                            at,
                            &format!(
                                "cancellation: a code is empty or has more than {MAX_CODE_BYTES} bytes"
                            ),
                        );
                    }
                }
                if targets.contains(&source) {
                    self.findings
                        .at(at, &format!("cancellation: {source} would cancel itself"));
                }
                if targets.len() > MAX_OVERRIDES || rules.len() >= MAX_OVERRIDES {
                    self.findings.at(
                        at,
                        &format!("cancellation: at most {MAX_OVERRIDES} codes are read"),
                    );
                    return rules;
                }
                let known = rules.entry(source).or_default();
                for target in targets {
                    if !known.contains(&target) {
                        known.push(target);
                    }
                }
            }
        }
        rules
    }

    /// Returns what `fatal` and `action` mean together: where one is missing, the other gives it.
    /// `None`: neither is there.
    fn verdict(
        &mut self,
        at: usize,
        title: &str,
        fatal: Option<bool>,
        action: Option<Spanned<String>>,
    ) -> Option<(bool, RecommendedAction)> {
        let action = match action {
            None => None,
            Some(given) => {
                let name = given.get_ref().trim();
                let action = parse_action(name)
                    .and_then(|number| RecommendedAction::try_from(number).ok())
                    .filter(|action| *action != RecommendedAction::Custom);
                if action.is_none() {
                    self.findings.at(
                        given.span().start,
                        &format!(
                            "{title}: action '{name}' is none of NONE, COMPONENT_RESET, \
                             CONTACT_SUPPORT, RUN_FIELDDIAG, RESTART_VM, RESTART_BM, REPLACE_VM, \
                             RUN_DCGMEUD, UNKNOWN"
                        ),
                    );
                    // Found wrong; what else could be wrong is still looked for.
                    return Some((false, RecommendedAction::None));
                }
                action
            }
        };
        match (fatal, action) {
            (None, None) => None,
            (Some(true), None) => {
                self.findings.at(
                    at,
                    &format!("{title}: is fatal, so it needs an action that mends it"),
                );
                Some((true, RecommendedAction::None))
            }
            (Some(false), None) => Some((false, RecommendedAction::None)),
            // As on the wire: what has an action is fatal.
            (None, Some(action)) => {
                let nothing = [RecommendedAction::None, RecommendedAction::Unknown];
                Some((!nothing.contains(&action), action))
            }
            (Some(fatal), Some(action)) => Some((fatal, action)),
        }
    }

    fn strategy(
        &mut self,
        title: &str,
        given: Option<Spanned<String>>,
    ) -> Option<ProcessingStrategy> {
        let given = given?;
        let name = given.get_ref().trim().to_ascii_uppercase();
        if name.is_empty() {
            return None;
        }
        let strategy = parse_strategy(&name)
            .and_then(|number| ProcessingStrategy::try_from(number).ok())
            .filter(|strategy| *strategy != ProcessingStrategy::Unspecified);
        if strategy.is_none() {
            self.findings.at(
                given.span().start,
                &format!(
                    "{title}: strategy '{name}' is none of EXECUTE_REMEDIATION, STORE_ONLY, \
                     STORE_AND_ANALYSE"
                ),
            );
        }
        strategy
    }

    fn check_nic_name(&mut self, at: usize, title: &str, name: &str) {
        let known = Catalog::builtin().nics();
        if known.iter().all(|row| row.name != name) {
            let names: Vec<&str> = known.iter().map(|row| &*row.name).collect();
            let names = names.join(", ");
            self.findings.at(
                at,
                &format!("{title}: there is no such pattern; there are {names}"),
            );
        }
    }

    fn changed(&mut self, at: usize, title: &str, reason: Option<Spanned<String>>) -> Changed {
        Changed {
            by: self.findings.place(at),
            reason: self.short(title, "reason", reason).unwrap_or_default(),
        }
    }

    fn short(&mut self, title: &str, key: &str, text: Option<Spanned<String>>) -> Option<String> {
        let text = text?;
        if text.get_ref().len() > MAX_TEXT_BYTES || text.get_ref().contains(char::is_control) {
            self.findings.at(
                text.span().start,
                &format!("{title}: {key} is one line of at most {MAX_TEXT_BYTES} bytes"),
            );
        }
        Some(text.into_inner())
    }
}
