//! Volumes that checks add to a pod, under names that the pod does not use.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Candidate;
use crate::config::Config;
use crate::field;
use crate::rendezvous::AUDIENCE;
use crate::roster;

/// Volume with the connector's socket. Templates of ADR-026 use the second name.
pub(super) const SOCKET: [&str; 2] = ["nvsentinel-socket", "platform-connector-socket"];
/// Volume with the gang's `ConfigMap`, which also identifies the pods of a gang. ADR-026 uses
/// the second name.
pub(super) const GANG: [&str; 2] = ["nvsentinel-preflight-gang-config", "preflight-gang-config"];
/// Volume with shared memory: NCCL needs more than a container's default of 64 MiB.
pub(super) const SHARED_MEMORY: &str = "dshm";
/// Volume with NCCL's topology file.
pub(super) const TOPOLOGY: &str = "nccl-topo";
/// Volume with the token that authenticates the pod to the webhook.
pub(super) const TOKEN: &str = "gpuwarden-preflight-token";
/// File name of that token.
pub(super) const TOKEN_FILE: &str = "token";
/// Lifetime of a token in seconds. The kubelet renews it before it expires.
const TOKEN_SECONDS: u32 = 3600;
/// Host directory of the connector's socket.
const SOCKET_DIRECTORY: &str = "/var/run/nvsentinel";
/// Largest size of the shared memory.
const SHARED_MEMORY_LIMIT: &str = "64Gi";

/// Volumes of a pod, and those that are added.
pub(super) struct Volumes<'a> {
    /// Volumes of the pod itself, by name.
    theirs: BTreeMap<&'a str, &'a Value>,
    gang_config_map: Option<String>,
    config: &'a Config,
    /// Our volumes: name here, name in the pod, and the volume itself unless the pod already
    /// has it.
    ours: Vec<(&'static str, String, Option<Value>)>,
}

impl<'a> Volumes<'a> {
    pub(super) fn new(candidate: Candidate<'a>, config: &'a Config) -> Self {
        let gang = candidate.gang.filter(|_| config.coordination.enabled);
        Self {
            theirs: field::list(candidate.pod, "/spec/volumes")
                .iter()
                .rev()
                .map(|volume| (field::name(volume), volume))
                .collect(),
            gang_config_map: gang.map(|gang| roster::config_map_name(&gang.id())),
            config,
            ours: Vec::new(),
        }
    }

    /// Returns the name in the pod of a volume that a check mounts, and adds the volume if it
    /// is ours. `None` if neither the pod nor this program has such a volume.
    pub(super) fn named(&mut self, wanted: &str) -> Option<String> {
        match self.source(wanted) {
            Some((volume, source)) => Some(self.ours(volume, source)),
            None => self.theirs.get(wanted).map(|_| wanted.to_owned()),
        }
    }

    /// Returns the volumes to add to the pod.
    pub(super) fn added(self) -> Vec<Value> {
        let ours = self.ours.into_iter();
        ours.filter_map(|(_, _, volume)| volume).collect()
    }

    /// Returns one of our volumes, by any of its names, with its source.
    fn source(&self, wanted: &str) -> Option<(&'static str, Value)> {
        if SOCKET.contains(&wanted) {
            let path = json!({"path": SOCKET_DIRECTORY, "type": "DirectoryOrCreate"});
            return Some((SOCKET[0], json!({"hostPath": path})));
        }
        if GANG.contains(&wanted) {
            let name = self.gang_config_map.as_ref()?;
            // The `ConfigMap` may not exist yet: admission does not wait until it is created.
            let map = json!({"name": name, "optional": true});
            return Some((GANG[0], json!({"configMap": map})));
        }
        if wanted == SHARED_MEMORY {
            let memory = json!({"medium": "Memory", "sizeLimit": SHARED_MEMORY_LIMIT});
            return Some((SHARED_MEMORY, json!({"emptyDir": memory})));
        }
        if wanted == TOKEN {
            let token = json!({
                "audience": AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": TOKEN_FILE,
            });
            let sources = json!([{"serviceAccountToken": token}]);
            return Some((TOKEN, json!({"projected": {"sources": sources}})));
        }
        if wanted == TOPOLOGY {
            let name = self.config.coordination.topology_config_map.as_ref()?;
            let map = json!({"name": name, "optional": true});
            return Some((TOPOLOGY, json!({"configMap": map})));
        }
        None
    }

    /// Returns the name in the pod of the volume for `host_paths[at]`.
    pub(super) fn host_path(&mut self, at: usize) -> Option<String> {
        let path = self.config.coordination.host_paths.get(at)?;
        let mut host = json!({"path": path.host_path});
        if let (Some(host), Some(kind)) = (host.as_object_mut(), &path.host_path_type) {
            host.insert("type".to_owned(), kind.clone().into());
        }
        Some(self.under(&path.name, json!({"hostPath": host})))
    }

    fn ours(&mut self, volume: &'static str, source: Value) -> String {
        let known = self.ours.iter().find(|(name, ..)| *name == volume);
        if let Some((_, name, _)) = known {
            return name.clone();
        }
        let (name, added) = self.place(volume, source);
        self.ours.push((volume, name.clone(), added));
        name
    }

    /// Returns the name in the pod of a volume that the configuration defines.
    fn under(&mut self, wanted: &str, source: Value) -> String {
        let made = self.ours.iter().filter_map(|(.., volume)| volume.as_ref());
        for volume in made {
            let base = field::name(volume);
            if is_name_of(base, wanted) && same(volume, &source) {
                return base.to_owned();
            }
        }
        let (name, added) = self.place(wanted, source);
        self.ours.push(("", name.clone(), added));
        name
    }

    /// Returns `wanted`, with a number if another volume has that name, and the volume to add.
    /// `None` if the pod already has the same volume.
    fn place(&self, wanted: &str, source: Value) -> (String, Option<Value>) {
        let mut name = wanted.to_owned();
        for number in 2.. {
            match self.theirs.get(&*name) {
                Some(volume) if same(volume, &source) => return (name, None),
                Some(_) => name = format!("{wanted}-{number}"),
                None if self.ours.iter().any(|(_, ours, _)| *ours == name) => {
                    name = format!("{wanted}-{number}");
                }
                None => break,
            }
        }
        let mut volume = source;
        if let Some(volume) = volume.as_object_mut() {
            volume.insert("name".to_owned(), name.clone().into());
        }
        (name, Some(volume))
    }
}

/// Returns true if a volume has this source.
fn same(volume: &Value, source: &Value) -> bool {
    let source = source.as_object().into_iter().flatten();
    source
        .into_iter()
        .all(|(key, value)| volume.get(key) == Some(value))
}

fn is_name_of(name: &str, wanted: &str) -> bool {
    name.strip_prefix(wanted).is_some_and(|rest| {
        let number = rest.strip_prefix('-');
        rest.is_empty() || number.is_some_and(|number| number.parse::<u32>().is_ok())
    })
}
