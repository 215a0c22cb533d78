//! Container of a check, built from the configured one, additions of preflight, and settings
//! that are inherited from the user's containers.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::inherited::Inherited;
use super::volumes::{GANG, SHARED_MEMORY, SOCKET, TOKEN, TOKEN_FILE, TOPOLOGY, Volumes};
use super::{Candidate, INHERITED_VARIABLE, RESULT_CACHE_VARIABLE};
use crate::config::{CheckContainer, Config};
use crate::field;
use crate::gang::Gang;
use crate::rendezvous::{self, RendezvousPlace};
use crate::resources::DevicesOfPod;
use crate::roster::config_map_name;
use crate::topology;

/// Directory of NCCL's topology file in a gang check.
const TOPOLOGY_DIRECTORY: &str = "/etc/nccl";
/// Directory of the pod's token in a gang check.
const TOKEN_DIRECTORY: &str = "/var/run/secrets/gpuwarden";
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
const TOPOLOGY_FILE: &str = "NCCL_TOPO_FILE";
/// User id of a check that must not run as root; `nonroot` of distroless images.
const NOBODY: i64 = 65532;
const SHARED_MEMORY_PATH: &str = "/dev/shm";

/// Container of a check under construction.
struct Draft<'a> {
    pod: &'a Value,
    env: Vec<Value>,
    /// Variable names in `env`.
    names: BTreeSet<String>,
    mounts: Vec<Value>,
    /// Mount paths in `mounts`, without trailing slashes.
    places: BTreeSet<String>,
}

/// Builds the container of a check.
pub(super) fn build(
    check: &CheckContainer,
    candidate: Candidate<'_>,
    config: &Config,
    volumes: &mut Volumes<'_>,
    warnings: &mut Vec<String>,
) -> Value {
    let gang = candidate.gang.filter(|_| config.coordination.enabled);
    let own = Value::Object(check.container.clone());
    let env = field::list(&own, "/env");
    let mut draft = Draft {
        pod: candidate.pod,
        env: env.to_vec(),
        names: env.iter().map(|one| field::name(one).to_owned()).collect(),
        mounts: Vec::new(),
        places: BTreeSet::new(),
    };
    let reports_to = candidate.reports_to();
    for mount in field::list(&own, "/volumeMounts") {
        let wanted = field::name(mount);
        if reports_to.is_some() && SOCKET.contains(&wanted) {
            continue;
        }
        match volumes.named(wanted) {
            Some(name) => draft.mount_as(mount, &name),
            None => warnings.push(format!(
                "the check {} mounts the volume {wanted}, which the pod does not have; it runs without",
                check.name
            )),
        }
    }
    draft.common(reports_to, config, volumes);
    // The node's connector stores the passes, so a check that reports elsewhere has none.
    if let Some(longest) = config
        .result_cache
        .filter(|_| check.is_ours() && !check.gang_only && reports_to.is_none())
    {
        draft.set_text(RESULT_CACHE_VARIABLE, &longest.as_secs().to_string());
    }
    if let Some(gang) = gang {
        draft.gang(gang, reports_to.is_none(), config, volumes);
        if let Some(place) = candidate.rendezvous.filter(|_| check.is_ours()) {
            draft.rendezvous(place, gang, volumes);
        }
    }
    let mut room = Inherited::default();
    if check.inherits_env {
        let inherited = draft.inherit_env(config, &mut room);
        if check.is_ours() && !inherited.is_empty() {
            draft.set_text(INHERITED_VARIABLE, &inherited.join(","));
        }
    }
    if check.inherits_mounts {
        draft.inherit_mounts(config, &mut room);
    }
    // The checks of a pod mostly leave out the same items; one warning is enough.
    for left_out in room.left_out() {
        if !warnings.contains(&left_out) {
            warnings.push(left_out);
        }
    }
    // After the inherited mounts, so that the user's own shared memory wins.
    let several = config.gate_checks && candidate.devices.gpus != Some(1);
    if gang.is_some() || several {
        draft.mount_ours(SHARED_MEMORY, SHARED_MEMORY_PATH, false, volumes);
    }
    let claims = if gang.is_some() && config.coordination.mirror_claims {
        DevicesOfPod::all_claims(candidate.pod, config)
    } else {
        candidate.devices.claims.clone()
    };
    let resources =
        candidate
            .devices
            .resources(own.get("resources"), &claims, candidate.pod, config);
    let mut container: Map<String, Value> = check.container.clone();
    container.insert("env".to_owned(), draft.env.into());
    container.insert("volumeMounts".to_owned(), draft.mounts.into());
    container.insert("resources".to_owned(), resources);
    let context = match reports_to {
        Some(_) => Some(confined(check, candidate.pod)),
        None => as_nobody(check, candidate.pod),
    };
    if let Some(context) = context {
        container.insert("securityContext".to_owned(), context);
    }
    container.into()
}

