use notices::Kind;

use super::*;

const EVENT: &str = "
  <item><instanceEventId>instance-event-1</instanceEventId><code>CODE</code>
  <description>TEXT</description><notBefore>2026-03-02T19:00:00.000Z</notBefore>
  <notAfter>2026-03-02T21:00:00.000Z</notAfter></item>";

fn read(events: &str) -> Told {
    let xml = format!("<item><instanceId>i-1</instanceId><eventsSet>{events}</eventsSet></item>");
    let mut told = Told {
        complete: true,
        ..Told::default()
    };
    add(&Element::parse(xml.as_bytes()).unwrap(), &mut told);
    told
}

fn event(code: &str, text: &str) -> String {
    EVENT.replace("CODE", code).replace("TEXT", text)
}

#[test]
fn an_event_is_a_notice() {
    let told = read(&event("system-reboot", "scheduled reboot"));
    let expected = Announced {
        instance: Instance::aws("i-1"),
        notice: Notice {
            node: String::new(),
            event: "instance-event-1".to_owned(),
            provider: "aws".to_owned(),
            resource: ("instance".to_owned(), "i-1".to_owned()),
            kind: Kind::Reboot,
            phase: Phase::Scheduled,
            word: "active".to_owned(),
            start: Some("2026-03-02T19:00:00Z".parse().unwrap()),
            end: Some("2026-03-02T21:00:00Z".parse().unwrap()),
            emergency: false,
            updated: None,
        },
    };
    assert_eq!(
        (told.announced.as_slice(), told.complete),
        ([expected].as_slice(), true)
    );
    assert!(read("").announced.is_empty());
}

#[test]
fn code_and_description_tell_effect_and_progress() {
    for (code, text, kind, phase) in [
        ("instance-reboot", "x", Kind::Reboot, Phase::Scheduled),
        (
            "instance-retirement",
            "x",
            Kind::Replacement,
            Phase::Scheduled,
        ),
        ("instance-stop", "x", Kind::Stop, Phase::Scheduled),
        (
            "system-maintenance",
            "power maintenance",
            Kind::Reboot,
            Phase::Scheduled,
        ),
        (
            "system-maintenance",
            "Network maintenance",
            Kind::Network,
            Phase::Scheduled,
        ),
        (
            "system-reboot",
            "[Completed] x",
            Kind::Reboot,
            Phase::Completed,
        ),
        (
            "instance-stop",
            "[Canceled] x",
            Kind::Stop,
            Phase::Cancelled,
        ),
        ("a-new-code", "[Odd] x", Kind::Reboot, Phase::Scheduled),
    ] {
        let told = read(&event(code, text));
        let notice = &told.announced[0].notice;
        assert_eq!((notice.kind, notice.phase), (kind, phase), "{code} {text}");
    }
    assert_eq!(
        read(&event("system-reboot", "[Odd] x")).announced[0]
            .notice
            .word,
        "Odd"
    );
}

#[test]
fn an_event_without_an_id_is_told_apart_by_its_code_and_begin() {
    let without = event("system-reboot", "x").replace("instance-event-1", "");
    let other = without.replace("19:00", "20:00");
    let told = read(&format!("{without}{other}"));
    let ids: Vec<&str> = told
        .announced
        .iter()
        .map(|one| one.notice.event.as_str())
        .collect();
    assert_eq!(
        ids,
        [
            "system-reboot-i-1-2026-03-02T19:00:00Z",
            "system-reboot-i-1-2026-03-02T20:00:00Z"
        ]
    );
}

#[test]
fn nothing_is_known_of_an_instance_with_an_event_that_is_not_understood() {
    let bad = event("system-reboot", "x").replace("2026-03-02T19", "soon");
    let told = read(&format!("{bad}{}", event("instance-stop", "x")));
    assert_eq!(
        (told.odd, told.complete, told.announced.len()),
        (1, true, 0)
    );
    assert_eq!(told.unseen, [Instance::aws("i-1")]);
    let mut told = Told {
        complete: true,
        ..Told::default()
    };
    add(&Element::parse(b"<item/>").unwrap(), &mut told);
    assert_eq!(
        (told.odd, told.complete),
        (1, false),
        "nobody knows which instance it is"
    );
}
