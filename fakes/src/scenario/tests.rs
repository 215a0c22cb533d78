use super::*;

#[test]
fn a_scenario_survives_being_written_and_read() {
    let mut scenario = Scenario::healthy(2);
    scenario.gpu_mut(1).lost = true;
    scenario.gpu_mut(1).fabric = Some(Fabric::default());
    for behaviour in ["hang", "segfault", "missing", "NVML_ERROR_UNKNOWN", "77"] {
        let behaves = Behaviour::try_from(behaviour.to_owned()).unwrap();
        assert_eq!(String::from(behaves.clone()), behaviour);
        scenario.calls.insert(format!("nvml{behaviour}"), behaves);
    }
    scenario.event.push(FakeEvent {
        gpu: 1,
        xid: Some(79),
        ..FakeEvent::default()
    });
    let text = scenario.to_toml().unwrap();
    assert_eq!(Scenario::from_toml(&text).unwrap(), scenario, "{text}");
}

#[test]
fn the_example_is_a_scenario() {
    let example = include_str!("../../../examples/fake-gpus.toml");
    let scenario = Scenario::from_toml(example).unwrap();
    assert!(scenario.gpu(6).lost);
}

#[test]
fn a_wrong_scenario_is_refused_by_what_is_wrong_in_it() {
    let cases = [
        ("gpus = 2\n[[gpu]]\nindex = 0\ntemprature = 3", "line 4"),
        (
            "gpus = 2\n[calls]\nnvmlInit_v2 = \"explode\"",
            "'explode' is nothing",
        ),
        (
            "gpus = 2\n[[gpu]]\nindex = 2",
            "gpu 2 is listed, but gpus is 2",
        ),
        (
            "[[gpu]]\nindex = 1\n[[gpu]]\nindex = 1",
            "gpu 1 is listed twice",
        ),
        ("gpus = 65", "at most 64"),
        ("[[gpu]]\nlinks = 19", "gpu 0 has 19 links"),
        ("[[gpu]]\nlinks = 2\n[[gpu.link]]\nlink = 2", "lists link 2"),
        ("[[event]]\ngpu = 8\nxid = 79", "an event is about gpu 8"),
        ("[[event]]\ngpu = 0", "either xid or kind"),
        ("[nccl]\nbandwidth_gb_s = -1.0", "nccl.bandwidth_gb_s is -1"),
        (
            "[nccl.slowed_by]\nNCCL_ALGO = -1.0",
            "nccl.slowed_by.NCCL_ALGO is -1",
        ),
        ("[nccl]\nbandwidth_gb_s = nan", "nccl.bandwidth_gb_s is NaN"),
        ("[nccl]\nbandwith = 1.0", "line 2"),
        ("[cuda]\nruntime_version = \"13.0\"", "line 2"),
    ];
    for (text, expected) in cases {
        let error = Scenario::from_toml(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}
