//! The fault catalogue: what a code means and what is done about it.
//!
//! The rows are data (`data/xid.tsv`), compiled in; `data/README.md` says where each
//! fact comes from. A code without a row is still an event: its action is unknown.

use std::collections::HashMap;
use std::sync::LazyLock;

use contract::{RecommendedAction, parse_action};

/// What is known of one XID code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// The code.
    pub code: u32,
    /// The publisher's name of it.
    pub mnemonic: &'static str,
    /// What happened, for people.
    pub meaning: &'static str,
    /// Whether work on the GPU must stop.
    pub fatal: bool,
    /// What mends it.
    pub action: RecommendedAction,
    /// Where the cause lies: `application`, `gpu`, `nvlink`, `memory`, `firmware`, `node`
    /// or `unused`.
    pub scope: &'static str,
    /// What else to know; may be empty.
    pub note: &'static str,
    /// Where the facts come from.
    pub source: &'static str,
}

/// What the catalogue says of a code: its row, or that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether work on the GPU must stop.
    pub fatal: bool,
    /// What mends it.
    pub action: RecommendedAction,
    /// What happened, for people.
    pub meaning: &'static str,
}

/// A row of the data file is malformed. Never seen outside a build whose tests fail.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("xid.tsv line {line}: {what}")]
pub struct RowError {
    /// Line number, the header being 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

const TABLE: &str = include_str!("../data/xid.tsv");

static XIDS: LazyLock<HashMap<u32, Xid>> = LazyLock::new(|| {
    parse(TABLE)
        .filter_map(Result::ok)
        .map(|row| (row.code, row))
        .collect()
});

/// The row of an XID code.
pub fn xid(code: u32) -> Option<&'static Xid> {
    XIDS.get(&code)
}

/// All XID rows, by code.
pub fn xids() -> Vec<&'static Xid> {
    let mut rows: Vec<_> = XIDS.values().collect();
    rows.sort_by_key(|row| row.code);
    rows
}

/// What to make of an XID line: the row's verdict, except that XID 154 says itself, in
/// its text, what is needed. A code without a row is shown and kept, with action
/// unknown, and stops nothing: what we do not know is not thereby broken.
pub fn judge_xid(code: u32, detail: &str) -> Verdict {
    let Some(row) = xid(code) else {
        return Verdict {
            fatal: false,
            action: RecommendedAction::Unknown,
            meaning: "Code without a row in the catalogue",
        };
    };
    let action = if code == 154 {
        recovery_action(detail)
    } else {
        row.action
    };
    let fatal = if code == 154 {
        action != RecommendedAction::None
    } else {
        row.fatal
    };
    Verdict {
        fatal,
        action,
        meaning: row.meaning,
    }
}

/// The recovery action that an XID 154 line names in its last parentheses, as in
/// `changed from 0x0 (None) to 0x1 (GPU Reset Required)`.
fn recovery_action(detail: &str) -> RecommendedAction {
    let named = detail
        .rsplit_once('(')
        .and_then(|(_, rest)| rest.split_once(')'))
        .map_or("", |(inside, _)| inside.trim());
    let has = |part: &str| named.to_ascii_lowercase().contains(part);
    if has("gpu reset required") || has("drain and reset") {
        RecommendedAction::ComponentReset
    } else if has("node reboot required") {
        RecommendedAction::RestartBm
    } else if has("none") {
        RecommendedAction::None
    } else {
        RecommendedAction::ContactSupport
    }
}

