//! The key `redfish` of the janitor's file.

use std::collections::BTreeMap;

use contract::findings::Findings;
use serde::Deserialize;

/// Placeholder of the node's name in an address.
const NODE: &str = "{node}";

/// Settings for the BMCs of nodes, used if an address is configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RedfishConfig {
    /// Address of each node's BMC, with `{node}` as the placeholder of its name.
    pub address: String,
    /// Addresses of nodes that differ from the pattern, by node name.
    pub addresses: BTreeMap<String, String>,
    /// Path of the machine. Empty for the only one that the BMC has.
    pub system: String,
    /// File of the user name, read for each signal.
    pub username_path: String,
    /// File of the password, read for each signal.
    pub password_path: String,
    /// File of the certificate authorities.
    #[serde(rename = "caPath")]
    pub authority: String,
    /// True to skip the verification of certificates. The password is then sent to any server
    /// at the address.
    pub insecure_skip_verify: bool,
}

// === impl RedfishConfig ===

impl RedfishConfig {
    /// Returns whether BMCs are configured.
    pub fn is_used(&self) -> bool {
        !self.address.is_empty() || !self.addresses.is_empty()
    }

    /// Records everything that is wrong with these settings.
    pub(in crate::janitor) fn check(&self, findings: &mut Findings<'_>) {
        if !self.is_used() {
            if *self != Self::default() {
                findings.at_key("redfish.address", "it is missing: the address of the BMCs");
            }
            return;
        }
        let own = self.addresses.iter();
        let own = own.map(|(node, address)| (format!("redfish.addresses.{node}"), address));
        let pattern =
            (!self.address.is_empty()).then(|| ("redfish.address".to_owned(), &self.address));
        let mut checked = false;
        for (key, address) in pattern.into_iter().chain(own) {
            checked |= address.starts_with("https://");
            if !is_address(&address.replace(NODE, "node")) {
                let wanted = "write https://HOST, https://HOST:PORT or the same with http";
                findings.refuse(&key, wanted);
            }
        }
        if !self.address.is_empty() && !self.address.contains(NODE) {
            let wanted =
                format!("that is the same for each node; write {NODE} in the place of the name");
            findings.refuse("redfish.address", wanted);
        }
        if checked && self.authority.is_empty() && !self.insecure_skip_verify {
            let what = "it is missing: name the file of the authorities that the certificates of \
                        BMCs are checked against, or set insecureSkipVerify";
            findings.at_key("redfish.caPath", what);
        }
        if self.username_path.is_empty() != self.password_path.is_empty() {
            findings.at_key("redfish", "usernamePath and passwordPath belong together");
        }
        if !self.system.is_empty() && !is_path(&self.system) {
            findings.refuse(
                "redfish.system",
                "write a path such as /redfish/v1/Systems/1",
            );
        }
    }

    /// Returns the address of a node's BMC. `None` if it is not configured.
    pub fn address_of(&self, node: &str) -> Option<String> {
        match self.addresses.get(node) {
            Some(own) => Some(own.clone()),
            None => (!self.address.is_empty()).then(|| self.address.replace(NODE, node)),
        }
    }
}

/// Returns whether the text is a path at a BMC, possibly with a query, that cannot name another
/// host. Paths come from the BMC, or from somebody who impersonates it.
pub fn is_path(text: &str) -> bool {
    let printed = |one: u8| one.is_ascii_graphic() && one != b'\\';
    text.starts_with('/') && !text.starts_with("//") && text.bytes().all(printed)
}

/// Returns whether the text is exactly a scheme, a host and optionally a port.
fn is_address(text: &str) -> bool {
    let rest = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    let rest = rest.map(|rest| rest.strip_suffix('/').unwrap_or(rest));
    rest.is_some_and(|host| {
        let good = |one: char| one.is_ascii_alphanumeric() || ".-:[]".contains(one);
        !host.is_empty() && host.chars().all(good)
    })
}
