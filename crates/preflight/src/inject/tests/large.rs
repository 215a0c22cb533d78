//! Pods of the largest size that an API server accepts, with each list filled in turn.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::*;

/// Returns a pod of a gang with `length` relevant elements in each list.
fn large(length: usize) -> Value {
    let mut pod = in_gang(pod(8));
    let each = |one: fn(usize) -> Value| (0..length).map(one).collect::<Vec<_>>();
    let mut volumes = each(|at| json!({"name": format!("nccl-{at}"), "emptyDir": {}}));
    // Names that our volumes would get: each is taken and has to be skipped.
    volumes.extend(each(|at| {
        let name = match at {
            0 => "dshm".to_owned(),
            _ => format!("dshm-{}", at + 1),
        };
        json!({"name": name, "emptyDir": {}})
    }));
    pod["spec"]["volumes"] = volumes.into();
    pod["spec"]["resourceClaims"] =
        each(|at| json!({"name": format!("c{at}"), "resourceClaimName": "c"})).into();
    pod["spec"]["imagePullSecrets"] = each(|at| json!({"name": format!("s{at}")})).into();
    pod["spec"]["initContainers"] = each(|at| json!({"name": format!("i{at}")})).into();
    let main = &mut pod["spec"]["containers"][0];
    // Every variable but the first refers to the first.
    main["env"] = each(|at| {
        let value = if at == 0 { "1" } else { "$(NCCL_0)" };
        json!({"name": format!("NCCL_{at}"), "value": value})
    })
    .into();
    main["volumeMounts"] =
        each(|at| json!({"name": format!("nccl-{at}"), "mountPath": format!("/m/{at}")})).into();
    main["resources"]["claims"] = each(|at| json!({"name": format!("c{at}")})).into();
    pod
}

/// Returns the CPU time of injecting into a pod, as the best of several runs.
fn work(pod: &Value, config: &Config) -> Duration {
    let cluster = ClusterClaims {
        claims: [("c".to_owned(), claim_of_gpus())].into(),
        ..ClusterClaims::default()
    };
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::try_from(now).expect("a time")
    };
    let once = || {
        let began = now();
        let devices = DevicesOfPod::of(pod, config, &cluster).expect("GPUs");
        let gang = Gang::of(pod, "training", &config.discovery).expect("a gang");
        let candidate = Candidate {
            pod,
            devices: &devices,
            gang: gang.as_ref(),
            forbidden_by: None,
            rendezvous: None,
        };
        let injection = inject(candidate, config).expect("no refusal");
        assert_eq!(injection.checks.len(), 3);
        now().saturating_sub(began)
    };
    (0..3).map(|_| once()).min().expect("a time")
}

fn claim_of_gpus() -> Value {
    let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}});
    json!({"devices": {"requests": [request]}})
}

/// The pod grows eightfold, so a linear search per element would take 64 times as long. The bound
/// of 24 leaves room for a busy machine.
#[test]
fn the_work_for_a_pod_grows_as_the_pod_does() {
    let config = config(OURS);
    let (small, large) = (large(500), large(4000));
    let (little, much) = (work(&small, &config), work(&large, &config));
    assert!(much < little * 24, "{little:?} and {much:?}");
}

#[test]
fn what_is_taken_over_is_bounded_and_what_is_left_out_is_said() {
    let config = config(OURS);
    let injection = tried(&large(4000), &config).expect("no refusal");
    let said: Vec<&String> = injection
        .warnings
        .iter()
        .filter(|warning| warning.contains("leave out"))
        .collect();
    // Each warning appears once for all checks.
    let [variables, mounts] = said[..] else {
        panic!("{:?}", injection.warnings);
    };
    assert!(
        variables
            .contains("take over 256 of the pod's variables and leave out 3744, such as NCCL_256:"),
        "{variables}"
    );
    assert!(
        mounts.contains(
            "take over 64 of the pod's volume mounts and leave out 3936, such as nccl-64:"
        ),
        "{mounts}"
    );
    let after = patched(&large(4000), injection);
    for check in &field::list(&after, "/spec/initContainers")[4000..] {
        let named = |(name, _): &(String, _)| name.starts_with("NCCL_");
        assert_eq!(variables_of(check, named), 256);
        let mounts = field::list(check, "/volumeMounts");
        let theirs = mounts
            .iter()
            .filter(|one| field::name(one).starts_with("nccl-"));
        assert_eq!(theirs.count(), 64);
    }
    // A few long variables also exceed the limit.
    let mut pod = pod(1);
    let long = |at: u32| json!({"name": format!("NCCL_{at}"), "value": "x".repeat(30 * 1024)});
    pod["spec"]["containers"][0]["env"] = (0..4).map(long).collect();
    let injection = tried(&pod, &config).expect("no refusal");
    assert!(
        injection.warnings[0].contains("take over 2 of"),
        "{:?}",
        injection.warnings
    );
    assert!(Value::from(injection.patch).to_string().len() < 80 * 1024);
}

fn variables_of(check: &Value, is: impl Fn(&(String, Option<String>)) -> bool) -> usize {
    variables(check).iter().filter(|one| is(one)).count()
}
