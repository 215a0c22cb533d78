//! Values of the chart: what they render to, and what is refused.

use serde_json::Value;
use testkit::{ControlPlane, Version};

use super::least::texts;
use super::{Helm, LADDER, NAMESPACE, values_file};
use crate::monitoring::repository;

/// Wrong values, and the path and the hint of their refusal.
const WRONG: [(&str, &str); 20] = [
    (
        "quarantine.enabled=true,quarantine.dryRun=true,janitor.enabled=true",
        "janitor.enabled: a janitor has no dry run",
    ),
    (
        "quarantine.enabled=true,quarantine.dryRun=true,labeler.enabled=true",
        "labeler.enabled: labels have no dry run",
    ),
    (
        "quarantine.enbled=true",
        "quarantine.enbled: quarantine has no such value; it has dryRun, enabled",
    ),
    (
        "quarantine.enabled=5",
        "at '/quarantine/enabled': got number, want boolean",
    ),
    (
        "gpuAccess=class",
        "at '/gpuAccess': value must be one of 'auto', 'runtimeClass'",
    ),
    (
        "drain.enabled=true",
        "drain.enabled: only nodes that are out of service are drained; set quarantine.enabled",
    ),
    (
        "quarantine.dryRun=true",
        "quarantine.dryRun: it shows the decisions of a quarantine",
    ),
    (
        "agent.kernelLog=kmsg",
        "agent.kernelLog: only a privileged container may open /dev/kmsg",
    ),
    (
        "gpuAccess=hostDriver",
        "gpuAccess: hostDriver opens the devices of the driver itself",
    ),
    (
        "agent.resources.limits.nvidia\\.com/gpu=1",
        "agent.resources.limits: nvidia.com/gpu takes a GPU",
    ),
    (
        "validation.enabled=true,janitor.enabled=true",
        "validation.config: it names the tests",
    ),
    (
        "global.faultQuarantine.enabled=true",
        "global.faultQuarantine: use quarantine.enabled",
    ),
    (
        "preflight.podMonitor.enabled=true",
        "preflight.podMonitor: use monitoring.serviceMonitor",
    ),
    (
        "preflight-injector.chekcs=1",
        "preflight-injector.chekcs: preflight-injector has no such value",
    ),
    (
        "preflight.webhook.failurePolicy=Maybe",
        "at '/preflight/webhook/failurePolicy': value must be one of",
    ),
    (
        "janitor.enabled=true,janitor.config=[",
        "janitor.config is no YAML",
    ),
    (
        "objects.preset=eks,objects.config=x",
        "objects: set objects.config or objects.preset, not both",
    ),
    (
        "objects.preset=eks,objects.resources[0].resource=pods",
        "objects.resources: they are the kinds of objects.config, which is empty",
    ),
    (
        "objects.config=x,objects.resources[0].group=apps",
        "objects.resources: each kind needs its resource",
    ),
    (
        "kubernetes-object-monitor.policies=x",
        "kubernetes-object-monitor: use objects.config",
    ),
];

#[tokio::test]
async fn wrong_values_are_refused_with_their_path_and_a_hint() -> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    for (value, expected) in WRONG {
        let Err(error) = helm.template(&["--set", value]).await else {
            panic!("{value} was accepted");
        };
        let error = error.to_string();
        assert!(error.contains(expected), "{value}: {error}");
    }
    Ok(())
}

/// Returns the rendered object of a kind and name.
pub(super) fn object(rendered: &str, kind: &str, name: &str) -> Option<Value> {
    let documents = rendered.split("\n---\n");
    let mut objects = documents.filter_map(|text| serde_saphyr::from_str::<Value>(text).ok());
    objects.find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}

