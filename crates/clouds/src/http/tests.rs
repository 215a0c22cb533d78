use super::*;
use crate::loopback::{Reply, Server};

fn get(url: &str) -> Request {
    Request {
        method: Method::GET,
        url: url.to_owned(),
        headers: vec![("x-key".to_owned(), "v".to_owned())],
        body: Vec::new(),
    }
}

#[tokio::test]
async fn a_response_of_any_status_comes_back_and_a_failure_quotes_it() {
    let server = Server::start(|asked| match asked.target.as_str() {
        "/ok?q=1" => Reply::new(200, r#"{"a": 1}"#),
        "/busy" => {
            Reply::new(429, "slow\ndown".to_owned() + &"x".repeat(1000)).with("retry-after", "7")
        }
        _ => Reply::new(302, "").with("location", "/ok?q=1"),
    })
    .await;
    let http = Http::new().unwrap();
    let ok = http
        .ask(get(&format!("{}/ok?q=1", server.url)))
        .await
        .unwrap();
    assert_eq!(ok.json::<serde_json::Value>().unwrap()["a"], 1);
    assert!(
        ok.json::<Vec<u8>>()
            .unwrap_err()
            .what
            .contains("not understood")
    );
    assert_eq!(server.asked()[0].header("x-key"), "v");

    let busy = http
        .ask(get(&format!("{}/busy", server.url)))
        .await
        .unwrap();
    let failure = busy.success().unwrap_err();
    assert_eq!(failure.retry_after, Some(Duration::from_secs(7)));
    assert!(
        failure.what.contains("/busy: status 429: slow down"),
        "{failure}"
    );
    assert!(failure.what.len() < 400, "{failure}");

    let moved = http
        .ask(get(&format!("{}/moved", server.url)))
        .await
        .unwrap();
    assert_eq!(moved.status, 302, "no redirect is followed");
    assert_eq!(server.asked().len(), 3);
}

#[tokio::test]
async fn a_response_that_is_too_large_or_no_server_is_a_failure_that_says_where() {
    let server = Server::start(|_| Reply::new(200, vec![b' '; MAX_BODY + 1])).await;
    let http = Http::new().unwrap();
    let failure = http
        .ask(get(&format!("{}/huge?token=secret", server.url)))
        .await
        .unwrap_err();
    assert!(failure.what.contains("/huge: status 200"), "{failure}");
    assert!(!failure.what.contains("secret"), "{failure}");
    let failure = http.ask(get("not a url")).await.unwrap_err();
    assert!(failure.what.contains("not a URL"), "{failure}");
    // Nobody listens on a port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = format!("http://{}/x", free.local_addr().unwrap());
    drop(free);
    let failure = http.ask(get(&closed)).await.unwrap_err();
    assert!(
        failure.what.contains("/x: ") && failure.what.contains("127.0.0.1"),
        "{failure}"
    );
}

#[test]
fn a_server_asks_for_a_pause_in_seconds_or_by_a_date_and_for_an_hour_at_most() {
    let now: Timestamp = "2026-03-02T19:00:00Z".parse().unwrap();
    let wait = |text: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, text.parse().unwrap());
        retry_after(&headers, now).map(|wait| wait.as_secs())
    };
    assert_eq!(wait("120"), Some(120));
    assert_eq!(wait("Mon, 02 Mar 2026 19:01:45 GMT"), Some(105));
    assert_eq!(wait("99999999999"), Some(3600));
    for odd in ["", "soon", "-1", "Mon, 02 Mar 2026 18:00:00 GMT"] {
        assert_eq!(wait(odd), None, "{odd}");
    }
}
