//! Rules that read only labels and annotations are given only these.

use model::node::NodeView;

use super::*;

#[test]
fn what_is_left_out_of_a_node_no_rule_misses() {
    let full = json!({
        "metadata": {"name": "n", "labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {"unschedulable": true},
        "status": {"conditions": []},
    });
    let bare = json!({"metadata": {"name": "n"}, "spec": {}, "status": {}});
    let table = [
        // Expression, and whether it reads more.
        (r#"node.metadata.labels["a"] == "b""#, false),
        (r#""a" in node.metadata.labels"#, false),
        (r"has(node.metadata.labels.a)", false),
        (
            r#"node.metadata.labels.exists(key, key == "a") && "c" in node.metadata.annotations"#,
            false,
        ),
        (r"has(node.metadata.labels)", true),
        (r#""labels" in node.metadata"#, true),
        (r#"node.metadata.name == "n""#, true),
        (
            r#""a" in node.metadata.labels && node.spec.unschedulable"#,
            true,
        ),
        (r#"[node].exists(one, "a" in one.metadata.labels)"#, true),
    ];
    for (expression, whole) in table {
        let policy = Policy::parse(&any("Node", expression), "p.toml").unwrap();
        let set = &policy.rule_sets[0];
        assert_eq!(set.reads_whole_node(), whole, "{expression}");
        for object in [&full, &bare] {
            let view = NodeView::from_object(object.clone()).unwrap();
            let answer = |object| set.answer(&variable(&fatal()), &NodeVariable::new(object));
            let (all, part) = (
                answer(&view.object()),
                answer(&view.labels_and_annotations()),
            );
            assert!(whole || all == part, "{expression}: {all:?}, {part:?}");
        }
    }
}
