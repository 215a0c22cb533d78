use super::super::CODES;
use super::*;
use Kind::{Network, Reboot, Replacement};

/// Time of the tests, in seconds since 1970.
const NOW: i64 = 1_800_000_000;
const ACCOUNT: &str = "111122223333";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(NOW + seconds).unwrap()
}

/// Returns an event that begins and was changed at these times, in seconds from now.
#[expect(clippy::cast_precision_loss, reason = "seconds since 1970 are exact")]
fn event(code: &str, status: &str, start: i64, updated: i64) -> Event {
    Event {
        arn: format!("arn:aws:health:eu-west-1::event/EC2/{code}/1"),
        type_code: code.to_owned(),
        status_code: status.to_owned(),
        start_time: Some((NOW + start) as f64),
        end_time: Some((NOW + start + 3600) as f64),
        last_updated_time: Some((NOW + updated) as f64),
    }
}

fn entity(event: &Event, instance: &str) -> Entity {
    Entity {
        arn: format!("{}/{instance}", event.arn),
        event_arn: event.arn.clone(),
        instance: instance.to_owned(),
        aws_account_id: ACCOUNT.to_owned(),
        status_code: "PENDING".to_owned(),
        last_updated_time: None,
    }
}

fn found(all: &[(Event, Entity)]) -> Found {
    Found {
        events: all
            .iter()
            .map(|(event, _)| (event.arn.clone(), event.clone()))
            .collect(),
        entities: all.iter().map(|(_, entity)| entity.clone()).collect(),
        ..Found::default()
    }
}

/// Returns the notices of events about `i-1`.
fn read(events: &[Event]) -> Vec<Notice> {
    let all: Vec<_> = events
        .iter()
        .map(|event| (event.clone(), entity(event, "i-1")))
        .collect();
    let told = told(&found(&all), ACCOUNT, at(0));
    assert!(told.complete && told.odd == 0, "{told:?}");
    told.announced.into_iter().map(|one| one.notice).collect()
}

#[test]
fn a_notice_has_the_entity_the_times_and_the_providers_word() {
    let event = event(CODES[2], "upcoming", 600, -60);
    let told = told(
        &found(&[(event.clone(), entity(&event, "i-1"))]),
        ACCOUNT,
        at(0),
    );
    let expected = Announced {
        instance: Instance::aws("i-1"),
        notice: Notice {
            node: String::new(),
            event: format!("{}/i-1", event.arn),
            provider: "aws".to_owned(),
            resource: ("instance".to_owned(), "i-1".to_owned()),
            kind: Kind::Reboot,
            phase: Phase::Scheduled,
            word: "upcoming".to_owned(),
            start: Some(at(600)),
            end: Some(at(4200)),
            emergency: false,
            updated: Some(at(-60)),
        },
    };
    assert_eq!(told.announced, [expected]);
}

#[test]
fn the_status_and_the_begin_tell_the_progress() {
    for (status, start, phase) in [
        ("upcoming", 600, Phase::Scheduled),
        ("open", -600, Phase::Ongoing),
        // An event is opened early: the node stays in service until its time.
        ("open", 600, Phase::Scheduled),
        ("closed", -600, Phase::Completed),
        ("closed", 600, Phase::Cancelled),
        ("a new word", -600, Phase::Scheduled),
    ] {
        let notices = read(&[event(CODES[0], status, start, 0)]);
        assert_eq!(
            (notices[0].phase, notices[0].word.as_str()),
            (phase, status)
        );
    }
    // The part of one instance may be over before the event is.
    let event = event(CODES[0], "open", -600, 0);
    let mut entity = entity(&event, "i-1");
    RESOLVED.clone_into(&mut entity.status_code);
    entity.last_updated_time = Some(1_800_000_060.0);
    let told = told(&found(&[(event, entity)]), "", at(120));
    let notice = &told.announced[0].notice;
    assert_eq!(
        (notice.phase, notice.word.as_str()),
        (Phase::Completed, RESOLVED)
    );
    assert_eq!(notice.updated, Some(at(60)));
}

