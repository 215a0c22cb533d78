//! Tests with requests that arrive slowly.

use futures::{FutureExt as _, StreamExt as _, stream};
use http_body_util::{BodyStream, StreamBody};

use super::*;

/// Returns a call with the head of a message, whose text never arrives.
fn begun(length: usize) -> http::Request<Body> {
    let head = [&[0][..], &u32::try_from(length).unwrap().to_be_bytes()].concat();
    let begin = BodyStream::new(Full::new(Bytes::from(head)));
    http::Request::post("/datamodels.PlatformConnector/HealthEventOccurredV1")
        .header("content-type", "application/grpc")
        .body(Body::new(StreamBody::new(begin.chain(stream::pending()))))
        .unwrap()
}

#[tokio::test]
async fn what_has_not_come_yet_counts_and_no_user_takes_the_room_of_others() {
    let user = |number: u32| {
        Caller::Local(runtime::unix_grpc::UnixPeer {
            uid: u32::MAX - number,
            gid: 0,
            pid: None,
            is_operator: false,
        })
    };
    let sink = Scripted::default();
    let connector = Connector::new(sink, AcceptNodes::Any, &Metrics::default(), Timestamp::now);
    let mut service = service(connector, |extensions| extensions.get::<Caller>().cloned());
    // Starts a call whose message arrives only in part, and returns whether it was admitted.
    let mut begin = |caller: Caller, length| {
        let mut request = begun(length);
        request.extensions_mut().insert(caller);
        let mut call = service.call(request);
        match (&mut call).now_or_never() {
            None => Ok(call),
            Some(answer) => Err(Code::from_bytes(
                answer.unwrap().headers()["grpc-status"].as_bytes(),
            )),
        }
    };
    // Limit of bytes.
    let mut waiting = Vec::new();
    for number in 1..=8 {
        while let Ok(call) = begin(user(number), MAX_REQUEST_BYTES) {
            waiting.push(call);
        }
    }
    assert_eq!(
        waiting.len(),
        8,
        "users have half of it, one of them an eighth"
    );
    for _ in 0..8 {
        waiting.push(begin(Caller::Monitor, MAX_REQUEST_BYTES).unwrap());
    }
    let refused = begin(Caller::Monitor, 1).err();
    assert_eq!(refused, Some(Code::ResourceExhausted));
    waiting.clear();
    // Limit of requests.
    while let Ok(call) = begin(user(1), 1) {
        waiting.push(call);
    }
    assert_eq!(waiting.len(), MAX_IN_FLIGHT / 8);
    waiting.push(begin(Caller::Monitor, 1).unwrap());
}