#[tokio::test]
async fn the_agent_has_the_values_of_the_nvml_providers_design() -> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let agent = |rendered: &str| object(rendered, "DaemonSet", "gpuwarden-agent").unwrap();
    let rendered = helm.template(&[]).await?;
    let pod = &agent(&rendered)["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(pod["runtimeClassName"], "nvidia");
    let resources = serde_json::json!({
        "requests": {"cpu": "50m", "memory": "64Mi"},
        "limits": {"cpu": "200m", "memory": "256Mi"},
    });
    assert_eq!(container["resources"], resources);
    let env = container["env"].to_string();
    for (name, value) in [
        ("NVIDIA_VISIBLE_DEVICES", "all"),
        ("NVIDIA_DRIVER_CAPABILITIES", "utility"),
    ] {
        let variable = serde_json::json!({"name": name, "value": value}).to_string();
        assert!(env.contains(&variable), "{env}");
    }
    let args = container["args"].to_string();
    for arg in [
        "--enable-nvml-provider\"",
        "--nvml-driver-root=/run/nvidia/driver",
        "--nvml-health-interval=5",
    ] {
        assert!(args.contains(arg), "{args}");
    }
    assert!(!args.contains("--nvml-ignored-xids"), "{args}");
    let whole = agent(&rendered).to_string();
    for never in [
        "nvidia.com/gpu\":",
        "privileged",
        "hostPID",
        "hostNetwork",
        "path\":\"/dev",
    ] {
        assert!(!whole.contains(never), "{never}: {whole}");
    }

    let changed = "nvml.additionalIgnoredXids=94\\,109,nvml.driverRoot=/opt/driver,\
                   nvml.healthCheckInterval=9,runtimeClassName=";
    let rendered = helm.template(&["--set", changed]).await?;
    let pod = &agent(&rendered)["spec"]["template"]["spec"];
    assert_eq!(pod["runtimeClassName"], Value::Null);
    let args = pod["containers"][0]["args"].to_string();
    for arg in [
        "--nvml-driver-root=/opt/driver",
        "--nvml-health-interval=9",
        "--nvml-ignored-xids=94,109",
    ] {
        assert!(args.contains(arg), "{args}");
    }
    let rendered = helm.template(&["--set", "nvml.enabled=false"]).await?;
    let pod = agent(&rendered)["spec"]["template"]["spec"].to_string();
    assert!(
        pod.contains("--enable-nvml-provider=false") && !pod.contains("NVIDIA_"),
        "{pod}"
    );
    Ok(())
}

#[tokio::test]
async fn the_values_of_the_adr_and_of_the_configuration_document_deploy_the_webhook()
-> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let rendered = helm.template(&[]).await?;
    assert!(object(&rendered, "Deployment", "gpuwarden-webhook").is_none());
    let documents = [
        "global.preflight.enabled=true,preflight.initContainerPlacement=prepend,\
         preflight.webhook.failurePolicy=Ignore",
        "preflight-injector.enabled=true,preflight-injector.initContainerPlacement=prepend,\
         preflight-injector.webhook.failurePolicy=Ignore",
    ];
    for values in documents {
        let rendered = helm.template(&["--set", values]).await?;
        assert!(object(&rendered, "Deployment", "gpuwarden-webhook").is_some());
        let map = object(&rendered, "ConfigMap", "gpuwarden-webhook").unwrap();
        let config = map["data"]["config.yaml"].as_str().unwrap();
        let config: Value = serde_saphyr::from_str(config)?;
        assert_eq!(config["initContainerPlacement"], "prepend");
        assert_eq!(config["webhook"]["failurePolicy"], "Ignore");
        assert_eq!(config["image"], "gpuwarden-checks:0.1.0");
    }
    let with = "global.preflight.enabled=true,preflight.networkPolicy.namespaces[0]=train";
    let rendered = helm.template(&["--set", with]).await?;
    let policy = object(&rendered, "NetworkPolicy", "gpuwarden-checks").unwrap();
    assert_eq!(policy["metadata"]["namespace"], "train");
    let engine = &policy["spec"]["egress"][0];
    assert_eq!(engine["ports"][0]["port"], 5555);
    let label = &engine["to"][0]["namespaceSelector"]["matchLabels"];
    assert_eq!(label["kubernetes.io/metadata.name"], "gpu-operator");
    let provider = "global.preflight.enabled=true,preflight.webhook.certProvider=";
    for (issuer, annotation) in [
        ("cert-manager", "cert-manager.io/inject-ca-from"),
        (
            "openshift-service-ca",
            "service.beta.openshift.io/inject-cabundle",
        ),
    ] {
        let rendered = helm
            .template(&["--set", &format!("{provider}{issuer}")])
            .await?;
        let kind = "MutatingWebhookConfiguration";
        let registration = object(&rendered, kind, "gpuwarden-preflight").unwrap();
        assert!(registration["metadata"]["annotations"][annotation].is_string());
        let deployment = object(&rendered, "Deployment", "gpuwarden-webhook").unwrap();
        assert!(
            deployment.to_string().contains("--tls-cert="),
            "{deployment}"
        );
    }
    Ok(())
}

