//! Discovery of gangs: the methods that find the gang of a pod.

use contract::findings::Findings;
use contract::names::{self, WrongName};
use policy::CountExpression;
use serde::Deserialize;
use serde_json::Value;

/// Key of the settings in the file.
const KEY: &str = "gangDiscovery";

/// Method that finds the gang of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Discovery {
    /// Kubernetes' own fields: `spec.workloadRef` (1.35) or `spec.schedulingGroup` (1.36 and
    /// later).
    #[default]
    Native,
    /// An object that the pod names, which holds the number of members.
    PodGroups(PodGroups),
    /// Kueue's labels and annotations, with its workload or its pod group.
    Kueue,
    /// Two labels of the pod: the gang's name and its size.
    Labels {
        /// Label key of the gang's name.
        id: String,
        /// Label key of the gang's size.
        size: String,
    },
}

/// Gangs whose pods name an object, such as Volcano's `PodGroup`.
#[derive(Clone, Debug, PartialEq)]
pub struct PodGroups {
    /// Name of the method, in gang ids and in logs.
    pub name: String,
    /// Annotation keys that may hold the object's name. The first that is set counts.
    pub annotations: Vec<String>,
    /// Label keys that may hold the object's name, used if no annotation has it.
    pub labels: Vec<String>,
    /// Resource type of the object.
    pub resource: Resource,
    /// Expression for the number of members that the object asks for.
    pub min_count: MinCount,
}

/// Expression over the variable `podGroup` for the number of members that an object asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct MinCount(CountExpression);

/// Resource type, as in the paths of the API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resource {
    /// API group, such as `scheduling.volcano.sh`.
    pub group: String,
    /// API version, such as `v1beta1`.
    pub version: String,
    /// Plural name in lower case, such as `podgroups`.
    pub resource: String,
}

// === impl Discovery ===

impl Discovery {
    /// Parses the value of `gangDiscovery`. The error is written for the author of the
    /// configuration.
    pub fn from_json(keys: &Value) -> Result<Self, String> {
        let keys = Option::<Entry>::deserialize(keys);
        let keys = keys.map_err(|error| format!("gangDiscovery: {error}"))?;
        let discovery = keys.unwrap_or_default().discovery();
        let discovery = discovery.map_err(|(path, what)| format!("{path}: {what}"))?;
        for (key, checked) in discovery.names() {
            checked.map_err(|error| format!("{key}: {error}"))?;
        }
        Ok(discovery)
    }

    /// Returns each label and annotation key that this method reads: where it is configured,
    /// and whether Kubernetes accepts it as a key.
    pub(crate) fn names(&self) -> Vec<(String, Result<(), WrongName>)> {
        let name = |place: &str, key: &String| (format!("{KEY}.{place}"), names::label_key(key));
        let named = |place: &str, keys: &[String]| {
            let keys = keys.iter().enumerate();
            let all = keys.map(|(at, key)| name(&format!("{place}[{at}]"), key));
            all.collect::<Vec<_>>()
        };
        match self {
            Self::Native | Self::Kueue => Vec::new(),
            Self::PodGroups(groups) => {
                let annotations = named("annotationKeys", &groups.annotations);
                [annotations, named("labelKeys", &groups.labels)].concat()
            }
            Self::Labels { id, size } => vec![
                name("labels.gangIdLabel", id),
                name("labels.gangSizeLabel", size),
            ],
        }
    }

    /// Returns the name of the method, which is the first part of gang ids.
    pub fn name(&self) -> &str {
        match self {
            Self::Native => "kubernetes",
            Self::PodGroups(groups) => &groups.name,
            Self::Kueue => "kueue",
            Self::Labels { .. } => "labels",
        }
    }
}

/// The keys below `gangDiscovery`.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Entry {
    name: String,
    annotation_keys: Vec<String>,
    label_keys: Vec<String>,
    #[serde(rename = "podGroupGVR")]
    pod_group_gvr: Option<Resource>,
    min_count_expr: Option<String>,
    method: Option<Method>,
    labels: Option<LabelKeys>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
