use std::time::Duration;

use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn plan(names: &[&str]) -> CertificatePlan {
    CertificatePlan {
        secret: "gpuwarden-webhook-tls",
        authority: "gpuwarden preflight webhook",
        random_key: Some("gang.key"),
        names: names.iter().copied().map(str::to_owned).collect(),
        lifetime: 90 * DAY,
    }
}

fn after(now: Timestamp, days: i64) -> Timestamp {
    now + SignedDuration::from_hours(24 * days)
}

fn count(pem: &str) -> usize {
    pem.matches(END).count()
}

#[test]
fn a_certificate_is_made_anew_in_time_and_keeps_its_authority() {
    let (plan, now) = (plan(&["webhook.gpuwarden.svc"]), Timestamp::now());
    let first = Pair::next(None, &plan, now).expect("a pair");
    assert!(first.is_good(&plan, now));
    assert!(first.is_good(&plan, after(now, 59)));
    // Less than a third of its lifetime is left.
    assert!(!first.is_good(&plan, after(now, 61)));

    let second = Pair::next(Some(&first), &plan, after(now, 61)).expect("a pair");
    assert!(second.is_good(&plan, after(now, 61)));
    assert_eq!(second.authorities, first.authorities);
    assert_eq!(
        second.random_key, first.random_key,
        "gangs keep their secrets"
    );
    assert_ne!(second.certificate, first.certificate);
}

#[test]
fn a_new_authority_is_told_beside_the_one_before() {
    let (plan, now) = (plan(&["webhook"]), Timestamp::now());
    let first = Pair::next(None, &plan, now).expect("a pair");
    // An authority lives for 40 certificates; less than a third of that is left.
    let late = after(now, 2500);
    let second = Pair::next(Some(&first), &plan, late).expect("a pair");
    assert_eq!(count(&second.authorities), 2);
    assert!(second.authorities.ends_with(first.authorities.trim_start()));
    assert!(second.is_good(&plan, late));
    let third = Pair::next(Some(&second), &plan, after(late, 2500)).expect("a pair");
    assert_eq!(count(&third.authorities), 2, "those before go");
}

#[test]
fn replicas_that_are_reached_by_other_names_share_it() {
    let now = Timestamp::now();
    let (one, other) = (plan(&["one.svc"]), plan(&["127.0.0.1"]));
    let first = Pair::next(None, &one, now).expect("a pair");
    assert!(!first.is_good(&other, now));
    let both = Pair::next(Some(&first), &other, now).expect("a pair");
    assert!(both.is_good(&one, now) && both.is_good(&other, now));
}

#[test]
fn what_is_in_the_secret_is_read_again_and_another_secret_is_none() {
    let plan = plan(&["webhook"]);
    let pair = Pair::next(None, &plan, Timestamp::now()).expect("a pair");
    let secret = pair.secret(&plan, "gpuwarden", Some("7"));
    assert_eq!(secret["metadata"]["resourceVersion"], "7");
    assert!(Pair::of(&secret, &plan) == Some(pair.clone()));
    for broken in ["ca.crt", "tls.key"] {
        let mut secret = secret.clone();
        secret["data"][broken] = "%".into();
        assert!(Pair::of(&secret, &plan).is_none(), "{broken}");
    }
    assert_eq!(text(&secret, CERTIFICATE), Some(pair.certificate.clone()));
    let mut older = secret.clone();
    older["data"]["gang.key"] = serde_json::Value::Null;
    let older = Pair::of(&older, &plan).expect("a pair");
    assert!(!older.is_good(&plan, Timestamp::now()));
    let next = Pair::next(Some(&older), &plan, Timestamp::now()).expect("a pair");
    assert_eq!(next.authorities, pair.authorities);
    let mut damaged = pair;
    damaged.certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into();
    assert!(!damaged.is_good(&plan, Timestamp::now()));
}

#[test]
fn without_a_random_key_in_the_plan_the_secret_has_none() {
    let mut plan = plan(&["controller"]);
    (plan.secret, plan.random_key) = ("gpuwarden-controller-tls", None);
    let pair = Pair::next(None, &plan, Timestamp::now()).expect("a pair");
    assert!(pair.is_good(&plan, Timestamp::now()));
    let secret = pair.secret(&plan, "gpuwarden", None);
    let keys: Vec<_> = secret["data"].as_object().expect("data").keys().collect();
    assert_eq!(keys, ["ca.crt", "ca.key", "tls.crt", "tls.key"]);
    assert!(Pair::of(&secret, &plan) == Some(pair));
}
