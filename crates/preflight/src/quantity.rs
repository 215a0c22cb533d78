//! Kubernetes quantities, such as `100m`, `500Mi` or `1e3`.

use serde_json::Value;

/// Suffixes of a quantity, and their factors in thousandths.
const SUFFIXES: [(&str, i128); 13] = [
    ("Ki", 1000 << 10),
    ("Mi", 1000 << 20),
    ("Gi", 1000 << 30),
    ("Ti", 1000 << 40),
    ("Pi", 1000 << 50),
    ("Ei", 1000 << 60),
    ("m", 1),
    ("k", 1_000_000),
    ("M", 1_000_000_000),
    ("G", 1_000_000_000_000),
    ("T", 1_000_000_000_000_000),
    ("P", 1_000_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000_000),
];

/// Longest quantity in bytes. Kubernetes itself writes at most 20.
const MAX_BYTES: usize = 40;
/// Largest exponent, positive or negative. Kubernetes itself ends at 10^18.
const MAX_EXPONENT: u32 = 24;

/// Parses a quantity to thousandths of its unit, rounded up; `None` if the text is not a
/// quantity.
pub fn millis(text: &str) -> Option<i128> {
    if text.len() > MAX_BYTES {
        return None;
    }
    let suffix = SUFFIXES.iter().find_map(|(suffix, factor)| {
        let number = text.strip_suffix(suffix)?;
        Some((number, *factor))
    });
    let (number, factor) = suffix.unwrap_or((text, 1000));
    let (number, exponent) = match number.split_once(['e', 'E']) {
        // `1e3`. A quantity has either a suffix or an exponent.
        Some((number, exponent)) if suffix.is_none() => (number, exponent.parse::<i32>().ok()?),
        Some(_) => return None,
        None => (number, 0),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{part}");
    let exponent = exponent.checked_sub(i32::try_from(part.len()).ok()?)?;
    // `unsigned_abs`, because `i32::MIN` has no positive counterpart.
    if digits.is_empty() || exponent.unsigned_abs() > MAX_EXPONENT {
        return None;
    }
    let value = digits.parse::<i128>().ok()?.checked_mul(factor)?;
    let power = 10_i128.checked_pow(exponent.unsigned_abs())?;
    if exponent >= 0 {
        value.checked_mul(power)
    } else {
        Some(value.div_euclid(power) + i128::from(value.rem_euclid(power) > 0))
    }
}

/// Amount in thousandths, and its original text.
pub(crate) type Amount = (i128, String);

/// Parses a field that is a text or a number; `None` if it is not a quantity.
pub(crate) fn of(value: &Value) -> Option<Amount> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    Some((millis(&text)?, text))
}

/// Formats thousandths as a quantity.
pub fn text(millis: i128) -> String {
    if millis % 1000 == 0 {
        (millis / 1000).to_string()
    } else {
        format!("{millis}m")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_writes_is_read() {
        for (quantity, expected) in [
            ("0", 0),
            ("8", 8_000),
            ("100m", 100),
            ("0.1", 100),
            ("1.5", 1_500),
            (".5", 500),
            ("1Ki", 1_024_000),
            ("500Mi", 524_288_000_000),
            ("1e3", 1_000_000),
            ("1E", 1_000_000_000_000_000_000_000),
            ("2E3", 2_000_000),
            ("0.0001", 1),
            ("-2", -2_000),
        ] {
            assert_eq!(millis(quantity), Some(expected), "{quantity}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_none() {
        for wrong in [
            "",
            "Mi",
            "x",
            "1 Gi",
            "1e",
            "1e9Mi",
            "1e99",
            "1e25",
            "1e-25",
            "1e2147483647",
            "1e-2147483647",
            "1e-2147483648",
            "1.5e-2147483648",
            "1E-2147483648",
            "1e-2147483649",
            "1.2.3",
            "--1",
            &"9".repeat(60),
        ] {
            assert_eq!(millis(wrong), None, "{wrong}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_is_too_odd(text in "[-+]?[0-9]{0,30}[.]?[0-9]{0,30}([eE][-+]?[0-9]{0,12})?[a-zA-Z]{0,2}", any in ".*") {
            millis(&text);
            millis(&any);
        }

        #[test]
        fn no_exponent_is_too_large(exponent: i32, part in "[.]?[0-9]{0,3}") {
            millis(&format!("1{part}e{exponent}"));
        }
    }

    #[test]
    fn a_quantity_is_written_as_it_is_read() {
        for value in [0, 1, 100, 1000, 524_288_000_000] {
            assert_eq!(millis(&text(value)), Some(value));
        }
    }
}
