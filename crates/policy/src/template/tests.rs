use contract::{Entity, HealthEvent};

use super::*;

fn event() -> HealthEvent {
    let entity = |kind: &str, value: &str| Entity {
        entity_type: kind.into(),
        entity_value: value.into(),
    };
    HealthEvent {
        node_name: "n1".into(),
        check_name: "Check".into(),
        message: "it is \"broken\"".into(),
        recommended_action: 24,
        error_code: vec!["79".into(), "119".into()],
        entities_impacted: vec![entity("GPU", "0"), entity("GPU_UUID", "GPU-0")],
        metadata: [("rack".to_owned(), "r1".to_owned())].into(),
        is_fatal: true,
        ..HealthEvent::default()
    }
}

fn render(source: &str) -> Result<String, String> {
    let event = event();
    let template = Template::parse(source).map_err(|error| error.to_string())?;
    let variables = Variables {
        event: &event,
        id: "e1",
        entity: "GPU-0",
        group: "g",
        version: "v1",
        kind: "K",
        namespace: "",
    };
    template
        .render(&variables)
        .map_err(|error| error.to_string())
}

#[test]
fn all_variables_of_nvsentinel_are_there() {
    let table = [
        (
            "{{ .ApiGroup }}/{{ .Version }} {{ .Kind }}{{ .Namespace }}",
            "g/v1 K",
        ),
        (
            "{{ .NodeName }}-{{ .HealthEventID }}{{ .TraceID }}{{ .SpanID }}",
            "n1-e1",
        ),
        (
            "{{ .RecommendedActionName }} {{ .RecommendedAction }}",
            "RESTART_BM RESTART_BM",
        ),
        (
            "{{ .RecommendedAction.String }} {{ .HealthEvent.RecommendedAction.String }}",
            "RESTART_BM RESTART_BM",
        ),
        ("{{ .ImpactedEntityScopeValue }}", "GPU-0"),
        (
            "{{ .HealthEvent.NodeName }} {{ .HealthEvent.GetCheckName }}",
            "n1 Check",
        ),
        (
            "{{ .HealthEvent.Metadata.rack }}{{ with .HealthEvent.Metadata.row }}!{{ end }}",
            "r1",
        ),
    ];
    for (source, text) in table {
        assert_eq!(render(source).as_deref(), Ok(text), "{source}");
    }
}

#[test]
fn the_language_is_gos() {
    let table = [
        ("a{{- /* no */ -}} b", "ab"),
        (
            r#"{{ if eq .RecommendedActionName "RESTART_VM" "RESTART_BM" }}y{{ else }}n{{ end }}"#,
            "y",
        ),
        (
            "{{ range $i, $c := .HealthEvent.ErrorCode }}{{ if $i }},{{ end }}{{ $c }}{{ end }}",
            "79,119",
        ),
        (
            r#"{{ range .HealthEvent.EntitiesImpacted }}{{ if eq .EntityType "GPU_UUID" }}{{ .EntityValue }}{{ end }}{{ end }}"#,
            "GPU-0",
        ),
        (
            "{{ with .HealthEvent }}{{ .NodeName }}{{ $.Kind }}{{ end }}",
            "n1K",
        ),
        (
            "{{ with .HealthEvent.DrainOverrides }}{{ .Force }}{{ else }}none{{ end }}",
            "none",
        ),
        (
            r#"{{ .HealthEvent.Message | printf "%q" }}"#,
            r#""it is \"broken\"""#,
        ),
        (
            r#"{{ printf "%s-%d %v" .Kind (len .HealthEvent.ErrorCode) true }}"#,
            "K-2 true",
        ),
        (
            r#"{{ index .HealthEvent.ErrorCode 1 }} {{ print .Kind "x" 1 2 }}"#,
            "119 Kx1 2",
        ),
        (
            "{{ $m := .HealthEvent.Metadata }}{{ $m.rack }}{{ range $k, $v := $m }} {{ $k }}{{ $v }}{{ end }}",
            "r1 rackr1",
        ),
        ("{{ $x := 1 }}{{ $x = 2 }}{{ $x }}", "2"),
        (
            "{{ if and .HealthEvent.IsFatal (not .HealthEvent.IsHealthy) }}bad{{ end }}",
            "bad",
        ),
    ];
    for (source, text) in table {
        assert_eq!(render(source).as_deref(), Ok(text), "{source}");
    }
}

