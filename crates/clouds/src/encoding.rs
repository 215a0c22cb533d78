//! Encodings of texts in requests, for all clouds whose APIs take forms and queries.

/// Returns a text with all bytes but RFC 3986's unreserved ones percent-encoded, as forms and
/// queries take it.
pub(crate) fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Returns keys and values as a form, or as the query of a URL.
pub(crate) fn form(pairs: &[(&str, &str)]) -> String {
    let pair = |(key, value): &(&str, &str)| format!("{key}={}", percent_encoded(value));
    pairs.iter().map(pair).collect::<Vec<_>>().join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unreserved_bytes_stay() {
        assert_eq!(percent_encoded("aZ9-._~"), "aZ9-._~");
        assert_eq!(percent_encoded("a b/ü+&="), "a%20b%2F%C3%BC%2B%26%3D");
        assert_eq!(form(&[("a", "1&2"), ("b", "")]), "a=1%262&b=");
        assert_eq!(form(&[]), "");
    }
}
