use super::*;
use crate::http::Http;
use crate::loopback::{Asked, Reply, Server};
use crate::rsa::tests::{TestKey, has_signed};

/// Checks a signature as a server does it: by the request that arrived. Returns the id
/// of the key and the names of the signed headers; `None` if the signature is not that of `public`.
pub(in crate::oci) fn signed_by(asked: &Asked, public: &[u8]) -> Option<(String, Vec<String>)> {
    let fields = asked.header("authorization").strip_prefix("Signature ")?;
    let field = |name: &str| {
        let (_, rest) = fields.split_once(&format!("{name}=\""))?;
        Some(rest.split_once('"')?.0)
    };
    if (field("version")?, field("algorithm")?) != ("1", "rsa-sha256") {
        return None;
    }
    let headers: Vec<String> = field("headers")?.split(' ').map(str::to_owned).collect();
    let line = |name: &String| {
        let value = if name == "(request-target)" {
            format!("{} {}", asked.method.as_str().to_lowercase(), asked.target)
        } else {
            asked.header(name).to_owned()
        };
        format!("{name}: {value}")
    };
    let message: Vec<String> = headers.iter().map(line).collect();
    if let Some(hash) = asked.headers.get("x-content-sha256") {
        let own = BASE64_STANDARD.encode(digest(&SHA256, &asked.body));
        if own.as_bytes() != hash.as_bytes() {
            return None;
        }
    }
    let signature = BASE64_STANDARD.decode(field("signature")?).ok()?;
    let is_own = has_signed(public, message.join("\n").as_bytes(), &signature);
    is_own.then(|| (field("keyId").unwrap().to_owned(), headers))
}

#[tokio::test]
async fn a_server_verifies_the_signature_of_what_arrives() {
    let server = Server::start(|_| Reply::new(200, "")).await;
    let public = TestKey::get().public();
    let key = RsaKey::from_pem(&TestKey::get().pem(), "k").unwrap();
    let http = Http::new().unwrap();
    let now = "2026-03-01T00:00:00Z".parse().unwrap();
    let get = Request {
        method: Method::GET,
        url: format!(
            "{}/20160918/x?compartmentId=ocid1.compartment&page=a%2Fb",
            server.url
        ),
        headers: vec![("accept".to_owned(), "application/json".to_owned())],
        body: Vec::new(),
    };
    let post = Request {
        method: Method::POST,
        url: format!("{}/v1/x509", server.url),
        headers: Vec::new(),
        body: b"{\"a\": 1}".to_vec(),
    };
    for (mut request, covers, names) in [
        (get, Covers::Host, "date (request-target) host"),
        (
            post.clone(),
            Covers::Host,
            "date (request-target) host content-length content-type x-content-sha256",
        ),
        (
            post,
            Covers::NoHost,
            "date (request-target) content-length content-type x-content-sha256",
        ),
    ] {
        sign(&mut request, &key, "t/u/f", covers, now).unwrap();
        http.ask(request).await.unwrap();
        let mut asked = server.asked().pop().unwrap();
        let names = names.split(' ').map(str::to_owned).collect();
        assert_eq!(signed_by(&asked, public), Some(("t/u/f".to_owned(), names)));
        assert_eq!(asked.header("date"), "Sun, 01 Mar 2026 00:00:00 GMT");
        asked.target.push('x');
        assert_eq!(signed_by(&asked, public), None, "another target");
    }
    let mut asked = server.asked().pop().unwrap();
    asked.body.push(b' ');
    assert_eq!(signed_by(&asked, public), None, "another body");
}
