//! The key `redfish` of the janitor's file.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The place of a node's name in an address.
const NODE: &str = "{node}";

/// `RedfishConfig` says how the BMCs of nodes are reached. It is used where an address is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RedfishConfig {
    /// The address of the BMC of each node, with `{node}` in the place of its name.
    pub address: String,
    /// The addresses of nodes for which that does not hold, by their names.
    pub addresses: BTreeMap<String, String>,
    /// The path of the machine; empty: the only one that the BMC has.
    pub system: String,
    /// The file of the user's name, read for each signal.
    pub username_path: String,
    /// The file of the password, read for each signal.
    pub password_path: String,
    /// The file of the authorities that certificates are checked against.
    #[serde(rename = "caPath")]
    pub authority: String,
    /// True if certificates are not checked: whoever answers at the address gets the password.
    pub insecure_skip_verify: bool,
}

// === impl RedfishConfig ===

impl RedfishConfig {
    /// Returns whether BMCs are reached at all.
    pub fn is_used(&self) -> bool {
        !self.address.is_empty() || !self.addresses.is_empty()
    }

    /// Adds all that is wrong with it.
    pub fn check(&self, wrong: &mut Vec<String>) {
        if !self.is_used() {
            if *self != Self::default() {
                wrong.push("redfish.address is missing: the address of the BMCs".to_owned());
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
                wrong.push(format!(
                    "{key} is {address:?}; https://HOST, https://HOST:PORT or the same with http belongs here"
                ));
            }
        }
        if !self.address.is_empty() && !self.address.contains(NODE) {
            wrong.push(format!(
                "redfish.address is {:?}, the same for each node; it needs {NODE} in the place of the name",
                self.address
            ));
        }
        if checked && self.authority.is_empty() && !self.insecure_skip_verify {
            wrong.push(
                "redfish.caPath is missing: name the file of the authorities that the certificates of BMCs \
                 are checked against, or set insecureSkipVerify"
                    .to_owned(),
            );
        }
        if self.username_path.is_empty() != self.password_path.is_empty() {
            wrong.push("redfish.usernamePath and passwordPath belong together".to_owned());
        }
        if !self.system.is_empty() && !is_path(&self.system) {
            wrong.push(format!(
                "redfish.system is {:?}; a path such as /redfish/v1/Systems/1 belongs here",
                self.system
            ));
        }
    }

    /// Returns the address of a node's BMC; `None`: none is known.
    pub fn address_of(&self, node: &str) -> Option<String> {
        match self.addresses.get(node) {
            Some(own) => Some(own.clone()),
            None => (!self.address.is_empty()).then(|| self.address.replace(NODE, node)),
        }
    }
}

/// Returns whether this is a path at a BMC, perhaps with a query, and nothing that names another host: a BMC
/// says itself where its machine is, and who speaks for the BMC may say anything.
pub fn is_path(text: &str) -> bool {
    let printed = |one: u8| one.is_ascii_graphic() && one != b'\\';
    text.starts_with('/') && !text.starts_with("//") && text.bytes().all(printed)
}

/// Returns whether this is a scheme, a host and perhaps a port, and nothing else.
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