enum Method {
    WorkloadRef,
    Volcano,
    Kueue,
    Labels,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LabelKeys {
    gang_id_label: String,
    gang_size_label: String,
}

// === impl MinCount ===

impl MinCount {
    /// Expression that is used if the configuration has none.
    pub const DEFAULT: &str = "podGroup.spec.minMember";

    /// Compiles an expression. The error is written for the author of the configuration.
    pub fn parse(expression: &str) -> Result<Self, String> {
        let compiled = CountExpression::compile("podGroup", expression);
        compiled.map(Self).map_err(|error| error.to_string())
    }

    /// Returns the source text of the expression.
    pub fn expression(&self) -> &str {
        &self.0.expression
    }

    /// Returns the number that an object asks for, or why it has none.
    pub fn count(&self, object: &Value) -> Result<i64, String> {
        self.0.count(object)
    }
}

// === impl Entry ===

impl Entry {
    /// Returns the configured method, and records what is wrong with it.
    pub(super) fn checked(self, findings: &mut Findings<'_>) -> Discovery {
        let discovery = self.discovery().unwrap_or_else(|(path, what)| {
            findings.at_key(path, what);
            Discovery::default()
        });
        for (path, checked) in discovery.names() {
            findings.check(&path, checked);
        }
        discovery
    }

    /// Returns the configured method. The error has the path of the key in the file.
    fn discovery(self) -> Result<Discovery, (&'static str, String)> {
        let wrong = |what: &str| (KEY, what.to_owned());
        let is_object = !self.name.is_empty() || self.pod_group_gvr.is_some();
        match self.method {
            Some(_) if is_object => Err(wrong(
                "`method` and the keys of a PodGroup (`name`, `podGroupGVR`) are two ways; leave one \
                 out",
            )),
            Some(Method::WorkloadRef) => Ok(Discovery::Native),
            Some(Method::Volcano) => {
                let groups = volcano().map_err(|what| (KEY, what))?;
                Ok(Discovery::PodGroups(groups))
            }
            Some(Method::Kueue) => Ok(Discovery::Kueue),
            Some(Method::Labels) => match self.labels {
                Some(keys) => Ok(Discovery::Labels {
                    id: keys.gang_id_label,
                    size: keys.gang_size_label,
                }),
                None => Err(wrong(
                    "the method `labels` needs `labels.gangIdLabel` and `labels.gangSizeLabel`",
                )),
            },
            None if is_object => self.pod_groups().map(Discovery::PodGroups),
            None if self.annotation_keys.is_empty() && self.label_keys.is_empty() => {
                Ok(Discovery::Native)
            }
            None => Err(wrong("`name` and `podGroupGVR` are missing")),
        }
    }

    fn pod_groups(self) -> Result<PodGroups, (&'static str, String)> {
        let wrong = |what: &str| (KEY, what.to_owned());
        let Some(resource) = self.pod_group_gvr else {
            return Err(wrong("`podGroupGVR` is missing (group, version, resource)"));
        };
        if self.name.is_empty() {
            return Err(wrong("`name` is missing; it begins the ids of gangs"));
        }
        if self.annotation_keys.is_empty() && self.label_keys.is_empty() {
            return Err(wrong(
                "`annotationKeys` or `labelKeys` must say where a pod names its group",
            ));
        }
        let expression = self.min_count_expr.as_deref();
        let min_count = MinCount::parse(expression.unwrap_or(MinCount::DEFAULT))
            .map_err(|what| ("gangDiscovery.minCountExpr", what))?;
        Ok(PodGroups {
            name: self.name,
            annotations: self.annotation_keys,
            labels: self.label_keys,
            resource,
            min_count,
        })
    }
}

/// Returns Volcano's way of marking pods: its own annotation, and the one of earlier Kubernetes
/// schedulers, which Volcano sets as well.
fn volcano() -> Result<PodGroups, String> {
    Ok(PodGroups {
        name: "volcano".to_owned(),
        annotations: vec![
            "scheduling.k8s.io/group-name".to_owned(),
            "volcano.sh/pod-group".to_owned(),
        ],
        labels: Vec::new(),
        resource: Resource {
            group: "scheduling.volcano.sh".to_owned(),
            version: "v1beta1".to_owned(),
            resource: "podgroups".to_owned(),
        },
        min_count: MinCount::parse(MinCount::DEFAULT)?,
    })
}
