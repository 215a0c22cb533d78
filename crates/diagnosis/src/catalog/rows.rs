//! The rows of the catalogue, and the parser of its data files.
//!
//! Each file is a table of tab-separated columns with one header row, compiled in;
//! `data/README.md` documents the columns and the sources of their facts.

use std::borrow::Cow;
use std::fmt;

use contract::{ProcessingStrategy, RecommendedAction, parse_action};

use super::nic::{NicDriver, Pattern};

/// Text of a row: compiled in, or from an override file.
pub type Text = Cow<'static, str>;

/// A pattern for register words: covers those that have `value` in the bits of `mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    pub(super) mask: u32,
    pub(super) value: u32,
}

/// Row of an XID code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// XID code, the number in the log line.
    pub code: u32,
    /// Publisher's name of the code.
    pub mnemonic: Text,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// True if work on the GPU must stop.
    pub fatal: bool,
    /// Recommended action to remediate the fault.
    pub action: RecommendedAction,
    /// Location of the cause: `application`, `gpu`, `nvlink`, `memory`, `firmware`, `node` or
    /// `unused`.
    pub scope: Text,
    /// Note for operators; may be empty.
    pub note: Text,
    /// Confidence in the verdict.
    pub confidence: Confidence,
    /// Source of the row's facts.
    pub source: Text,
    /// Change by an override file, if one decided the verdict.
    pub changed: Option<Changed>,
}

/// Row of an `SXid` code of an `NVSwitch`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sxid {
    /// `SXid` code, the number in the log line.
    pub code: u32,
    /// Publisher's name of the code.
    pub name: Text,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// Publisher's severity of the code.
    pub class: SxidClass,
    /// Verdict of an override file; `None` if the severity in the line decides.
    pub fixed: Option<(bool, RecommendedAction)>,
    /// Note for operators; may be empty.
    pub note: Text,
    /// Confidence in the row.
    pub confidence: Confidence,
    /// Source of the row's facts.
    pub source: Text,
    /// Change by an override file, if one decided the verdict.
    pub changed: Option<Changed>,
}

/// Row of an XID of 144 to 150, by the register words in its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvlink5 {
    /// XID code, 144 to 150.
    pub code: u32,
    /// Names of the unit; the first is the publisher's short one.
    pub unit: Text,
    /// Pattern for `IntrInfo` of drivers before R575.
    pub before_r575: Bits,
    /// Pattern for `IntrInfo` of drivers from R575 on.
    pub from_r575: Bits,
    /// Error status words that the row covers; empty covers all.
    pub status: Vec<u32>,
    /// True if work on the GPU must stop.
    pub fatal: bool,
    /// Recommended action to remediate the fault.
    pub action: RecommendedAction,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// Note for operators; may be empty.
    pub note: Text,
    /// Confidence in the verdict.
    pub confidence: Confidence,
    /// Source of the row's facts.
    pub source: Text,
    /// Change by an override file, if one decided the verdict.
    pub changed: Option<Changed>,
}

/// Row of a NIC driver's log line that is worth an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Name of the pattern, which is the error code of its events.
    pub name: Text,
    /// Driver that logs the lines.
    pub driver: NicDriver,
    /// Pattern that the lines match.
    pub pattern: Pattern,
    /// True if lines are matched at all.
    pub enabled: bool,
    /// Strategy of the events: those that are only stored open no fault.
    pub strategy: ProcessingStrategy,
    /// True if work on the node must stop.
    pub fatal: bool,
    /// Recommended action to remediate the fault.
    pub action: RecommendedAction,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// Note for operators; may be empty.
    pub note: Text,
    /// Confidence in the verdict.
    pub confidence: Confidence,
    /// Source of the row's facts.
    pub source: Text,
    /// Change by an override file, if one decided the verdict.
    pub changed: Option<Changed>,
}

/// Confidence in a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confidence {
    /// The publisher's advice and the actions that users rely on agree.
    High,
    /// The two differ, or one of them leaves the action open; the row's note gives the
    /// decision.
    Medium,
    /// Neither gives an action: chosen by us from the publisher's description.
    Low,
}

