//! The keys of an override file, and their checks.

use std::collections::{BTreeMap, BTreeSet};

use contract::findings::{FileError, Findings, Format};
use contract::{ProcessingStrategy, RecommendedAction, keys, parse_action, parse_strategy};
use serde::Deserialize;
use toml::Spanned;

use super::limits;
use super::{MAX_OVERRIDES, NicChange, Nvlink5Key, Overrides, VerdictChange};
use crate::catalog::{Catalog, Changed, hex};

/// Longest text of an entry, in bytes. The text becomes part of events, which have size limits.
const MAX_TEXT_BYTES: usize = 500;
/// Longest error code of a cancellation, in bytes.
const MAX_CODE_BYTES: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OverridesFile {
    #[serde(default)]
    xid: Vec<Spanned<CodeEntry>>,
    #[serde(default)]
    sxid: Vec<Spanned<CodeEntry>>,
    #[serde(default)]
    nvlink5: Vec<Spanned<Nvlink5Entry>>,
    #[serde(default)]
    dcgm: Vec<Spanned<DcgmEntry>>,
    #[serde(default)]
    nic: Vec<Spanned<NicTable>>,
    #[serde(rename = "nicDriverDetection")]
    nic_driver_detection: Option<NicDriverDetection>,
    checks: Option<Vec<Spanned<CheckEntry>>>,
    #[serde(rename = "gpu-limits", default)]
    gpu_limits: limits::Table,
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
struct DcgmEntry {
    name: String,
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
    /// False if the key is missing, as in NVSentinel.
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
    /// False if the key is missing, as in NVSentinel.
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

/// Reader of the entries of a file, which collects errors.
struct Reader<'a> {
    findings: Findings<'a>,
}

pub(super) fn parse(text: &str, shown: &str) -> Result<Overrides, FileError> {
    let (file, findings) = Findings::read::<OverridesFile>(text, shown, Format::Toml)?;
    let codes = file.xid.len() + file.sxid.len() + file.nvlink5.len();
    let count = codes + file.dcgm.len() + file.nic.len();
    if count > MAX_OVERRIDES {
        let what = format!("it has {count} entries; the limit is {MAX_OVERRIDES}");
        return Err(findings.stop(0, &what));
    }
    let mut reader = Reader { findings };
    let detection = file.nic_driver_detection;
    let overrides = Overrides {
        xids: reader.codes("xid", file.xid),
        sxids: reader.codes("sxid", file.sxid),
        nvlink5: reader.nvlink5(file.nvlink5),
        dcgm: reader.dcgm(file.dcgm),
        nics: reader.nics(file.nic),
        nic_list: detection.map(|detection| reader.nic_list(detection.patterns)),
        cancellations: file.checks.map(|checks| reader.checks(checks)),
        limits: limits::read(file.gpu_limits, &mut reader.findings),
    };
    reader.findings.result(overrides)
}

// === impl Reader ===

impl Reader<'_> {
    fn once(&mut self, is_new: bool) {
        if !is_new {
            self.findings.wrong("is in the file twice");
        }
    }

    fn codes(&mut self, kind: &str, entries: Vec<Spanned<CodeEntry>>) -> Vec<VerdictChange<u32>> {
        let mut known = BTreeSet::new();
        let change = |entry| {
            let entry = self
                .findings
                .begin_entry(entry, |entry: &CodeEntry| format!("{kind} {}", entry.code));
            self.once(known.insert(entry.code));
            let (fatal, action) = (entry.fatal, entry.action);
            self.change(entry.code, fatal, action, entry.meaning, entry.reason)
        };
        entries.into_iter().filter_map(change).collect()
    }

    fn nvlink5(&mut self, entries: Vec<Spanned<Nvlink5Entry>>) -> Vec<VerdictChange<Nvlink5Key>> {
        let mut known: Vec<Nvlink5Key> = Vec::new();
        let change = |entry| {
            let entry = self.findings.begin_entry(entry, |entry: &Nvlink5Entry| {
                format!("nvlink5 {}", entry.code)
            });
            let key = Nvlink5Key {
                code: entry.code,
                unit: entry.unit,
                cause: entry.cause,
                status: entry.status.and_then(|status| self.word(&status)),
            };
            let mut rows = Catalog::builtin().nvlink5().iter();
            if !rows.any(|row| key.covers(row)) {
                self.findings
                    .wrong("there is no such row; gpuwarden catalog nvlink5 lists them");
            }
            self.once(!known.contains(&key));
            known.push(key.clone());
            let (fatal, action) = (entry.fatal, entry.action);
            self.change(key, fatal, action, entry.meaning, entry.reason)
        };
        entries.into_iter().filter_map(change).collect()
    }

    fn dcgm(&mut self, entries: Vec<Spanned<DcgmEntry>>) -> Vec<VerdictChange<String>> {
        let mut known = BTreeSet::new();
        let change = |entry| {
            let entry = self
                .findings
                .begin_entry(entry, |entry: &DcgmEntry| format!("dcgm '{}'", entry.name));
            match Catalog::builtin().dcgm_named(&entry.name) {
                Some(row) => self.once(known.insert(&row.name)),
                None => self
                    .findings
                    .wrong("there is no such code; docs/gpu.md has those that are reported"),
            }
            let (fatal, action) = (entry.fatal, entry.action);
            self.change(entry.name, fatal, action, entry.meaning, entry.reason)
        };
        entries.into_iter().filter_map(change).collect()
    }

    fn nics(&mut self, entries: Vec<Spanned<NicTable>>) -> Vec<NicChange> {
        let mut read: Vec<NicChange> = Vec::new();
        for entry in entries {
            let entry = self
                .findings
                .begin_entry(entry, |entry| format!("nic '{}'", entry.name));
            self.check_nic_name(&entry.name);
            self.once(read.iter().all(|known| known.name != entry.name));
            let changed = self.changed(entry.reason);
            read.push(NicChange {
                strategy: self.strategy(entry.strategy),
                verdict: self.verdict(entry.fatal, entry.action),
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
            let pattern = self
                .findings
                .begin_entry(pattern, |pattern| format!("pattern '{}'", pattern.name));
            if !pattern.enabled {
                continue;
            }
            self.check_nic_name(&pattern.name);
            self.once(list.iter().all(|(name, _)| *name != pattern.name));
            let strategy = self.strategy(pattern.processing_strategy);
            let strategy = strategy.unwrap_or(ProcessingStrategy::ExecuteRemediation);
            list.push((pattern.name, strategy));
        }
        list
    }

    fn checks(&mut self, checks: Vec<Spanned<CheckEntry>>) -> BTreeMap<String, Vec<String>> {
        let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for check in checks {
            let check = self
                .findings
                .begin_entry(check, |check| format!("check '{}'", check.name));
            if !check.enabled {
                continue;
            }
            if check.name != keys::CHECK_XID {
                let only = keys::CHECK_XID;
                self.findings
                    .wrong(format_args!("cancellations are supported for {only} only"));
                continue;
            }
            for rule in check.cancellations {
                let rule = self
                    .findings
                    .begin_entry(rule, |_| "cancellation".to_owned());
                let (source, targets) = self.cancellation(&rule);
                if targets.len() > MAX_OVERRIDES || rules.len() >= MAX_OVERRIDES {
                    self.findings
                        .wrong(format_args!("at most {MAX_OVERRIDES} codes are read"));
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

    /// Returns the code of a rule, and the codes that it cancels.
    fn cancellation(&mut self, rule: &CancellationEntry) -> (String, Vec<String>) {
        let source = rule.on_error_code.trim().to_owned();
        let targets = rule.cancel_error_codes.iter();
        let targets: Vec<String> = targets.map(|code| code.trim().to_owned()).collect();
        if targets.is_empty() {
            self.findings.wrong("cancelErrorCodes is empty");
        }
        for code in targets.iter().chain([&source]) {
            if code.is_empty() || code.len() > MAX_CODE_BYTES {
                self.findings.wrong(format_args!(
                    "a code is empty or has more than {MAX_CODE_BYTES} bytes"
                ));
            }
        }
        if targets.contains(&source) {
            self.findings
                .wrong(format_args!("{source} would cancel itself"));
        }
        (source, targets)
    }

    /// Returns the change of a verdict; `None` if neither `fatal` nor `action` is given.
    fn change<K>(
        &mut self,
        key: K,
        fatal: Option<bool>,
        action: Option<Spanned<String>>,
        meaning: Option<Spanned<String>>,
        reason: Option<Spanned<String>>,
    ) -> Option<VerdictChange<K>> {
        let verdict = self.verdict(fatal, action);
        let meaning = self.short("meaning", meaning);
        let changed = self.changed(reason);
        if verdict.is_none() {
            self.findings.wrong("needs fatal, action or both");
        }
        Some(VerdictChange {
            key,
            verdict: verdict?,
            meaning,
            changed,
        })
    }

    /// Returns the verdict given by `fatal` and `action`; one of them implies the other. `None`
    /// if both are missing.
    fn verdict(
        &mut self,
        fatal: Option<bool>,
        action: Option<Spanned<String>>,
    ) -> Option<(bool, RecommendedAction)> {
        let Some(given) = action else {
            if fatal == Some(true) {
                self.findings
                    .wrong("is fatal, so it needs an action other than NONE");
            }
            return fatal.map(|fatal| (fatal, RecommendedAction::None));
        };
        let name = given.get_ref().trim();
        let action = parse_action(name)
            .and_then(|number| RecommendedAction::try_from(number).ok())
            .filter(|action| *action != RecommendedAction::Custom);
        let Some(action) = action else {
            let what = format_args!(
                "action '{name}' is none of NONE, COMPONENT_RESET, CONTACT_SUPPORT, \
                 RUN_FIELDDIAG, RESTART_VM, RESTART_BM, REPLACE_VM, RUN_DCGMEUD, UNKNOWN"
            );
            self.findings.wrong_at(given.span().start, what);
            // The error is recorded; continue to find further errors.
            return Some((false, RecommendedAction::None));
        };
        if fatal == Some(true) && action == RecommendedAction::None {
            self.findings
                .wrong("is fatal, so it needs an action other than NONE");
        }
        // As in events: an action implies a fatal fault.
        let nothing = [RecommendedAction::None, RecommendedAction::Unknown];
        Some((fatal.unwrap_or(!nothing.contains(&action)), action))
    }

    fn strategy(&mut self, given: Option<Spanned<String>>) -> Option<ProcessingStrategy> {
        let given = given?;
        let name = given.get_ref().trim().to_ascii_uppercase();
        if name.is_empty() {
            return None;
        }
        let strategy = parse_strategy(&name)
            .and_then(|number| ProcessingStrategy::try_from(number).ok())
            .filter(|strategy| *strategy != ProcessingStrategy::Unspecified);
        if strategy.is_none() {
            let what = format_args!(
                "strategy '{name}' is none of EXECUTE_REMEDIATION, STORE_ONLY, STORE_AND_ANALYSE"
            );
            self.findings.wrong_at(given.span().start, what);
        }
        strategy
    }

    /// Parses a register word in hexadecimal.
    fn word(&mut self, text: &Spanned<String>) -> Option<u32> {
        let (given, word) = (text.get_ref(), hex(text.get_ref()));
        if word.is_none() {
            let what =
                format_args!("status '{given}' is not a hexadecimal word such as 0x00000001");
            self.findings.wrong_at(text.span().start, what);
        }
        word
    }

    fn check_nic_name(&mut self, name: &str) {
        let known = Catalog::builtin().nics();
        if known.iter().all(|row| row.name != name) {
            let names: Vec<&str> = known.iter().map(|row| &*row.name).collect();
            let names = names.join(", ");
            self.findings
                .wrong(format_args!("there is no such pattern; there are {names}"));
        }
    }

    fn changed(&mut self, reason: Option<Spanned<String>>) -> Changed {
        Changed {
            by: self.findings.entry_place(),
            reason: self.short("reason", reason).unwrap_or_default(),
        }
    }

    fn short(&mut self, key: &str, text: Option<Spanned<String>>) -> Option<String> {
        let text = text?;
        if text.get_ref().len() > MAX_TEXT_BYTES || text.get_ref().contains(char::is_control) {
            let what = format_args!("{key} must be one line of at most {MAX_TEXT_BYTES} bytes");
            self.findings.wrong_at(text.span().start, what);
        }
        Some(text.into_inner())
    }
}
