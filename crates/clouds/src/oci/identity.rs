//! Identities with which requests to OCI are signed, from the first source that there is:
//!
//! 1. the user's API key in the file that `OCI_CONFIG_FILE` names;
//! 2. workload identity of OKE, if `OCI_RESOURCE_PRINCIPAL_VERSION` is set in a pod;
//! 3. the user's API key in `~/.oci/config`;
//! 4. the instance principal, by the metadata service of the instance.
//!
//! [`config_file`] reads the files, [`principal`] gets the tokens of the other two.

mod config_file;
mod principal;

use std::fmt;
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};

use self::config_file::Profile;
use self::principal::Places;
use crate::http::{Failure, Http};
use crate::rsa::RsaKey;
use crate::{Environment, secret_file};

/// Variable with the path of a configuration file.
const FILE: &str = "OCI_CONFIG_FILE";
/// Variable with the profile in it.
const PROFILE: &str = "OCI_CLI_PROFILE";
/// Variable that is set where a workload has an identity of its own.
const PRINCIPAL: &str = "OCI_RESOURCE_PRINCIPAL_VERSION";
/// Domain of the commercial realm.
const DOMAIN: &str = "oraclecloud.com";
/// Time before its end from which a token is replaced.
const SPARE: SignedDuration = SignedDuration::from_mins(5);

/// A key and its name for OCI. The debug form does not show the name, which may be a token.
pub(super) struct Identity {
    /// The key.
    pub(super) key: RsaKey,
    /// Name of the key: tenancy, user and fingerprint, or a token.
    pub(super) key_id: String,
    /// Region of the credentials; empty if they tell none.
    pub(super) region: String,
    /// Domain of the realm.
    pub(super) domain: String,
    /// Time at which the token ends; `None` for a key of a user.
    end: Option<Timestamp>,
}

/// Source of identities.
#[derive(Debug)]
pub(super) struct Identities {
    http: Http,
    environment: Environment,
    places: Places,
    current: Option<Identity>,
}

// === impl Identities ===

impl Identities {
    /// Creates the source, without reading anything.
    pub(super) fn new(http: Http, environment: Environment) -> Self {
        let places = Places::of(&environment);
        Self {
            http,
            environment,
            places,
            current: None,
        }
    }

    /// Returns the identity that is in use, or a new one if that ends soon.
    pub(super) async fn current(&mut self, now: Timestamp) -> Result<&Identity, Failure> {
        let is_fresh = |identity: &Identity| {
            let left = identity.end.map(|end| end.duration_since(now));
            left.is_none_or(|left| left > SPARE)
        };
        let fresh = self.current.take().filter(is_fresh);
        let identity = match fresh {
            Some(identity) => identity,
            None => self.find(now).await?,
        };
        Ok(self.current.insert(identity))
    }

    /// Forgets the identity, since it was refused.
    pub(super) fn forget(&mut self) {
        self.current = None;
    }

    async fn find(&self, now: Timestamp) -> Result<Identity, Failure> {
        let get = |name: &str| self.environment.get(name);
        let home = get("HOME").map(PathBuf::from);
        if let Some(path) = get(FILE) {
            return self.by_file(Path::new(&path), home.as_deref()).await;
        }
        if get(PRINCIPAL).is_some() {
            return principal::of_workload(&self.places, now).await;
        }
        let own = home.as_ref().map(|home| home.join(".oci/config"));
        if let Some(path) = own
            && tokio::fs::try_exists(&path).await.unwrap_or_default()
        {
            return self.by_file(&path, home.as_deref()).await;
        }
        let found = principal::of_instance(&self.http, &self.places, now).await;
        found.map_err(|failure| Failure {
            what: format!(
                "{failure}; there is no ~/.oci/config, and neither {FILE} nor {PRINCIPAL} is set"
            ),
            ..failure
        })
    }

    async fn by_file(&self, path: &Path, home: Option<&Path>) -> Result<Identity, Failure> {
        let text = secret_file::read(path).await?;
        let name = self.environment.get(PROFILE);
        let place = path.display().to_string();
        let profile = Profile::parse(&text, name.as_deref().unwrap_or("DEFAULT"), &place)?;
        let key_file = match (profile.key_file.strip_prefix("~/"), home) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => PathBuf::from(&profile.key_file),
        };
        let pem = secret_file::read(&key_file).await?;
        Ok(Identity {
            key: RsaKey::from_pem(&pem, &key_file.display().to_string())?,
            key_id: format!(
                "{}/{}/{}",
                profile.tenancy, profile.user, profile.fingerprint
            ),
            region: profile.region,
            domain: DOMAIN.to_owned(),
            end: None,
        })
    }
}

// === impl Identity ===

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut identity = f.debug_struct("Identity");
        identity.field("end", &self.end).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