/// Publisher's severity of an `SXid` code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SxidClass {
    /// Corrected, or harms one job only.
    NonFatal,
    /// Fatal to the fabric or not, as the driver's line states.
    PotentiallyFatal,
    /// Fatal to the whole fabric.
    AlwaysFatal,
}

/// Change of a verdict by an override file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// File and line of the change.
    pub by: String,
    /// Reason in the file; may be empty.
    pub reason: String,
}

/// Error in a row of a data file. The tests make sure that no data file has one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file} line {line}: {what}")]
pub struct RowError {
    /// Name of the data file.
    pub file: &'static str,
    /// Line number; the header is line 1.
    pub line: usize,
    /// Description of the error.
    pub what: String,
}

/// A data file with its text.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
}

pub(super) const XID: Table = Table {
    file: "xid.tsv",
    text: include_str!("../../data/xid.tsv"),
};
pub(super) const SXID: Table = Table {
    file: "sxid.tsv",
    text: include_str!("../../data/sxid.tsv"),
};
pub(super) const NVLINK5: Table = Table {
    file: "nvlink5.tsv",
    text: include_str!("../../data/nvlink5.tsv"),
};
pub(super) const NIC: Table = Table {
    file: "nic.tsv",
    text: include_str!("../../data/nic.tsv"),
};

// === impl Bits ===

impl Bits {
    /// Parses 32 characters, the highest bit first: `0`, `1`, or `-` for any.
    pub fn parse(text: &str) -> Option<Self> {
        let mut bits = Self { mask: 0, value: 0 };
        if text.len() != 32 {
            return None;
        }
        for digit in text.bytes() {
            bits.mask = bits.mask << 1 | u32::from(digit != b'-');
            bits.value = bits.value << 1 | u32::from(digit == b'1');
            if !b"01-".contains(&digit) {
                return None;
            }
        }
        Some(bits)
    }

    /// Returns true if the pattern covers `word`.
    pub fn covers(self, word: u32) -> bool {
        word & self.mask == self.value
    }

    /// Returns bits 25 to 20: the cause of a link that went down, or 0.
    pub fn reason(self) -> u32 {
        self.value >> 20 & 0x3f
    }
}

impl std::fmt::Display for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for bit in (0..32).rev() {
            let digit = match (self.mask >> bit & 1, self.value >> bit & 1) {
                (0, _) => '-',
                (_, 0) => '0',
                _ => '1',
            };
            std::fmt::Write::write_char(f, digit)?;
        }
        Ok(())
    }
}

// === impl Table ===

