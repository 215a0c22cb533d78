//! Tests of the state after a controller's responses.

use contract::node::OpenFault;

use super::*;

fn faults() -> ListFaultsResponse {
    ListFaultsResponse {
        store_id: "s".to_owned(),
        faults: vec![OpenFault::default()],
    }
}

/// Evaluates responses, each at a time in seconds after the start.
fn evaluate(answers: &[(u64, Result<(), Code>)]) -> Vec<Option<NodeFaults>> {
    let start = Instant::now();
    let mut responses = Responses::new(start);
    let states = answers.iter().map(|(seconds, answer)| {
        let answer = answer.map(|()| faults());
        let answer = answer.map_err(|code| Status::new(code, "not now"));
        responses.evaluate(answer, start + Duration::from_secs(*seconds))
    });
    states.collect()
}

fn unseen(why: &str) -> NodeFaults {
    let why = format!("The controller has not answered for 120 s: {why}");
    NodeFaults::Unseen { why }
}

#[test]
fn a_controller_that_is_away_for_long_makes_unknown_what_it_has_said() {
    let away = Err(Code::Unavailable);
    let states = evaluate(&[
        (0, Ok(())),
        (119, away),
        (120, away),
        (130, Ok(())),
        (249, away),
    ]);
    let known = || Some(NodeFaults::Told(faults()));
    assert_eq!(
        states,
        [
            known(),
            None,
            Some(unseen("Unavailable: not now")),
            known(),
            None
        ]
    );
    // A controller that never responded.
    let states = evaluate(&[(0, away), (119, Err(Code::PermissionDenied)), (121, away)]);
    assert_eq!(states, [None, None, Some(unseen("Unavailable: not now"))]);
}

#[test]
fn a_controller_that_does_not_know_the_question_says_nothing_and_takes_nothing_over() {
    let older = Err(Code::Unimplemented);
    assert_eq!(evaluate(&[(0, older), (500, older)]), [None, None]);
    let states = evaluate(&[(0, Ok(())), (60, older), (120, older)]);
    let expected = Some(unseen(
        "the other end does not support the request; is it older?",
    ));
    assert_eq!(states, [Some(NodeFaults::Told(faults())), None, expected]);
}