#[test]
fn the_description_says_the_effect_before_the_code_does() {
    let of = |number: usize, text: &str| kind(CODES[number], text);
    let kinds: Vec<Kind> = (0..CODES.len()).map(|number| of(number, "")).collect();
    let by_code = [
        Network,
        Reboot,
        Reboot,
        Reboot,
        Reboot,
        Network,
        Reboot,
        Reboot,
        Replacement,
        Reboot,
    ];
    assert_eq!(kinds, by_code);
    for (text, kind) in [
        (
            "What do I need to do?\nYou can stop and start the instance.",
            Reboot,
        ),
        (
            "...\nWHAT DO I NEED TO DO? Reset the GPU component.",
            Reboot,
        ),
        (
            "What do I need to do? Please replace the instance.",
            Replacement,
        ),
        (
            "What do I need to do? Launch a new instance, then reboot it.",
            Replacement,
        ),
        ("What do I need to do? Nothing.", Network),
        ("We reboot it. What do I need to do? Nothing.", Network),
    ] {
        assert_eq!(of(0, text), kind, "{text}");
    }
    assert_eq!(super::kind("AWS_EC2_SOMETHING_NEW", ""), Reboot);
}

#[test]
fn the_end_of_an_ultraservers_maintenance_ends_the_one_that_began() {
    let phases = |events: &[Event]| {
        let notices = read(events).into_iter();
        let found = notices
            .filter(|one| one.event.contains(INITIATED))
            .map(|one| (one.phase, one.updated));
        found.collect::<Vec<_>>()
    };
    let begun = event(INITIATED, "open", -600, -600);
    assert_eq!(
        phases(std::slice::from_ref(&begun)),
        [(Phase::Ongoing, Some(at(-600)))]
    );
    let ended = event(COMPLETED, "open", -60, -30);
    assert_eq!(
        phases(&[begun.clone(), ended]),
        [(Phase::Completed, Some(at(-30)))]
    );
    // That was the end of an earlier one.
    let earlier = event(COMPLETED, "closed", -6000, -30);
    assert_eq!(
        phases(&[begun, earlier]),
        [(Phase::Ongoing, Some(at(-600)))]
    );
}

#[test]
fn instances_of_other_accounts_and_of_no_event_do_not_count() {
    let event = event(CODES[0], "open", -600, 0);
    let mut foreign = entity(&event, "i-2");
    "999999999999".clone_into(&mut foreign.aws_account_id);
    let mut lost = entity(&event, "i-3");
    "arn:other".clone_into(&mut lost.event_arn);
    let mut unnamed = entity(&event, "i-4");
    unnamed.aws_account_id.clear();
    let all = [foreign, lost, unnamed].map(|entity| (event.clone(), entity));
    let instances = |account: &str| {
        let announced = told(&found(&all), account, at(0)).announced;
        let ids = announced.into_iter().map(|one| one.notice.resource.1);
        ids.collect::<Vec<_>>()
    };
    assert_eq!(instances(ACCOUNT), ["i-4"]);
    assert_eq!(instances(""), ["i-2", "i-4"]);
}

#[test]
fn a_time_that_is_none_is_counted_and_makes_the_statement_incomplete() {
    for odd in [f64::MAX, -1e300, 1e18, f64::NAN] {
        for field in 0..3 {
            let mut event = event(CODES[0], "open", -600, 0);
            let times = [
                &mut event.start_time,
                &mut event.end_time,
                &mut event.last_updated_time,
            ];
            *times.into_iter().nth(field).unwrap() = Some(odd);
            let good = super::tests::event(CODES[1], "open", -600, 0);
            let all = [event, good].map(|event| (event.clone(), entity(&event, "i-1")));
            let told = told(&found(&all), ACCOUNT, at(0));
            assert_eq!(
                (told.odd, told.complete, told.announced.len()),
                (1, false, 1)
            );
        }
    }
    // One that is absent is none.
    let mut event = event(CODES[0], "open", -600, 0);
    (event.start_time, event.end_time) = (None, None);
    let notices = read(&[event]);
    assert_eq!((notices[0].start, notices[0].end), (None, None));
}

#[test]
fn an_entity_without_an_instance_is_counted_and_makes_the_statement_incomplete() {
    let event = event(CODES[0], "open", -600, 0);
    let all = ["", "i-1"].map(|instance| (event.clone(), entity(&event, instance)));
    let told = told(&found(&all), ACCOUNT, at(0));
    assert_eq!(
        (told.odd, told.complete, told.announced.len()),
        (1, false, 1)
    );
}
