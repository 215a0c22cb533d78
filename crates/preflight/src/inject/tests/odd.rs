//! Pods with unusual shapes.

use super::*;

proptest::proptest! {
    /// Any pod is either refused with a reason, or its patch applies and adds the checks.
    #[test]
    fn no_pod_is_too_odd(places in proptest::array::uniform5(any_json(4))) {
        let config = config(OURS);
        let mut odd = self::pod(2);
        let [init_containers, volumes, env, mounts, secrets] = places;
        odd["spec"]["initContainers"] = init_containers;
        odd["spec"]["volumes"] = volumes;
        odd["spec"]["containers"][0]["env"] = env;
        odd["spec"]["containers"][0]["volumeMounts"] = mounts;
        odd["spec"]["imagePullSecrets"] = secrets;
        match tried(&odd, &config) {
            Ok(injection) => {
                let patched = patched(&odd, injection);
                let names = names(&patched, "initContainers");
                for check in ["preflight-dcgm-diag", "preflight-nccl-loopback"] {
                    proptest::prop_assert!(names.iter().any(|name| name == check), "{patched}");
                }
                // The user's own elements are kept.
                for list in ["initContainers", "volumes"] {
                    let before = field::list(&odd, &format!("/spec/{list}")).iter();
                    let after = field::list(&patched, &format!("/spec/{list}"));
                    let mut lost = before.filter(|one| !after.contains(one));
                    proptest::prop_assert_eq!(lost.next(), None);
                }
                proptest::prop_assert_eq!(&patched["spec"]["containers"], &odd["spec"]["containers"]);
            }
            Err(refusal) => proptest::prop_assert!(!refusal.to_string().is_empty()),
        }
    }
}

fn any_json(depth: u32) -> impl proptest::strategy::Strategy<Value = Value> {
    use proptest::prelude::*;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[a-z-]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(depth, 24, 4, |inner| {
        let key = prop_oneof![
            Just("name"),
            Just("value"),
            Just("mountPath"),
            Just("image")
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..4).prop_map(|map| map
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect()),
        ]
    })
}
