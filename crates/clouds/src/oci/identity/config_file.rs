//! The configuration file of OCI's tools: lines `key=value` in profiles.
//!
//! Form: <https://docs.oracle.com/en-us/iaas/Content/API/Concepts/sdkconfig.htm>.

use std::collections::BTreeMap;

use crate::http::Failure;

/// Profile whose values hold for all others.
const DEFAULT: &str = "DEFAULT";

/// A profile with the API key of a user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Profile {
    /// OCID of the user.
    pub(super) user: String,
    /// OCID of the tenancy.
    pub(super) tenancy: String,
    /// Fingerprint of the public key.
    pub(super) fingerprint: String,
    /// Path of the private key, which may begin with `~/`.
    pub(super) key_file: String,
    /// Region; empty if there is none.
    pub(super) region: String,
}

// === impl Profile ===

impl Profile {
    /// Parses the profile of this name. `place` names the file in failures.
    pub(super) fn parse(text: &str, name: &str, place: &str) -> Result<Self, Failure> {
        let mut sections: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
        let mut section = DEFAULT;
        for line in text.lines().map(str::trim) {
            let title = line
                .strip_prefix('[')
                .and_then(|line| line.strip_suffix(']'));
            if let Some(title) = title {
                section = title.trim();
                sections.entry(section).or_default();
            } else if !line.starts_with(['#', ';']) {
                let pair = line.split_once('=');
                let pair = pair.map(|(key, value)| (key.trim(), value.trim()));
                sections.entry(section).or_default().extend(pair);
            }
        }
        let wrong = |what: String| Failure::new(format!("{place}: profile {name:?} {what}"));
        let own = sections
            .get(name)
            .ok_or_else(|| wrong("is missing".to_owned()))?;
        let shared = sections.get(DEFAULT);
        let get = |key: &str| {
            let value = own.get(key).or_else(|| shared?.get(key));
            value.copied().unwrap_or_default().to_owned()
        };
        let required = |key: &str| {
            let value = Some(get(key)).filter(|value| !value.is_empty());
            value.ok_or_else(|| wrong(format!("has no {key}")))
        };
        Ok(Self {
            user: required("user")?,
            tenancy: required("tenancy")?,
            fingerprint: required("fingerprint")?,
            key_file: required("key_file")?,
            region: get("region"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
# A comment = not a key
[DEFAULT]
user = ocid1.user.oc1..u
fingerprint=20:3b:97
tenancy=ocid1.tenancy.oc1..t
region=us-ashburn-1
key_file=~/.oci/key.pem

[ OTHER ]
; another comment
region = eu-frankfurt-1
a line without a value
key_file=/k=1.pem
";

    #[test]
    fn a_profile_has_its_own_values_before_those_of_the_default() {
        let default = Profile::parse(FILE, "DEFAULT", "f").unwrap();
        assert_eq!(default.user, "ocid1.user.oc1..u");
        assert_eq!(default.key_file, "~/.oci/key.pem");
        let other = Profile::parse(FILE, "OTHER", "f").unwrap();
        assert_eq!(
            other,
            Profile {
                region: "eu-frankfurt-1".to_owned(),
                key_file: "/k=1.pem".to_owned(),
                ..default
            }
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        let parse = |text: &str, name: &str| Profile::parse(text, name, "/f").unwrap_err().what;
        assert_eq!(parse(FILE, "THIRD"), "/f: profile \"THIRD\" is missing");
        let cut = FILE.replace("tenancy=", "#");
        assert_eq!(parse(&cut, "OTHER"), "/f: profile \"OTHER\" has no tenancy");
        let empty = FILE.replace("20:3b:97", "");
        assert_eq!(
            parse(&empty, "DEFAULT"),
            "/f: profile \"DEFAULT\" has no fingerprint"
        );
        assert_eq!(parse("", "DEFAULT"), "/f: profile \"DEFAULT\" is missing");
    }
}