impl Table {
    /// Parses all rows with `read`, which reports an error of one row.
    pub(crate) fn rows<T, const N: usize>(
        self,
        read: impl Fn([&'static str; N]) -> Result<T, String>,
    ) -> impl Iterator<Item = Result<T, RowError>> {
        (1..)
            .zip(self.text.lines())
            .skip(1)
            .filter(|(_, text)| !text.trim().is_empty())
            .map(move |(line, text)| {
                let fail = |what| RowError {
                    file: self.file,
                    line,
                    what,
                };
                let fields: Vec<&'static str> = text.split('\t').collect();
                let found = fields.len();
                let fields = fields
                    .try_into()
                    .map_err(|_| fail(format!("{found} columns, {N} expected")))?;
                read(fields).map_err(fail)
            })
    }
}

pub(super) fn xid(
    [
        code,
        mnemonic,
        meaning,
        fatal,
        action,
        scope,
        note,
        confidence,
        source,
    ]: [&'static str; 9],
) -> Result<Xid, String> {
    Ok(Xid {
        code: number(code)?,
        mnemonic: mnemonic.into(),
        meaning: meaning.into(),
        fatal: truth(fatal)?,
        action: action_of(action)?,
        scope: scope.into(),
        note: note.into(),
        confidence: Confidence::parse(confidence)?,
        source: source.into(),
        changed: None,
    })
}

pub(super) fn sxid(
    [code, name, meaning, class, note, confidence, source]: [&'static str; 7],
) -> Result<Sxid, String> {
    Ok(Sxid {
        code: number(code)?,
        name: name.into(),
        meaning: meaning.into(),
        class: match class {
            "non-fatal" => SxidClass::NonFatal,
            "potentially-fatal" => SxidClass::PotentiallyFatal,
            "always-fatal" => SxidClass::AlwaysFatal,
            _ => return Err(format!("class '{class}' is unknown")),
        },
        fixed: None,
        note: note.into(),
        confidence: Confidence::parse(confidence)?,
        source: source.into(),
        changed: None,
    })
}

pub(super) fn nvlink5(
    [
        code,
        unit,
        before_r575,
        from_r575,
        status,
        action,
        meaning,
        note,
        confidence,
        source,
    ]: [&'static str; 10],
) -> Result<Nvlink5, String> {
    let action = action_of(action)?;
    let bits = |text| Bits::parse(text).ok_or_else(|| format!("'{text}' is not a bit pattern"));
    let status = match status {
        "-" => Vec::new(),
        list => list
            .split('/')
            .map(|word| {
                hex(word).ok_or_else(|| format!("status '{word}' is not a hexadecimal word"))
            })
            .collect::<Result<_, _>>()?,
    };
    Ok(Nvlink5 {
        code: number(code)?,
        unit: unit.into(),
        before_r575: bits(before_r575)?,
        from_r575: bits(from_r575)?,
        status,
        fatal: action != RecommendedAction::None,
        action,
        meaning: meaning.into(),
        note: note.into(),
        confidence: Confidence::parse(confidence)?,
        source: source.into(),
        changed: None,
    })
}

pub(super) fn nic(
    [
        name,
        driver,
        pattern,
        default,
        fatal,
        action,
        meaning,
        note,
        confidence,
        source,
    ]: [&'static str; 10],
) -> Result<Nic, String> {
    let (enabled, strategy) = match default {
        "on" => (true, ProcessingStrategy::ExecuteRemediation),
        "store-only" => (true, ProcessingStrategy::StoreOnly),
        "off" => (false, ProcessingStrategy::ExecuteRemediation),
        _ => {
            return Err(format!(
                "default '{default}' is neither on, store-only nor off"
            ));
        }
    };
    Ok(Nic {
        name: name.into(),
        driver: match driver {
            "mlx5_core" => NicDriver::Mlx5,
            "efa" => NicDriver::Efa,
            _ => return Err(format!("driver '{driver}' is unknown")),
        },
        pattern: Pattern::parse(pattern),
        enabled,
        strategy,
        fatal: truth(fatal)?,
        action: action_of(action)?,
        meaning: meaning.into(),
        note: note.into(),
        confidence: Confidence::parse(confidence)?,
        source: source.into(),
        changed: None,
    })
}

/// Parses a word such as `0x0000001f`.
pub(crate) fn hex(word: &str) -> Option<u32> {
    let digits = word
        .strip_prefix("0x")
        .or_else(|| word.strip_prefix("0X"))?;
    u32::from_str_radix(digits, 16).ok()
}

pub(crate) fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "code is not a number".to_owned())
}

fn truth(text: &str) -> Result<bool, String> {
    text.parse()
        .map_err(|_| "fatal is neither true nor false".to_owned())
}

pub(super) fn action_of(text: &str) -> Result<RecommendedAction, String> {
    parse_action(text)
        .and_then(|number| RecommendedAction::try_from(number).ok())
        .ok_or_else(|| format!("action '{text}' is not a RecommendedAction"))
}

// === impl Confidence ===

impl Confidence {
    /// Returns the word in data files and output: `high`, `medium` or `low`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Medium => "medium",
            Self::Low => "low",
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "high" => Ok(Self::High),
            "medium" => Ok(Self::Medium),
            "low" => Ok(Self::Low),
            _ => Err(format!("confidence '{text}' is unknown")),
        }
    }
}

// === impl SxidClass ===

impl SxidClass {
    /// Returns the word in data files and output.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NonFatal => "non-fatal",
            Self::PotentiallyFatal => "potentially fatal",
            Self::AlwaysFatal => "always fatal",
        }
    }
}

// === impl Changed ===

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.by)?;
        if self.reason.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", self.reason)
    }
}
