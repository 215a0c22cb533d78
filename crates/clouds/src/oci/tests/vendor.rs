//! Oracle's own client reads the fake with the configuration file of ours, and signs our requests itself.

use std::collections::BTreeSet;

use serde_json::Value;
use testkit::Component;

use super::*;
use crate::rsa::RsaKey;
use crate::witness::Witness;

/// Returns the fields of a signature, in no order.
fn fields(authorization: &str) -> BTreeSet<&str> {
    let fields = authorization.strip_prefix("Signature ").unwrap();
    fields.split(',').collect()
}

fn header<'a>(request: &'a Request, name: &str) -> &'a str {
    let mut headers = request.headers.iter();
    &headers.find(|(known, _)| known == name).unwrap().1
}

/// Returns requests with our signature, and whether it covers the host.
fn signed() -> [(Request, bool); 3] {
    let key = RsaKey::from_pem(&TestKey::get().pem(), "k").unwrap();
    [
        (Method::GET, Covers::Host, "20160918/x?a=b%2Fc&page=1", ""),
        (Method::POST, Covers::Host, "20160918/x", "{\"a\": 1}"),
        (Method::POST, Covers::NoHost, "v1/x509", "{\"a\": 1}"),
    ]
    .map(|(method, covers, target, body)| {
        let mut request = Request {
            method,
            url: format!("https://iaas.us-phoenix-1.oraclecloud.com/{target}"),
            headers: Vec::new(),
            body: body.as_bytes().to_vec(),
        };
        sign(&mut request, &key, &KEY.join("/"), covers, now()).unwrap();
        (request, covers == Covers::Host)
    })
}

/// Returns methods, paths and arguments of requests.
fn targets(asked: &[Asked]) -> Vec<(&Method, &str, BTreeSet<&str>)> {
    let targets = asked.iter().map(|one| {
        let (path, query) = one.target.split_once('?').unwrap();
        (&one.method, path, query.split('&').collect())
    });
    targets.collect()
}

#[tokio::test]
async fn oracles_own_client_reads_the_same_and_signs_the_same() {
    let Some(python) = testkit::require(Component::PythonGrpc) else {
        return;
    };
    let (server, mut oci, dir) = oci(|asked| match asked.target.split_once("page=") {
        None => page(&[("a", "SCHEDULED"), ("b", "STARTED")]).with("opc-next-page", "t/2"),
        Some(_) => page(&[("c", "CANCELED"), ("d", "SUCCEEDED")]),
    })
    .await;
    let told = poll(&mut oci).await.unwrap();
    let ours = server.asked();
    let signed = signed();
    let requests = signed.each_ref().map(|(request, host)| {
        json!({
            "method": request.method.as_str(), "url": request.url, "host": host,
            "date": header(request, "date"), "body": String::from_utf8_lossy(&request.body),
        })
    });
    let compartment = &oci.config.compartment_id;
    let asked = json!({"url": server.url, "compartment": compartment, "requests": requests});
    let file = dir.path().join("config").display().to_string();
    let variables = [("OCI_CONFIG_FILE", file.as_str()), ("OCI_CLI_PROFILE", "P")];
    let oracle = Witness::start(&python, "oracle_client.py", &variables, &asked).await;

    let theirs = oracle.said["signed"].as_array().unwrap();
    for ((request, _), theirs) in signed.iter().zip(theirs) {
        let ours = header(request, "authorization");
        assert_eq!(fields(ours), fields(theirs.as_str().unwrap()));
    }
    let theirs = server.asked().split_off(ours.len());
    assert_eq!((ours.len(), targets(&theirs)), (2, targets(&ours)));
    let shown = told.announced.iter().map(|one| {
        let notice = &one.notice;
        json!([notice.event, notice.resource.1, notice.word, notice.start])
    });
    let shown: Vec<Value> = shown.collect();
    assert_eq!(
        (shown.len(), json!(shown)),
        (4, oracle.said["events"].clone())
    );
}
