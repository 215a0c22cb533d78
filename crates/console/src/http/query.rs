//! Query parameters: each is allowed once, and errors name the parameter.

use axum::extract::Query;
use axum::http::Uri;
use model::position::Position;

use super::error::Refusal;

/// Largest position: stores keep positions as signed numbers.
const MAX_POSITION: u64 = i64::MAX.unsigned_abs();

/// Query parameters of a request.
pub(super) struct Parameters {
    given: Vec<(String, String)>,
    known: &'static [&'static str],
}

// === impl Parameters ===

impl Parameters {
    /// Parses the parameters of `uri`. Only those in `known` are allowed, each once.
    pub(super) fn read(uri: &Uri, known: &'static [&'static str]) -> Result<Self, Refusal> {
        let Query(given) = Query::<Vec<(String, String)>>::try_from_uri(uri).map_err(|error| {
            Refusal::bad_request(
                error.to_string(),
                "Write parameters as ?name=value&name=value.",
            )
        })?;
        for (index, (name, value)) in given.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                return Err(Refusal::bad_request(
                    format!("parameter {name:?} (value {value:?}) is unknown"),
                    format!("The parameters are {}.", known.join(", ")),
                ));
            }
            if given.iter().take(index).any(|(other, _)| other == name) {
                return Err(Refusal::bad_request(
                    format!("parameter {name:?} is given twice, the second time as {value:?}"),
                    "Give it once.",
                ));
            }
        }
        Ok(Self { given, known })
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        debug_assert!(self.known.contains(&name));
        self.given
            .iter()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// Returns a name that is not empty and has at most `max` bytes.
    pub(super) fn name(&self, name: &str, max: usize) -> Result<Option<&str>, Refusal> {
        match self.text(name) {
            Some(value) if value.is_empty() || value.len() > max => Err(Refusal::bad_request(
                format!("parameter {name:?} has {} bytes: {value:?}", value.len()),
                format!("It has to have 1 to {max} bytes; leave it out to ask for all."),
            )),
            value => Ok(value),
        }
    }

    /// Returns a whole number from `min` to `max`.
    pub(super) fn number(&self, name: &str, min: u64, max: u64) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(Refusal::bad_request(
                format!("parameter {name:?} is {value:?}"),
                format!("It has to be a whole number from {min} to {max}."),
            )),
        }
    }

    /// Returns a position in the feed.
    pub(super) fn position(&self, name: &str) -> Result<Option<Position>, Refusal> {
        Ok(self.number(name, 0, MAX_POSITION)?.map(Position::from))
    }

    /// Returns `true` or `false`; false if the parameter is missing.
    pub(super) fn flag(&self, name: &str) -> Result<bool, Refusal> {
        match self.text(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(value) => Err(Refusal::bad_request(
                format!("parameter {name:?} is {value:?}"),
                "It has to be true or false.",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["node", "limit", "follow"];

    fn read(query: &str) -> Result<Parameters, Refusal> {
        Parameters::read(&format!("/x?{query}").parse().unwrap(), KNOWN)
    }

    #[test]
    fn good_values_are_read() {
        let parameters = read("node=a%20b%2Fc&limit=7&follow=true").unwrap();
        assert_eq!(parameters.name("node", 10).unwrap(), Some("a b/c"));
        assert_eq!(parameters.number("limit", 1, 10).unwrap(), Some(7));
        assert!(parameters.flag("follow").unwrap());
        let none = read("").unwrap();
        assert_eq!(none.number("limit", 1, 10).unwrap(), None);
        assert!(!none.flag("follow").unwrap());
    }

    #[test]
    fn bad_values_are_named() {
        let all = |query: &str| {
            let parameters = read(query)?;
            parameters.name("node", 10)?;
            parameters.number("limit", 1, 10)?;
            parameters.flag("follow").map(|_| ())
        };
        for (query, named) in [
            ("colour=red", "\"colour\" (value \"red\")"),
            (
                "limit=3&limit=4",
                "\"limit\" is given twice, the second time as \"4\"",
            ),
            ("limit=", "\"limit\" is \"\""),
            ("limit=0", "\"limit\" is \"0\""),
            ("limit=11", "\"limit\" is \"11\""),
            ("limit=-1", "\"limit\" is \"-1\""),
            (
                "limit=99999999999999999999",
                "\"limit\" is \"99999999999999999999\"",
            ),
            ("follow=yes", "\"follow\" is \"yes\""),
            ("node=", "\"node\" has 0 bytes"),
            ("node=12345678901", "\"node\" has 11 bytes"),
        ] {
            let refusal = all(query).unwrap_err();
            assert_eq!(refusal.status, 400);
            assert!(refusal.error.contains(named), "{query}: {}", refusal.error);
            assert!(!refusal.hint.is_empty());
        }
    }
}
