//! Tests with requests that no gRPC library produces.

use super::*;

/// Returns the answer to a call with one message of these bytes.
async fn answer(message: &[u8], compressed: u8) -> tonic::Status {
    let sink = Scripted::default();
    let connector = Connector::new(sink, AcceptNodes::Any, &Metrics::default(), Timestamp::now);
    let mut service = service(connector, |_| Some(Caller::Monitor));
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[compressed][..], &length, message].concat();
    let request = http::Request::post("/datamodels.PlatformConnector/HealthEventOccurredV1")
        .header("content-type", "application/grpc")
        .body(Body::new(Full::new(Bytes::from(body))))
        .unwrap();
    let answer = service.call(request).await.unwrap();
    tonic::Status::from_header_map(answer.headers()).unwrap()
}

/// INTERNAL would mean that the receiver has failed, and that a retry may succeed.
#[tokio::test]
async fn what_cannot_be_read_is_its_senders_fault() {
    let no_text = [0x12, 4, 0x12, 2, 0xff, 0xfe];
    for (message, compressed) in [
        // A field that is longer than the message.
        (&[0x12, 0x7f][..], 0),
        // A tag without an end.
        (&[0xff; 12][..], 0),
        // The agent's name is not UTF-8.
        (&no_text[..], 0),
        // Compressed without naming the algorithm; and an invalid compression flag.
        (b"x", 1),
        (b"x", 7),
    ] {
        let status = answer(message, compressed).await;
        assert_eq!(
            status.code(),
            Code::InvalidArgument,
            "{message:?}: {status}"
        );
        assert!(!status.message().is_empty());
    }
}

/// `h2` answers headers beyond its limit with 431 or, if a field behind the limit is itself
/// long, by closing the connection.
#[tokio::test]
async fn too_much_metadata_costs_its_call_or_its_connection_and_no_other() {
    let served = Served::new();
    let mut other = served.client().await;
    // In the second case, an oversized field follows the limit.
    for (lengths, connection_stays) in [(&[20_000][..], true), (&[20_000, 32_000], false)] {
        let mut client = served.client().await;
        let mut request = tonic::Request::new(batch(vec![event("0")]));
        for (key, length) in ["a", "b"].into_iter().zip(lengths) {
            let value = "x".repeat(*length).parse().unwrap();
            request.metadata_mut().insert(key, value);
        }
        let status = client.health_event_occurred_v1(request).await.unwrap_err();
        let text = format!("{status:?}");
        assert_eq!(
            text.contains("COMPRESSION_ERROR"),
            !connection_stays,
            "{text}"
        );
        assert_eq!(text.contains("431"), connection_stays, "{text}");
        let again = other.health_event_occurred_v1(batch(vec![event("0")]));
        again.await.unwrap();
    }
}
