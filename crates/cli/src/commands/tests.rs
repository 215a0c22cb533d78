mod snapshots;

use super::*;

#[test]
fn who_asks_has_a_name_also_without_one() {
    let of = |set: &'static str| person_of(move |name| (name == set).then(|| "ann".to_owned()));
    for set in ["SUDO_USER", "USER", "LOGNAME"] {
        assert_eq!(of(set), "ann");
    }
    assert!(of("OTHER").starts_with("uid "), "{}", of("OTHER"));
}