/// Returns the resources that the controller may list and watch in the whole cluster.
fn watched(rendered: &str) -> Vec<String> {
    let role = object(rendered, "ClusterRole", "gpuwarden-controller").unwrap();
    let rules = role["rules"].as_array().unwrap().iter();
    let lists = rules.filter(|rule| {
        let verbs = texts(&rule["verbs"]);
        ["list", "watch"]
            .iter()
            .all(|verb| verbs.contains(&(*verb).to_owned()))
    });
    lists
        .flat_map(|rule| {
            let groups = texts(&rule["apiGroups"]).into_iter();
            groups.zip(texts(&rule["resources"]))
        })
        .map(|(group, resource)| format!("{group}/{resource}"))
        .collect()
}

/// Returns the controller's setting of the policies over objects.
fn objects_of(rendered: &str) -> Option<String> {
    let controller = object(rendered, "Deployment", "gpuwarden-controller").unwrap();
    let env = &controller["spec"]["template"]["spec"]["containers"][0]["env"];
    let mut env = env.as_array().unwrap().iter();
    let set = env.find(|one| one["name"] == "GPUWARDEN_OBJECTS")?;
    Some(set["value"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn policies_over_objects_are_set_with_the_permissions_for_their_kinds() -> anyhow::Result<()>
{
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let nothing = helm.template(&[]).await?;
    assert_eq!(objects_of(&nothing), None);
    assert_eq!(watched(&nothing), ["/nodes"]);

    let schema = std::fs::read_to_string(repository("deploy/helm/gpuwarden/values.schema.json"))?;
    let schema: Value = serde_json::from_str(&schema)?;
    let listed = texts(&schema["properties"]["objects"]["properties"]["preset"]["enum"]);
    let presets = objects::presets::PRESETS;
    let names: Vec<&str> = presets.iter().map(|preset| preset.name).collect();
    assert_eq!(listed[1..], names);
    for preset in presets {
        let value = format!("objects.preset={}", preset.name);
        let rendered = helm.template(&["--set", &value]).await?;
        let setting = objects_of(&rendered);
        assert_eq!(setting, Some(format!("preset:{}", preset.name)));
        let policies = objects::parse(preset.text, preset.name)?.policies;
        let monitor = objects::ObjectMonitor::new(policies);
        let kinds = monitor.watched().map(|(watched, _)| &watched.kind);
        let kinds = kinds.map(|kind| format!("{}/{}s", kind.group, kind.kind.to_lowercase()));
        let mut needed: Vec<String> = kinds.chain(["/nodes".to_owned()]).collect();
        needed.sort_unstable();
        needed.dedup();
        assert_eq!(watched(&rendered), needed, "{}", preset.name);
    }

    let own = "objects.config=text,objects.resources[0].group=apps,\
               objects.resources[0].resource=daemonsets,objects.resources[1].resource=pods";
    let rendered = helm.template(&["--set", own]).await?;
    let path = "/etc/gpuwarden/config/objects.toml".to_owned();
    assert_eq!(objects_of(&rendered), Some(path));
    let map = object(&rendered, "ConfigMap", "gpuwarden-controller").unwrap();
    assert_eq!(map["data"]["objects.toml"], "text\n");
    assert_eq!(watched(&rendered), ["/nodes", "apps/daemonsets", "/pods"]);
    Ok(())
}

#[tokio::test]
async fn a_janitor_may_do_what_its_providers_need() -> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let host = "global: {cspProviderHost: h:1}";
    let (reboot, terminate) = ("label: {reboot: a/b}", "label: {terminate: a/c}");
    for (config, reads, jobs) in [
        ("rebootNodeController: {}".to_owned(), true, true),
        (host.to_owned(), false, false),
        (reboot.to_owned(), true, false),
        (terminate.to_owned(), true, true),
        (format!("{host}\n{reboot}"), true, false),
        (format!("{host}\n{terminate}"), true, false),
        (
            format!("{host}\n{terminate}\nterminateNodeController: {{enabled: false}}"),
            false,
            false,
        ),
    ] {
        let value = format!("janitor.config={config}");
        let rendered = helm
            .template(&["--set", "janitor.enabled=true", "--set", &value])
            .await?;
        let role = object(&rendered, "ClusterRole", "gpuwarden-controller").unwrap();
        let verbs = texts(&role["rules"][0]["verbs"]);
        assert_eq!(verbs.contains(&"get".to_owned()), reads, "{config}");
        let role = object(&rendered, "Role", "gpuwarden-reboots");
        assert_eq!(role.is_some(), jobs, "{config}");
    }
    Ok(())
}

#[tokio::test]
async fn an_agent_reaches_gpus_in_three_ways_and_takes_none() -> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let ways = [
        ("gpuAccess=runtimeClass", "runtimeClassName"),
        ("gpuAccess=hostDriver,agent.privileged=true", "\"driver\""),
        ("gpuAccess=draAdmin", "resourceClaims"),
    ];
    for (values, mark) in ways {
        let rendered = helm.template(&["--set", values]).await?;
        assert!(!rendered.contains("nvidia.com/gpu:"), "{rendered}");
        let agent = object(&rendered, "DaemonSet", "gpuwarden-agent").unwrap();
        let pod = agent["spec"]["template"]["spec"].to_string();
        for (other, its_mark) in ways {
            assert_eq!(
                pod.contains(its_mark),
                its_mark == mark,
                "{values}, {other}: {pod}"
            );
        }
        let claim = object(&rendered, "ResourceClaimTemplate", "gpuwarden-agent");
        let admin = claim.map(|it| {
            it["spec"]["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"].clone()
        });
        assert_eq!(
            admin,
            (mark == "resourceClaims").then_some(Value::Bool(true))
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_disruption_leaves_a_replica_of_the_webhook() -> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let rendered = helm.template(&["--set", PREFLIGHT]).await?;
    let deployment = object(&rendered, "Deployment", "gpuwarden-webhook").unwrap();
    let budget = object(&rendered, "PodDisruptionBudget", "gpuwarden-webhook").unwrap();
    let replicas = deployment["spec"]["replicas"].as_u64();
    let away = budget["spec"]["maxUnavailable"].as_u64();
    assert!(away >= Some(1) && replicas > away, "{replicas:?} {away:?}");
    assert_eq!(budget["spec"]["selector"], deployment["spec"]["selector"]);
    assert_eq!(
        budget["metadata"]["namespace"],
        deployment["metadata"]["namespace"]
    );
    Ok(())
}

/// Returns the rows of the table of the webhook's permissions in SECURITY.md, without its reasons.
fn permissions_of_the_page() -> anyhow::Result<Vec<String>> {
    let page = std::fs::read_to_string(repository("SECURITY.md"))?;
    let rows = page
        .lines()
        .skip_while(|it| !it.starts_with("| of the webhook |"));
    let rows = rows.skip(2).take_while(|it| it.starts_with('|'));
    let row = |row: &str| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, cells @ .., what_for, _] = cells.as_slice() else {
            panic!("{row}");
        };
        assert!(!what_for.is_empty(), "{row}");
        cells.join(" | ")
    };
    Ok(rows.map(row).collect())
}

#[tokio::test]
async fn the_table_of_the_webhooks_permissions_is_what_the_chart_grants() -> anyhow::Result<()> {
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let rendered = helm.template(&["--set", PREFLIGHT]).await?;
    let quoted = |words: &[String]| {
        let words = words.iter().map(|word| format!("`{word}`"));
        words.collect::<Vec<_>>().join(", ")
    };
    let mut granted = Vec::new();
    for (kind, place) in [("Role", "its namespace"), ("ClusterRole", "the cluster")] {
        let role = object(&rendered, kind, "gpuwarden-webhook").unwrap();
        for rule in role["rules"].as_array().unwrap() {
            let groups = texts(&rule["apiGroups"]);
            let resources: Vec<String> = groups
                .iter()
                .flat_map(|group| {
                    let of_group = texts(&rule["resources"]).into_iter();
                    of_group.map(
                        move |resource| match (group.as_str(), resource.split_once('/')) {
                            ("", _) => resource,
                            (group, None) => format!("{resource}.{group}"),
                            (group, Some((resource, part))) => format!("{resource}.{group}/{part}"),
                        },
                    )
                })
                .collect();
            let named = match texts(&rule["resourceNames"]).as_slice() {
                [] => String::new(),
                names => format!(": {}", quoted(names)),
            };
            let verbs = quoted(&texts(&rule["verbs"]));
            granted.push(format!("{}{named} | {place} | {verbs}", quoted(&resources)));
        }
    }
    let page = permissions_of_the_page()?;
    assert_eq!(page, granted, "\n{}", granted.join("\n"));
    Ok(())
}

/// Values that deploy the webhook.
const PREFLIGHT: &str = "global.preflight.enabled=true";

/// Values beside the files of the ladder, so that each object of the chart is rendered.
const MORE: [&str; 5] = [
    "gpuAccess=draAdmin,auditLog.enabled=true,global.preflight.enabled=true",
    "gpuAccess=hostDriver,agent.privileged=true,agent.kernelLog=kmsg",
    "agent.catalog=x,policy.config=x,analysis.rules=x,controller.persistence.enabled=true,\
     quarantine.enabled=true,\
     policy.deviceTaints=true,remediation.templates.a\\.yaml=b,\
     labeler.enabled=true,labeler.config=x,\
     objects.config=x,objects.resources[0].resource=configmaps,\
     controller.extraEnv[0].name=GOOGLE_APPLICATION_CREDENTIALS,controller.extraEnv[0].value=/etc/cloud/key.json,\
     controller.extraVolumes[0].name=cloud,controller.extraVolumes[0].secret.secretName=cloud,\
     controller.extraVolumeMounts[0].name=cloud,controller.extraVolumeMounts[0].mountPath=/etc/cloud,\
     maintenance.config=requests = true",
    "global.preflight.enabled=true,preflight.networkPolicy.namespaces[0]=default,\
     preflight.webhook.validateRequests=true,networkPolicy.apiServers[0]=192.0.2.0/28",
    "janitor.enabled=true,validation.enabled=true,validation.config=x,quarantine.enabled=true,\
     janitor.config=gpuResetController: {enabled: true}",
];

async fn are_accepted(version: Version) -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(version).await? else {
        return Ok(());
    };
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let namespace = testkit::unique("chart");
    plane.namespace(&namespace).await?;
    let admin = "resource.kubernetes.io/admin-access=true";
    plane
        .kubectl(["label", "namespace", &namespace, admin])
        .await?;
    let files: Vec<String> = LADDER.iter().map(|name| values_file(name)).collect();
    let files = files.iter().map(|file| ["--values", file]);
    for values in files.chain(MORE.iter().map(|values| ["--set", values])) {
        let rendered = helm.template(&values).await?;
        // The test shares its control plane: the namespace of the release is its own.
        let rendered = rendered.replace(
            &format!("namespace: {NAMESPACE}\n"),
            &format!("namespace: {namespace}\n"),
        );
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), rendered)?;
        let path = file.path().display().to_string();
        let apply = [
            "apply",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            &path,
        ];
        let warnings = plane.kubectl_warnings(apply).await?;
        assert_eq!(warnings, "", "{values:?}");
    }
    Ok(())
}

#[tokio::test]
async fn each_set_of_values_is_accepted_without_a_warning() -> anyhow::Result<()> {
    are_accepted(Version::V1_37).await
}

#[tokio::test]
async fn each_set_of_values_is_accepted_by_an_older_kubernetes() -> anyhow::Result<()> {
    are_accepted(Version::V1_35).await
}