fn parse(table: &'static str) -> impl Iterator<Item = Result<Xid, RowError>> {
    (1..)
        .zip(table.lines())
        .skip(1)
        .filter(|(_, text)| !text.trim().is_empty())
        .map(|(line, text)| {
            let fail = |what: &str| RowError {
                line,
                what: what.to_owned(),
            };
            let fields: Vec<&'static str> = text.split('\t').collect();
            let [code, mnemonic, meaning, fatal, action, scope, note, source] = fields.as_slice()
            else {
                return Err(fail(&format!("{} columns, 8 expected", fields.len())));
            };
            Ok(Xid {
                code: code.parse().map_err(|_| fail("code is no number"))?,
                mnemonic,
                meaning,
                fatal: fatal
                    .parse()
                    .map_err(|_| fail("fatal is neither true nor false"))?,
                action: parse_action(action)
                    .and_then(|number| RecommendedAction::try_from(number).ok())
                    .ok_or_else(|| fail("action is no RecommendedAction"))?,
                scope,
                note,
                source,
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_data_file_is_read() {
        let rows: Vec<_> = parse(TABLE).collect::<Result<_, _>>().unwrap();
        assert_eq!(rows.len(), 172);
        assert_eq!(xids().len(), 172, "a code stands twice");
        for row in rows {
            assert!(
                !row.mnemonic.is_empty() && !row.meaning.is_empty(),
                "{row:?}"
            );
            assert!(!row.source.is_empty(), "{row:?}");
            assert!(
                !row.fatal || row.action != RecommendedAction::None,
                "fatal without an action: {row:?}"
            );
        }
    }

    #[test]
    fn actions_are_those_that_users_rely_on() {
        use RecommendedAction::{ComponentReset, ContactSupport, None, RestartBm, RestartVm};
        for (code, fatal, action) in [
            (13, false, None),
            (31, false, None),
            (43, false, None),
            (45, false, None),
            (48, true, ComponentReset),
            (63, false, None),
            (64, true, ComponentReset),
            (74, true, ContactSupport),
            (79, true, RestartBm),
            (94, false, None),
            (95, true, ComponentReset),
            (109, true, ComponentReset),
            (119, true, ComponentReset),
            (151, true, RestartVm),
            (162, false, None),
        ] {
            let verdict = judge_xid(code, "");
            assert_eq!(
                (verdict.fatal, verdict.action),
                (fatal, action),
                "XID {code}"
            );
        }
    }

    #[test]
    fn xid_154_is_judged_by_its_text() {
        use RecommendedAction::{ComponentReset, ContactSupport, None, RestartBm};
        for (text, fatal, action) in [
            (
                "changed from 0x0 (None) to 0x1 (GPU Reset Required)",
                true,
                ComponentReset,
            ),
            (
                "changed from 0x0 (None) to 0x4 (Drain and Reset)",
                true,
                ComponentReset,
            ),
            (
                "changed from 0x0 (None) to 0x2 (Node Reboot Required)",
                true,
                RestartBm,
            ),
            (
                "changed from 0x1 (GPU Reset Required) to 0x0 (None)",
                false,
                None,
            ),
            (
                "changed from 0x0 (None) to 0x9 (Sing a Song)",
                true,
                ContactSupport,
            ),
            ("no parentheses at all", true, ContactSupport),
            (")(", true, ContactSupport),
        ] {
            let verdict = judge_xid(154, text);
            assert_eq!((verdict.fatal, verdict.action), (fatal, action), "{text}");
        }
    }

    #[test]
    fn a_code_without_a_row_is_kept_and_stops_nothing() {
        let verdict = judge_xid(999, "");
        assert_eq!(
            (verdict.fatal, verdict.action),
            (false, RecommendedAction::Unknown)
        );
    }

    #[test]
    fn a_malformed_row_is_named() {
        let header = "h\n";
        for (row, what) in [
            ("1\tA\tm\ttrue\tNONE\tgpu\t", "columns"),
            ("x\tA\tm\ttrue\tNONE\tgpu\t\ts", "code"),
            ("1\tA\tm\tyes\tNONE\tgpu\t\ts", "fatal"),
            ("1\tA\tm\ttrue\tREBOOT\tgpu\t\ts", "action"),
        ] {
            let table: &'static str = Box::leak(format!("{header}{row}").into_boxed_str());
            let error = parse(table).next().unwrap().unwrap_err();
            assert!(error.line == 2 && error.what.contains(what), "{error}");
        }
    }
}
