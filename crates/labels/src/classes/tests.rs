use super::*;

/// A file as NVSentinel's chart writes it, with an override and its example for NICs.
const REFERENCE: &str = r#"
enabled = true

[[classes]]
name = "gpu"
enabled = true
groupingLabels = ["node.kubernetes.io/instance-type", "nvidia.com/gpu.product"]
currentExpression = """
int(node.metadata.labels['nvidia.com/gpu.count'])
"""

  [classes.labels]
  current = "nvsentinel.dgxc.nvidia.com/gpu.count.current"
  expected = "nvsentinel.dgxc.nvidia.com/gpu.count.expected"

  [[classes.expectedCountOverrides]]
  count = 8

    [classes.expectedCountOverrides.matchLabels]
    "nvidia.com/gpu.product" = "NVIDIA-GB200"

[[classes]]
name = "nic"
enabled = false
groupingLabels = []
expectedCountOverrides = []
resourceSliceDriver = "dra.networking.k8s.aws"
currentExpression = "sum(resourceSlices.map(rs, rs.spec.devices.size()))"

  [classes.labels]
  current = "nvsentinel.dgxc.nvidia.com/nic.count.current"
  expected = "nvsentinel.dgxc.nvidia.com/nic.count.expected"
"#;

#[test]
fn the_file_of_the_reference_loads_unchanged() {
    let classes = parse(REFERENCE, "counts.toml").unwrap();
    let [gpu] = classes.as_slice() else {
        panic!("{classes:?}");
    };
    assert_eq!(gpu.name, "gpu");
    let labels = |product: &str| -> BTreeMap<String, String> {
        let product = ("nvidia.com/gpu.product".to_owned(), product.to_owned());
        [product].into()
    };
    assert_eq!(gpu.override_of(&labels("NVIDIA-GB200")), Some(8));
    assert_eq!(gpu.override_of(&labels("H100")), None);
    assert_eq!(
        gpu.group(&labels("H100")),
        "node.kubernetes.io/instance-type=|nvidia.com/gpu.product=H100"
    );
    let off = REFERENCE.replacen("enabled = true", "enabled = false", 1);
    assert_eq!(parse(&off, "counts.toml").unwrap().len(), 0);
    let both = REFERENCE.replace("enabled = false", "enabled = true");
    let classes = parse(&both, "counts.toml").unwrap();
    assert_eq!(classes.len(), 2);
    assert_eq!(classes[1].group(&labels("H100")), "default");
    assert_eq!(classes[1].driver.as_deref(), Some("dra.networking.k8s.aws"));
}

#[test]
fn the_classes_of_the_chart_are_built_in() {
    let classes = built_in().unwrap();
    let names: Vec<&str> = classes.iter().map(|class| class.name.as_str()).collect();
    assert_eq!(names, ["gpu", "gpu-dra", "nic"]);
    let reads: Vec<bool> = (classes.iter().map(|one| one.expression.reads_slices)).collect();
    assert_eq!(reads, [false, true, false]);
}

#[test]
fn mistakes_are_named_with_their_lines() {
    let cases: &[(&str, &str, &str)] = &[
        ("name = \"gpu\"\n", "", ":4: classes[0].name is missing"),
        (
            "enabled = true\ngrouping",
            "grouping",
            ":4: classes[0].enabled is missing; write true or false",
        ),
        (
            "\"nic\"",
            "\"gpu\"",
            ":23: classes[1].name is \"gpu\"; another class",
        ),
        (
            "gpu.count.current",
            "gpu count",
            ":13: classes[0].labels.current: ",
        ),
        (
            "gpu.count.expected",
            "gpu.count.current",
            ":14: classes[0].labels.expected is \"nvsentinel",
        ),
        (
            "nvidia.com/gpu.count.expected",
            "nvidia.com/kata.enabled",
            "kata.enabled…; this label has another meaning",
        ),
        (
            "count = 8",
            "count = -8",
            ":17: classes[0].expectedCountOverrides[0].count is -8",
        ),
        (
            "  count = 8\n",
            "",
            "expectedCountOverrides[0].count is missing",
        ),
        (
            "NVIDIA-GB200",
            "GB 200",
            "expectedCountOverrides[0].matchLabels: \"GB 200\"",
        ),
        (
            "node.metadata",
            "nod.metadata",
            ":8: classes[0].currentExpression: unknown variable",
        ),
        (
            "currentExpression = \"sum(resourceSlices.map(rs, rs.spec.devices.size()))\"",
            "currentExpression = \"1\"",
            ":27: classes[1].resourceSliceDriver is \"dra.networking.k8s.aws\"; \
             currentExpression does not read resourceSlices",
        ),
        (
            "groupingLabels = []",
            "groupLabels = []",
            ":25: unknown key",
        ),
        (
            "\"node.kubernetes.io/instance-type\"",
            "\"a b\"",
            "classes[0].groupingLabels[0]",
        ),
    ];
    let mut wrong = Vec::new();
    for (from, to, expected) in cases {
        assert!(REFERENCE.contains(from), "{from}");
        let error = parse(&REFERENCE.replacen(from, to, 1), "counts.toml").unwrap_err();
        if !error.to_string().contains(expected) {
            wrong.push(format!("{from} -> {to}: {error}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_example_of_the_page_loads() {
    let page = include_str!("../../../../docs/labeler.md");
    let example = page
        .split("```toml")
        .nth(1)
        .and_then(|text| text.split("```").next());
    let classes = parse(example.unwrap(), "docs/labeler.md").unwrap();
    assert_eq!(classes[0].overrides[0].count, 8);
}