#[test]
fn what_it_cannot_do_is_refused_when_it_is_read_with_line_and_column() {
    let table = [
        (
            "a\n  {{ .Nodename }}",
            "2:6: there is no field Nodename here; did you mean NodeName?",
        ),
        (
            "{{ .NodeName.First }}",
            "1:4: can't evaluate field First in type string",
        ),
        (
            "{{ range .HealthEvent.EntitiesImpacted }}\n{{ .Type }}{{ end }}",
            "2:4: there is no field Type here",
        ),
        (
            "{{ toYaml .HealthEvent }}",
            "1:4: the function toYaml is not supported; there are and, eq",
        ),
        (
            "{{ html .Kind }}",
            "1:4: the function html is not supported",
        ),
        ("{{ $y }}", "1:4: undefined variable: $y"),
        (
            "{{ if .Kind }}{{ $y := 1 }}{{ end }}\n{{ $y }}",
            "2:4: undefined variable: $y",
        ),
        (
            "{{ if eq .Kind \"x\" }}{{ if true }}\n{{ .Kindd }}{{ end }}{{ end }}",
            "2:4: there is no field Kindd here; did you mean Kind?",
        ),
        (
            "{{ with .HealthEvent }}{{ else }}\n{{ .CheckName }}{{ end }}",
            "2:4: there is no field CheckName here",
        ),
        (
            "{{ range .HealthEvent.ErrorCode }}{{ break }}\n{{ .Code }}{{ end }}",
            "2:4: can't evaluate field Code in type string",
        ),
        (
            "{{ if and false (eq .Knd 1) }}{{ end }}",
            "there is no field Knd here",
        ),
        (
            "{{ range .HealthEvent.IsFatal }}{{ end }}",
            "1:4: cannot range over bool",
        ),
        (
            "{{ define \"x\" }}a{{ end }}b",
            "named templates are not supported",
        ),
        ("{{ template \"x\" }}", "named templates are not supported"),
        (
            "ab {{ if .Kind }}x",
            "1:7: a block that starts here has no end",
        ),
        (
            "{{ .Kind }}{{ end }}rest",
            "1:4: a block that starts here has no end, or there is a surplus end",
        ),
        ("{{ .Kind }}{{ else }}rest", "1:4: a block"),
        ("\n\n{{ .Kind | }}", "3:"),
        (
            "{{ .HealthEvent.GeneratedTimestamp.AsTime }}",
            "1:4: there is no field AsTime here",
        ),
    ];
    for (source, text) in table {
        let error = Template::parse(source).expect_err(source).to_string();
        assert!(error.contains(text), "{source}: {error}");
    }
    let long = "x".repeat(MAX_TEMPLATE_BYTES + 1);
    let error = Template::parse(&long).unwrap_err().to_string();
    assert!(error.starts_with("1:1: it has 65537 bytes"), "{error}");
}

#[test]
fn what_goes_wrong_when_it_is_run_says_where() {
    let table = [
        ("ok\n{{ index .HealthEvent.ErrorCode 7 }}", "2:"),
        ("{{ printf \"%5d\" 1 }}", "1:4: printf: only %s"),
        ("{{ printf \"%d\" .Kind }}", "%d does not fit K"),
        ("{{ printf \"%s\" }}", "%s has no argument"),
        ("{{ printf \"a\" 1 }}", "it has more arguments than verbs"),
        (
            "{{ range .HealthEvent.ErrorCode }}\n{{ .  }}\n{{ printf \"%d\" . }}{{ end }}",
            "3:4: printf: %d does not fit 79",
        ),
    ];
    for (source, text) in table {
        let error = render(source).unwrap_err();
        assert!(error.contains(text), "{source}: {error}");
    }
}

#[test]
fn a_large_template_is_checked_in_bounds() {
    let flat = "{{ .Kind }}".repeat(5_000) + "{{ .Knd }}";
    let error = Template::parse(&flat).unwrap_err().to_string();
    assert!(error.contains("did you mean Kind?"), "{error}");
    let nested = |inner: &str| {
        let (open, end) = ("{{ if .Kind }}".repeat(50), "{{ end }}".repeat(50));
        format!("{open}{inner}{end}")
    };
    assert!(Template::parse(&nested("a")).is_ok());
    let error = Template::parse(&nested("{{ .Knd }}")).unwrap_err();
    assert!(error.what.contains("did you mean Kind?"), "{error}");
}

#[test]
fn what_a_template_makes_and_how_long_it_runs_is_bounded() {
    // Each declaration doubles the text.
    let mut doubling = "{{ $a0 := printf \"0123456789\" }}".to_owned();
    for index in 1..60 {
        let before = index - 1;
        doubling.push_str(&format!(
            "{{{{ $a{index} := print $a{before} $a{before} }}}}"
        ));
    }
    let error = render(&doubling).unwrap_err();
    assert!(error.contains("its functions produce more than"), "{error}");
    let error = render("{{ range 2000 }}a{{ end }}").unwrap_err();
    assert!(
        error.contains("its loops have more than 1000 iterations"),
        "{error}"
    );
    let nested = "{{ range 40 }}{{ range 40 }}a{{ end }}{{ end }}";
    assert!(render(nested).unwrap_err().contains("1000 iterations"));
    let wide = format!("{{{{ range 900 }}}}{}{{{{ end }}}}", "x".repeat(1000));
    let error = render(&wide).unwrap_err();
    assert!(
        error.contains("renders to more than 131072 bytes"),
        "{error}"
    );
}
