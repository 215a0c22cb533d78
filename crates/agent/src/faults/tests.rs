//! Tests of the state after a controller's responses.

use contract::node::OpenFault;

use super::*;

fn told() -> ListFaultsResponse {
    ListFaultsResponse {
        store_id: "s".to_owned(),
        faults: vec![OpenFault::default()],
    }
}

/// Evaluates responses, each at a time in seconds after the start.
fn judge(answers: &[(u64, Result<(), Code>)]) -> Vec<Option<NodeFaults>> {
    let start = Instant::now();
    let mut heard = Heard::new(start);
    let judged = answers.iter().map(|(seconds, answer)| {
        let answer = answer.map(|()| told());
        let answer = answer.map_err(|code| Status::new(code, "not now"));
        heard.judge(answer, start + Duration::from_secs(*seconds))
    });
    judged.collect()
}

fn unseen(why: &str) -> NodeFaults {
    let why = format!("The controller has not answered for 120 s: {why}");
    NodeFaults::Unseen { why }
}

#[test]
fn a_controller_that_is_away_for_long_makes_unknown_what_it_has_said() {
    let away = Err(Code::Unavailable);
    let judged = judge(&[
        (0, Ok(())),
        (119, away),
        (120, away),
        (130, Ok(())),
        (249, away),
    ]);
    let told = || Some(NodeFaults::Told(told()));
    assert_eq!(
        judged,
        [
            told(),
            None,
            Some(unseen("Unavailable: not now")),
            told(),
            None
        ]
    );
    // A controller that never responded.
    let judged = judge(&[(0, away), (119, Err(Code::PermissionDenied)), (121, away)]);
    assert_eq!(judged, [None, None, Some(unseen("Unavailable: not now"))]);
}

#[test]
fn a_controller_that_does_not_know_the_question_says_nothing_and_takes_nothing_over() {
    let older = Err(Code::Unimplemented);
    assert_eq!(judge(&[(0, older), (500, older)]), [None, None]);
    let judged = judge(&[(0, Ok(())), (60, older), (120, older)]);
    let expected = Some(unseen(
        "the other end does not support the request; is it older?",
    ));
    assert_eq!(judged, [Some(NodeFaults::Told(told())), None, expected]);
}
