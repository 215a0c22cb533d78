//! AWS: scheduled changes of AWS Health, and the scheduled events of EC2.
//!
//! ```text
//! Aws::poll -> health.rs, instance_status.rs -> client.rs -> credentials.rs, sign.rs -> http.rs
//! ```
//!
//! AWS Health announces more, and earlier, and needs a paid support plan; EC2's events need none. One maintenance
//! may be told by both; its node returns once both have ended it.

mod credentials;
mod sign;
mod xml;

/// Returns parameters as a form.
fn form<K: AsRef<str>>(parts: &[(K, &str)]) -> String {
    let parts = parts.iter();
    let parts = parts.map(|(key, value)| format!("{}={}", escaped(key.as_ref()), escaped(value)));
    parts.collect::<Vec<_>>().join("&")
}

/// Escapes all bytes but those that RFC 3986 reserves for no purpose.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}
