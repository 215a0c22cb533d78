//! Keys of NVSentinel that have no use here.

use super::*;

#[test]
fn keys_of_the_reference_that_have_no_use_here_are_known_and_said() {
    let text = format!(
        "{}[rule-sets.label]\nkey = 'a'\nvalue = 'b'\n[[skip-node-labels]]\nkey = 'a'\nvalue = 'b'\n",
        any("Node", "true")
    );
    let policy = Policy::parse(&text, "p.toml").unwrap();
    assert_eq!(policy.warnings.len(), 2, "{:?}", policy.warnings);
    let [label, skipped] = [&policy.warnings[0], &policy.warnings[1]];
    assert!(
        label.starts_with("p.toml:9: 'rule-sets[0].label': NVSentinel's label"),
        "{label}"
    );
    assert!(
        skipped.starts_with("p.toml:12: 'skip-node-labels': NVSentinel's list"),
        "{skipped}"
    );
}