/// Returns a security context with a user id for a check in a pod that must not be root and
/// sets no user. The check's image may set none, and the kubelet would then refuse to start it.
fn as_nobody(check: &CheckContainer, pod: &Value) -> Option<Value> {
    let of_pod = pod.pointer("/spec/securityContext")?;
    let own = check.container.get("securityContext");
    let names_user = |context: &Value| context.get("runAsUser").is_some();
    let must = of_pod.get("runAsNonRoot") == Some(&Value::Bool(true));
    if !must || names_user(of_pod) || own.is_some_and(names_user) {
        return None;
    }
    let mut context = own.cloned().unwrap_or_else(|| json!({}));
    context
        .as_object_mut()?
        .insert("runAsUser".to_owned(), NOBODY.into());
    Some(context)
}

/// Returns a security context that meets the strictest level of Pod Security.
fn confined(check: &CheckContainer, pod: &Value) -> Value {
    let own = check.container.get("securityContext");
    let users = [own, pod.pointer("/spec/securityContext")];
    let mut users = users
        .into_iter()
        .flatten()
        .filter_map(|context| context.get("runAsUser")?.as_i64());
    let mut context = own.and_then(Value::as_object).cloned().unwrap_or_default();
    context.remove("privileged");
    context.remove("procMount");
    let user = users.find(|user| *user != 0).unwrap_or(NOBODY);
    for (key, value) in [
        ("allowPrivilegeEscalation", json!(false)),
        ("capabilities", json!({"drop": ["ALL"]})),
        ("runAsNonRoot", json!(true)),
        ("runAsUser", json!(user)),
        ("seccompProfile", json!({"type": "RuntimeDefault"})),
    ] {
        context.insert(key.to_owned(), value);
    }
    context.into()
}

/// Returns the directory of the connector's socket in a check.
fn socket_directory(config: &Config) -> &str {
    let path = config.connector_socket.strip_prefix("unix://");
    let path = path.unwrap_or(&config.connector_socket);
    let directory = path.rsplit_once('/').map(|(directory, _)| directory);
    directory
        .filter(|directory| !directory.is_empty())
        .unwrap_or("/var/run")
}

// === impl Draft ===

