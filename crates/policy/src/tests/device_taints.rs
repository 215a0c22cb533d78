//! The table `[device-taints]`, and `taint-devices` of a rule set.

use model::device::{Dimension, TaintEffect};

use crate::Policy;

#[test]
fn what_is_not_named_has_its_default_and_no_table_means_none() {
    assert_eq!(Policy::builtin().device_taints, None);
    let policy = Policy::parse("[device-taints]\nxid = \"NoSchedule\"", "p").unwrap();
    let taints = policy.device_taints.unwrap();
    let effects = Dimension::ALL.map(|dimension| taints.effect(dimension));
    let (none, keeps_off) = (TaintEffect::None, TaintEffect::NoSchedule);
    assert_eq!(effects, [keeps_off, keeps_off, none, none, none, none]);
}

#[test]
fn what_is_wrong_is_said_with_what_to_do() {
    for (text, expected) in [
        (
            "[device-taints]\nmemory = \"NoExecute\"",
            "p:2: device-taints.memory is \"NoExecute\"; that would delete pods past their disruption \
             budgets, which is only for a GPU that is gone (gpu-lost); write \"NoSchedule\"",
        ),
        (
            "[device-taints]\nxid = \"NoShedule\"",
            "p:2: device-taints.xid is \"NoShedule\"; did you mean 'NoSchedule'?",
        ),
        ("[device-taints]\nxids = \"None\"", "xids"),
        (
            "[[rule-sets]]\nname = \"a\"\ntaint-devices = 1",
            "taint-devices needs the table [device-taints], which says how devices are tainted",
        ),
        (
            "[device-taints]\n[[rule-sets]]\nname = \"a\"\ntaint-devices = 0",
            "taint-devices = 0 taints none; leave it out, or write 1",
        ),
    ] {
        let error = Policy::parse(text, "p").unwrap_err();
        let message = error.to_string();
        assert!(message.contains(expected), "{message}");
    }
}
