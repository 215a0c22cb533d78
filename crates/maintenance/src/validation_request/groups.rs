//! Grouping of tests that run together on nodes.

use sha2::{Digest as _, Sha256};

use super::config::{TestRules, ValidationConfiguration};
use super::status::{Phase, Skipped, TestGroup};

/// Longest name of an object that becomes part of a pod's name, in bytes.
const LONGEST_NAME: usize = 63;
/// Longest name for the tests of a group, in bytes. The numbers of the group and the attempt
/// follow.
const LONGEST_TESTS: usize = 34;
/// Most groups of a request: the status has to fit into an object.
pub(super) const MOST_GROUPS: usize = 2_000;
/// Length of the hash in a shortened name.
const HASH: usize = 8;

/// Returns the groups for configured tests on nodes. A group with too few nodes has failed from
/// the start.
pub(super) fn form(
    tests: &[String],
    nodes: &[String],
    config: &ValidationConfiguration,
    skipped: &mut Skipped,
) -> Vec<TestGroup> {
    let mut batches: Vec<(&str, bool, Vec<String>)> = Vec::new();
    for name in tests {
        let Some((test, provider)) = config.test(name) else {
            continue;
        };
        let joins = provider.supports_test_batching;
        let with = batches.iter_mut().find(|(provider, together, _)| {
            joins && *provider == test.provider && *together == test.supports_batching_nodes
        });
        if let Some((.., others)) = with {
            others.push(name.clone());
        } else {
            let together = test.supports_batching_nodes;
            batches.push((&test.provider, together, vec![name.clone()]));
        }
    }
    let mut groups = Vec::new();
    for (provider, together, tests) in batches {
        let batches: Vec<&[String]> = if together {
            vec![nodes]
        } else {
            nodes.chunks(1).collect()
        };
        for (at, nodes) in batches.into_iter().enumerate() {
            let mut group = TestGroup {
                name: format!("{}-group-{}", of_tests(&tests), at + 1),
                provider: provider.to_owned(),
                phase: Phase::Pending,
                nodes: nodes.to_vec(),
                tests: tests.clone(),
                attempts: Vec::new(),
            };
            group.phase = enough(&mut group, config, skipped);
            if !group.tests.is_empty() {
                groups.push(group);
            }
        }
    }
    groups
}

/// Removes nodes that no longer exist from a group, and returns its new phase.
pub(super) fn without(
    group: &mut TestGroup,
    gone: &[String],
    config: &ValidationConfiguration,
    skipped: &mut Skipped,
) -> Phase {
    group.nodes.retain(|node| !gone.contains(node));
    for node in gone {
        skipped.node(node);
    }
    enough(group, config, skipped)
}

/// Removes optional tests that have too few nodes. Returns the phase of the group: a mandatory
/// test with too few nodes fails it, unless no node is left.
fn enough(group: &mut TestGroup, config: &ValidationConfiguration, skipped: &mut Skipped) -> Phase {
    let nodes = group.nodes.len();
    if nodes == 0 {
        return Phase::Succeeded;
    }
    let lacks = |test: &TestRules| nodes < test.minimum_nodes_per_batch.max(1);
    let mut phase = Phase::Pending;
    group.tests.retain(|name| {
        let Some((test, _)) = config.test(name).filter(|(test, _)| lacks(test)) else {
            return true;
        };
        if !test.may_be_skipped() {
            phase = Phase::Failed;
            return true;
        }
        skipped.test(name);
        false
    });
    if group.tests.is_empty() {
        Phase::Succeeded
    } else {
        phase
    }
}

/// Returns the first part of a group's name.
fn of_tests(tests: &[String]) -> String {
    let mut sorted: Vec<&str> = tests.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    shortened(&sorted.join("-"), LONGEST_TESTS)
}

/// Returns the name of an attempt's object. Attempts are numbered from 1. Requests whose names
/// have the same beginning get different objects.
pub(super) fn object_name(request: &str, group: &str, attempt: usize) -> String {
    let end = format!("-{group}-{attempt}");
    let room = LONGEST_NAME.saturating_sub(end.len());
    format!("{}{end}", shortened(request, room))
}

/// Shortens a name to `room` bytes. A hash replaces the rest.
fn shortened(name: &str, room: usize) -> String {
    if name.len() <= room {
        return name.to_owned();
    }
    let hash = format!("{:x}", Sha256::digest(name));
    let hash: String = hash.chars().take(HASH).collect();
    let kept = room.saturating_sub(HASH + 1);
    let kept: String = name.chars().take(kept).collect();
    format!("{}-{hash}", kept.trim_end_matches(['-', '.']))
}