impl Draft<'_> {
    /// Adds a variable unless one with its name exists.
    fn set(&mut self, variable: Value) {
        if self.names.insert(field::name(&variable).to_owned()) {
            self.env.push(variable);
        }
    }

    fn set_text(&mut self, name: &str, value: &str) {
        self.set(json!({"name": name, "value": value}));
    }

    fn set_field(&mut self, name: &str, path: &str) {
        self.set(json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}));
    }

    fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Mounts a volume under its name in the pod, unless the path is already mounted.
    fn mount_as(&mut self, mount: &Value, name: &str) {
        let path = field::text(mount, "/mountPath").unwrap_or_default();
        if !self.places.insert(place(path).to_owned()) {
            return;
        }
        let mut mount = mount.clone();
        if let Some(mount) = mount.as_object_mut() {
            mount.insert("name".to_owned(), name.into());
        }
        self.mounts.push(mount);
    }

    fn mount_ours(&mut self, volume: &str, path: &str, read_only: bool, volumes: &mut Volumes<'_>) {
        if self.places.contains(place(path)) {
            return;
        }
        let mut mount = json!({"mountPath": path});
        if let (true, Some(mount)) = (read_only, mount.as_object_mut()) {
            mount.insert("readOnly".to_owned(), true.into());
        }
        if let Some(name) = volumes.named(volume) {
            self.mount_as(&mount, &name);
        }
    }

    /// Adds the variables and mounts of every check.
    fn common(
        &mut self,
        reports_to: Option<&RendezvousPlace>,
        config: &Config,
        volumes: &mut Volumes<'_>,
    ) {
        self.set_field("NODE_NAME", "spec.nodeName");
        match reports_to {
            Some(place) => {
                let url = place.url.trim_end_matches('/');
                self.set_text(rendezvous::REPORT_VARIABLE, url);
                self.token(place, volumes);
            }
            None => self.set_text("PLATFORM_CONNECTOR_SOCKET", &config.connector_socket),
        }
        self.set_text("PROCESSING_STRATEGY", &config.processing_strategy);
        if let Some(timeout) = config.check_timeout {
            self.set_text("CHECK_TIMEOUT_SECONDS", &timeout.as_secs().to_string());
        }
        if reports_to.is_some() {
            return;
        }
        let socket = volumes.named(SOCKET[0]);
        let is_mounted = |there: &Value| Some(field::name(there)) == socket.as_deref();
        if !self.mounts.iter().any(is_mounted) {
            self.mount_ours(SOCKET[0], socket_directory(config), false, volumes);
        }
    }

    /// Adds the variables and mounts of a gang check.
    fn gang(
        &mut self,
        gang: &Gang,
        may_have_host_paths: bool,
        config: &Config,
        volumes: &mut Volumes<'_>,
    ) {
        let coordination = &config.coordination;
        self.set_text("GANG_ID", &gang.id());
        self.set_text("GANG_CONFIG_DIR", &coordination.mount_path);
        self.set_text(
            "GANG_TIMEOUT_SECONDS",
            &coordination.timeout.as_secs().to_string(),
        );
        self.set_text("MASTER_PORT", &coordination.master_port.to_string());
        self.set_field("POD_NAME", "metadata.name");
        self.set_field("POD_IP", "status.podIP");
        self.mount_ours(GANG[0], &coordination.mount_path, true, volumes);
        let paths = coordination.host_paths.iter().enumerate();
        for (at, path) in paths.filter(|_| may_have_host_paths) {
            let mount = json!({"mountPath": path.mount_path, "readOnly": path.read_only});
            if let Some(name) = volumes.host_path(at) {
                self.mount_as(&mount, &name);
            }
        }
        for mount in &coordination.volume_mounts {
            if let Some(name) = volumes.named(&mount.name) {
                let place = json!({"mountPath": mount.mount_path, "readOnly": mount.read_only});
                self.mount_as(&place, &name);
            }
        }
        let users = users_variable(self.pod, TOPOLOGY_FILE).is_some();
        if coordination.topology_config_map.is_some() && !users && !self.has(TOPOLOGY_FILE) {
            self.mount_ours(TOPOLOGY, TOPOLOGY_DIRECTORY, true, volumes);
            self.set_text(TOPOLOGY_FILE, &format!("{TOPOLOGY_DIRECTORY}/topo.xml"));
        }
        if let Some(file) = &coordination.topology_file {
            self.set_text(topology::VARIABLE, file);
        }
    }

    /// Adds the URL and the token for the rendezvous.
    fn rendezvous(&mut self, place: &RendezvousPlace, gang: &Gang, volumes: &mut Volumes<'_>) {
        let map = config_map_name(&gang.id());
        let url = format!(
            "{}/gangs/{}/{map}",
            place.url.trim_end_matches('/'),
            gang.namespace
        );
        self.set_text(rendezvous::URL_VARIABLE, &url);
        self.token(place, volumes);
    }

    /// Adds the webhook's certificate authorities and the pod's token.
    fn token(&mut self, place: &RendezvousPlace, volumes: &mut Volumes<'_>) {
        self.set_text(rendezvous::AUTHORITIES_VARIABLE, &place.authorities);
        self.set_text(
            rendezvous::TOKEN_VARIABLE,
            &format!("{TOKEN_DIRECTORY}/{TOKEN_FILE}"),
        );
        self.mount_ours(TOKEN, TOKEN_DIRECTORY, true, volumes);
    }

    /// Inherits the variables that match the configured patterns; the first container with a
    /// name wins. Returns their names without `LD_LIBRARY_PATH`: a check that drops inherited
    /// variables may still need it to find its libraries.
    fn inherit_env(&mut self, config: &Config, room: &mut Inherited) -> Vec<String> {
        let mut inherited = Vec::new();
        for container in field::list(self.pod, "/spec/containers") {
            for variable in field::list(container, "/env") {
                let name = field::name(variable);
                let mut patterns = config.env_patterns.iter();
                let is_named = patterns.any(|pattern| pattern.matches(name));
                if is_named
                    && self.is_whole(variable)
                    && !self.has(name)
                    && room.has_room_for_variable(variable)
                {
                    self.set(variable.clone());
                    inherited.push(name.to_owned());
                }
            }
        }
        inherited.retain(|name| name != LIBRARY_PATH);
        inherited
    }

    /// Returns true if every variable that the value refers to as `$(NAME)` is present.
    fn is_whole(&self, variable: &Value) -> bool {
        let value = field::text(variable, "/value").unwrap_or_default();
        let mut named = value.split("$(").skip(1);
        named.all(|rest| rest.split_once(')').is_none_or(|(name, _)| self.has(name)))
    }

    /// Inherits the mounts that match the configured patterns, and the mount that contains the
    /// user's topology file.
    fn inherit_mounts(&mut self, config: &Config, room: &mut Inherited) {
        for container in field::list(self.pod, "/spec/containers") {
            let file = users_variable(container, TOPOLOGY_FILE);
            for mount in field::list(container, "/volumeMounts") {
                let name = field::name(mount);
                let path = field::text(mount, "/mountPath").unwrap_or_default();
                let is_named = config
                    .mount_patterns
                    .iter()
                    .any(|pattern| pattern.matches(name));
                let holds_file = file.is_some_and(|file| is_below(file, path));
                if (is_named || holds_file)
                    && mount.get("subPathExpr").is_none()
                    && !self.places.contains(place(path))
                    && room.has_room_for_mount(mount)
                {
                    self.mount_as(&without_propagation(mount), name);
                }
            }
        }
    }
}

/// Removes bidirectional mount propagation, which needs a privileged container.
fn without_propagation(mount: &Value) -> Value {
    let mut mount = mount.clone();
    if let Some(fields) = mount.as_object_mut() {
        let is_both = fields.get("mountPropagation") == Some(&json!("Bidirectional"));
        fields.retain(|key, _| !(is_both && key == "mountPropagation"));
    }
    mount
}

/// Returns the value of a variable in a container, or in any container of a pod.
fn users_variable<'a>(of: &'a Value, name: &str) -> Option<&'a str> {
    let of_container = |container: &'a Value| {
        let env = field::list(container, "/env").iter();
        let mut named = env.filter(|variable| field::name(variable) == name);
        named.next().and_then(|found| field::text(found, "/value"))
    };
    let mut containers = field::list(of, "/spec/containers").iter();
    of_container(of).or_else(|| containers.find_map(of_container))
}

/// Returns a path in the form used for comparison.
fn place(path: &str) -> &str {
    path.trim_end_matches('/')
}

fn is_below(file: &str, directory: &str) -> bool {
    let rest = file.strip_prefix(directory.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
