use std::time::Duration;

use connector::AcceptNodes;
use controller::policy::PolicySource;
use controller::text_place::TextPlace;
use devices::Providers;
use host::kernel_log::KernelLogSpec;

use super::*;
use crate::args::{AgentArgs, ControllerArgs, RunArgs};

fn process() -> ProcessArgs {
    ProcessArgs {
        data_dir: Some("/data".into()),
        ..ProcessArgs::default()
    }
}

fn with_file<T>(file: &str, resolve: impl FnOnce(Option<PathBuf>) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, file).unwrap();
    resolve(Some(path))
}

fn run(file: &str, edit: impl FnOnce(&mut RunArgs)) -> Result<RunSettings, SettingsError> {
    with_file(file, |config| {
        let mut args = RunArgs {
            config,
            process: process(),
            ..RunArgs::default()
        };
        args.node.node_name = Some("n1".into());
        edit(&mut args);
        resolve(args)
    })
}

#[test]
fn a_flag_beats_the_file_and_the_file_the_default() {
    let plain = run("", |_| ()).unwrap();
    assert_eq!(plain.node.socket, Path::new("/data/gpuwarden.sock"));
    assert_eq!(plain.node.accept_nodes, AcceptNodes::Own("n1".to_owned()));
    assert_eq!(
        (plain.process.listen.port(), plain.act.mode),
        (2112, Mode::Observe)
    );
    assert_eq!(
        (plain.node.kernel_log, plain.node.history.as_secs()),
        (KernelLogSpec::Auto, 900)
    );
    let any = run("accept-nodes = \"any\"\n", |_| ()).unwrap();
    assert_eq!(any.node.accept_nodes, AcceptNodes::Any);
    let connector = run("connector-config = \"/c.json\"\n", |_| ()).unwrap();
    assert_eq!(
        connector.act.connector_config.as_deref(),
        Some(Path::new("/c.json"))
    );
    let file =
        "listen = \"127.0.0.1:9\"\nhistory = \"1h\"\nkubeconfig = \"/k\"\nquarantine = true\n";
    let from_file = run(file, |_| ()).unwrap();
    assert_eq!(
        (
            from_file.process.listen.port(),
            from_file.node.history.as_secs()
        ),
        (9, 3600)
    );
    assert_eq!(from_file.act.mode, Mode::Act);
    let flags = run(file, |args| {
        args.process.listen = Some("127.0.0.1:7".parse().unwrap());
        args.act.observe = Some(true);
    })
    .unwrap();
    assert_eq!(
        (flags.process.listen.port(), flags.act.mode),
        (7, Mode::Observe)
    );
}

#[test]
fn catalogue_files_are_one_or_several() {
    let files = |file: &str, given: &[&str]| {
        let given: Vec<PathBuf> = given.iter().map(PathBuf::from).collect();
        let given = Some(given).filter(|given| !given.is_empty());
        let settings = run(file, |args| args.node.catalog = given).unwrap();
        let shown = settings
            .node
            .catalog
            .iter()
            .map(|file| file.display().to_string());
        shown.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(files("", &[]), "");
    assert_eq!(files("catalog = \"/a\"\n", &[]), "/a");
    assert_eq!(files("catalog = [\"/a\", \"/b\"]\n", &[]), "/a /b");
    assert_eq!(files("catalog = \"/a\"\n", &["/c", "/d"]), "/c /d");
}

#[test]
fn a_policy_is_a_file_or_a_config_map() {
    let config_map = |namespace: &str, name: &str, key: &str| {
        PolicySource::Place(TextPlace::ConfigMap {
            namespace: namespace.into(),
            name: name.into(),
            key: key.into(),
        })
    };
    let file = |path: &str| PolicySource::Place(TextPlace::File(path.into()));
    for (text, expected) in [
        ("p.toml", Some(file("p.toml"))),
        ("./configmap:a", Some(file("./configmap:a"))),
        ("configmap:ns/p", Some(config_map("ns", "p", "config.toml"))),
        (
            "configmap:ns/p/a.toml",
            Some(config_map("ns", "p", "a.toml")),
        ),
        ("configmap:p", None),
        ("configmap:ns/p/a/b", None),
        ("configmap:/p", None),
        ("configmap:ns/p?x=y", None),
    ] {
        assert_eq!(act::policy(text).ok(), expected, "{text}");
    }
    let error = run("", |args| args.act.policy = Some("configmap:a/b".into()));
    assert!(error.unwrap_err().to_string().contains("--kubeconfig"));
}

#[test]
fn what_is_wrong_is_named() {
    type Edit = fn(&mut RunArgs);
    let table: [(&str, Edit, &str); 12] = [
        (
            "",
            |args| args.node.node_name = Some(String::new()),
            "--node-name \"\": is empty",
        ),
        (
            "node-name = \"a b\"\n",
            |args| args.node.node_name = None,
            "--node-name \"a b\"",
        ),
        ("accept-nodes = \"all\"\n", |_| (), "--accept-nodes \"all\""),
        (
            "lisen = \"x\"\n",
            |_| (),
            "c.toml:1: unknown key 'lisen'; did you mean 'listen'?",
        ),
        // Keys of other roles are unknown.
        (
            "\ncontroller = \"x\"\n",
            |_| (),
            "c.toml:2: unknown key 'controller'",
        ),
        ("\n\nlisten = \"nowhere\"\n", |_| (), "c.toml:3:"),
        (
            "",
            |args| args.node.history = Some("soon".into()),
            "--history \"soon\"",
        ),
        (
            "",
            |args| args.node.history = Some("-5m".into()),
            "--history",
        ),
        (
            "",
            |args| args.process.log_format = Some("xml".into()),
            "--log-format",
        ),
        ("", |args| args.act.quarantine = Some(true), "--kubeconfig"),
        (
            "store-size = \"63MiB\"\n",
            |_| (),
            "--store-size \"63MiB\": is less than 64MiB",
        ),
        ("", |args| args.act.dry_run = Some(true), "--dry-run"),
    ];
    for (file, edit, expected) in table {
        let error = run(file, edit).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_wrong_type_is_named_with_its_key_and_what_would_be_right() {
    for (file, key, remedy) in [
        ("listen = \"localhost:2112\"", "listen", "127.0.0.1:2112"),
        ("\nretention = 30", "retention", "\"30d\""),
        ("store-size = 1024", "store-size", "\"512MiB\""),
        (
            "circuit-breaker = \"yes\"",
            "circuit-breaker",
            "true or false",
        ),
        (
            "circuit-breaker-enabled = 1",
            "circuit-breaker-enabled",
            "true or false",
        ),
        ("catalog = 7", "catalog", "[\"a\", \"b\"]"),
        ("policy = 7", "policy", "text in quotes"),
        (
            "nvml-ignored-xids = [\"a\"]",
            "nvml-ignored-xids[0]",
            "\"a\"; write a whole number from 0",
        ),
    ] {
        let line = 1 + file.matches('\n').count();
        let error = run(file, |_| ()).unwrap_err().to_string();
        let place = format!("c.toml:{line}: {key} is ");
        assert!(error.contains(&place) && error.contains(remedy), "{error}");
    }
    let controller = with_file("agents = [\"a\",\n1]", |config| {
        let args = ControllerArgs::default();
        resolve(ControllerArgs { config, ..args })
    });
    let error = controller.unwrap_err().to_string();
    assert!(
        error.contains("agents[1] is 1; write text in quotes"),
        "{error}"
    );
    let error =
        <crate::args::Cli as clap::Parser>::try_parse_from(["gpuwarden", "run", "--listen", "foo"]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("such as 127.0.0.1:2112"), "{error}");
}

#[test]
fn clients_take_a_file_of_any_role_and_refuse_a_key_of_none() {
    let read = |file: &str| with_file(file, |path| ClientSettings::read(path.as_deref()));
    let file = "controller = \"https://c:1\"\ngrpc-listen = \"0.0.0.0:1\"\nhistory = \"soon\"\n\
                server = \"http://c:2112\"\nkubeconfig = \"/k\"\nnamespace = \"n\"\n";
    let settings = read(file).unwrap();
    assert_eq!(settings.server.as_deref(), Some("http://c:2112"));
    assert_eq!(
        (
            settings.kubeconfig.as_deref(),
            settings.namespace.as_deref()
        ),
        (Some(Path::new("/k")), Some("n"))
    );
    let error = read("\nsever = \"http://c:2112\"\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("c.toml:2: unknown key 'sever'; did you mean 'server'?"),
        "{error}"
    );
    // A server accepts the keys for its clients.
    assert!(run("server = \"http://c:2112\"\n", |_| ()).is_ok());
}

#[test]
fn the_examples_are_understood() {
    let example = |name: &str| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        Some(root.join(name))
    };
    resolve(RunArgs {
        config: example("gpuwarden.toml"),
        ..RunArgs::default()
    })
    .unwrap();
    resolve(AgentArgs {
        config: example("agent.toml"),
        ..AgentArgs::default()
    })
    .unwrap();
    let controller = resolve(ControllerArgs {
        config: example("controller.toml"),
        ..ControllerArgs::default()
    });
    assert_eq!(controller.unwrap().ingest.tokens.agents.len(), 1);
}

#[test]
fn dry_run_stands_beside_quarantine() {
    let settings = run("", |args| {
        args.act.kubeconfig = Some("/k".into());
        args.act.quarantine = Some(true);
        args.act.dry_run = Some(true);
    })
    .unwrap();
    assert_eq!(settings.act.mode, Mode::DryRun);
}

#[test]
fn a_repair_stands_beside_a_drain_and_its_file_and_templates_are_read_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("remediation.toml");
    let repairs = |edit: &dyn Fn(&mut ActArgs)| {
        let mut run = RunArgs::default();
        (run.act.kubeconfig, run.act.quarantine) = (Some("/k".into()), Some(true));
        edit(&mut run.act);
        resolve(run)
            .map(|settings| {
                settings
                    .act
                    .remediation
                    .map(|remediation| remediation.actions.len())
            })
            .map_err(|error| error.to_string())
    };
    let all = |act: &mut ActArgs| (act.drain, act.remediate) = (Some(true), Some(true));
    assert_eq!(repairs(&|act| act.drain = Some(true)), Ok(None));
    assert_eq!(repairs(&all), Ok(Some(4)));
    let alone = repairs(&|act| act.remediate = Some(true)).unwrap_err();
    assert!(alone.contains("--remediate needs --drain"), "{alone}");
    let file_alone = repairs(&|act| act.remediate_config = Some("/r".into())).unwrap_err();
    assert!(
        file_alone.contains("--remediate-config needs --remediate"),
        "{file_alone}"
    );
    let with_file = |act: &mut ActArgs| {
        all(act);
        act.remediate_config = Some(path.clone());
    };
    let action = format!(
        "[template]\nmountPath = {:?}\n[remediationActions.RESTART_BM]\napiGroup = \"g\"\n\
         version = \"v1\"\nkind = \"K\"\ncompleteConditionType = \"Done\"\n\
         equivalenceGroup = \"restart\"\ntemplateFileName = \"t.yaml\"\n",
        directory.path()
    );
    std::fs::write(&path, action).unwrap();
    let absent = repairs(&with_file).unwrap_err();
    assert!(absent.contains("t.yaml cannot be read"), "{absent}");
    let template = "apiVersion: g/v1\nkind: K\nmetadata: {name: \"r-{{ .HealthEventID }}\"}\n";
    std::fs::write(directory.path().join("t.yaml"), template).unwrap();
    assert_eq!(repairs(&with_file), Ok(Some(1)));
}

#[test]
fn a_drain_stands_beside_quarantine_and_its_file_is_read_at_once() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "evictionTimeoutInSeconds = \"7\"").unwrap();
    let path = file.path().to_owned();
    let drains = |edit: &dyn Fn(&mut ActArgs)| {
        run("", |args| {
            args.act.kubeconfig = Some("/k".into());
            edit(&mut args.act);
        })
        .map(|settings| {
            settings
                .act
                .drain
                .map(|drain| drain.eviction_grace.as_secs())
        })
        .map_err(|error| error.to_string())
    };
    assert_eq!(drains(&|act| act.quarantine = Some(true)), Ok(None));
    let both = |act: &mut ActArgs| (act.quarantine, act.drain) = (Some(true), Some(true));
    assert_eq!(drains(&both), Ok(Some(300)));
    let with_file = |act: &mut ActArgs| {
        both(act);
        act.drain_config = Some(path.clone());
    };
    assert_eq!(drains(&with_file), Ok(Some(7)));
    let alone = drains(&|act| act.drain = Some(true)).unwrap_err();
    assert!(alone.contains("--drain needs --quarantine"), "{alone}");
    let file_alone = drains(&|act| act.drain_config = Some("/d".into())).unwrap_err();
    assert!(
        file_alone.contains("--drain-config needs --drain"),
        "{file_alone}"
    );
    let absent = drains(&|act| {
        both(act);
        act.drain_config = Some("/none/d.toml".into());
    });
    assert!(
        absent
            .unwrap_err()
            .contains("\"/none/d.toml\": cannot be read")
    );
    std::fs::write(&file, "modes = 1").unwrap();
    let wrong = drains(&with_file).unwrap_err();
    assert!(wrong.contains(":1: unknown key 'modes'"), "{wrong}");
}

#[test]
fn an_agent_knows_its_controller_and_can_say_who_it_is() {
    type Edit = fn(&mut DeliveryArgs);
    let agent = |edit: fn(&mut DeliveryArgs)| {
        let mut delivery = DeliveryArgs {
            controller: Some("https://c:50051".into()),
            tls_ca: Some("/ca".into()),
            tls_cert: Some("/cert".into()),
            tls_key: Some("/key".into()),
            ..DeliveryArgs::default()
        };
        edit(&mut delivery);
        resolve(AgentArgs {
            config: None,
            delivery,
            gpu: GpuArgs::default(),
            node: NodeArgs {
                node_name: Some("n1".into()),
                ..NodeArgs::default()
            },
            devices: DeviceArgs::default(),
            process: process(),
        })
    };
    assert_eq!(agent(|_| ()).unwrap().delivery.outbox_size, 64 << 20);
    agent(|args| {
        (args.tls_cert, args.tls_key) = (None, None);
        args.token_file = Some("/token".into());
    })
    .unwrap();
    let table: [(Edit, &str); 5] = [
        (|args| args.controller = None, "--controller"),
        (|args| args.tls_ca = None, "--tls-ca"),
        (|args| args.tls_key = None, "go together"),
        (
            |args| (args.tls_cert, args.tls_key) = (None, None),
            "nothing identifies this node",
        ),
        (
            |args| args.outbox_size = Some("1MiB".into()),
            "--outbox-size",
        ),
    ];
    for (edit, expected) in table {
        let error = agent(edit).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let file = "controller = \"http://127.0.0.1:1\"\noutbox-size = \"16MiB\"\nnode-name = \"n1\"\n";
    let from_file = with_file(file, |config| {
        resolve(AgentArgs {
            config,
            process: process(),
            ..AgentArgs::default()
        })
    });
    assert_eq!(from_file.unwrap().delivery.outbox_size, 16 << 20);
}

#[test]
fn a_controller_can_tell_who_calls() {
    type Edit = fn(&mut IngestArgs);
    let controller = |kubeconfig: bool, edit: fn(&mut IngestArgs)| {
        let mut args = ControllerArgs {
            process: process(),
            ..ControllerArgs::default()
        };
        args.act.kubeconfig = kubeconfig.then(|| "/k".into());
        args.ingest.grpc_tls_cert = Some("/cert".into());
        args.ingest.grpc_tls_key = Some("/key".into());
        edit(&mut args.ingest);
        resolve(args)
    };
    let plain = controller(true, |_| ()).unwrap().ingest;
    assert_eq!(plain.listen.to_string(), "0.0.0.0:50051");
    assert_eq!(plain.tokens.audience, "gpuwarden");
    assert_eq!(plain.tokens.agents[0].name, "gpuwarden-agent");
    // The default namespace of agents is gpuwarden's own.
    let mut elsewhere = ControllerArgs {
        process: process(),
        ..ControllerArgs::default()
    };
    elsewhere.act.namespace = Some("gpu-health".into());
    elsewhere.ingest.grpc_insecure = Some(true);
    let elsewhere = resolve(elsewhere).unwrap().ingest;
    assert_eq!(
        elsewhere.tokens.agents[0].to_string(),
        "gpu-health/gpuwarden-agent"
    );
    let named = controller(true, |args| {
        args.central_monitors = Some(vec!["m/cloud".into(), "m/objects".into()]);
    });
    assert_eq!(named.unwrap().ingest.tokens.central.len(), 2);
    let own = |service: &'static str, lifetime| Transport::Tls {
        own: ServerCertificate::Own {
            service: service.into(),
            lifetime: Duration::from_secs(lifetime),
        },
        clients: None,
    };
    let issued = controller(true, |args| *args = IngestArgs::default());
    let days = 90 * 24 * 3600;
    assert_eq!(
        issued.unwrap().ingest.transport,
        own("gpuwarden-controller", days)
    );
    let issued = controller(true, |args| {
        *args = IngestArgs {
            grpc_service: Some("c".into()),
            certificate_lifetime: Some("1m".into()),
            ..IngestArgs::default()
        };
    });
    assert_eq!(issued.unwrap().ingest.transport, own("c", 60));
    let open: fn(&mut IngestArgs) = |args| {
        *args = IngestArgs {
            grpc_insecure: Some(true),
            ..IngestArgs::default()
        };
    };
    let insecure = controller(false, open).unwrap().ingest;
    assert_eq!(insecure.transport, Transport::Open);
    assert_eq!(insecure.listen.to_string(), "127.0.0.1:50051");
    let table: [(Edit, &str); 8] = [
        (|_| (), "--grpc-client-ca"),
        (
            |args| args.grpc_service = Some("a.b".into()),
            "--grpc-service",
        ),
        (
            |args| args.certificate_lifetime = Some("9s".into()),
            "shorter than 10s",
        ),
        (|args| args.grpc_tls_key = None, "go together"),
        (
            |args| (args.grpc_tls_cert, args.grpc_tls_key) = (None, None),
            "needs a certificate",
        ),
        (|args| args.grpc_insecure = Some(true), "exclude each other"),
        (
            |args| {
                *args = IngestArgs {
                    grpc_insecure: Some(true),
                    grpc_listen: Some("0.0.0.0:50051".parse().unwrap()),
                    ..IngestArgs::default()
                };
            },
            "other machines",
        ),
        (
            |args| {
                args.grpc_client_ca = Some("/ca".into());
                args.agents = Some(vec!["agent".into()]);
            },
            "--agents \"agent\"",
        ),
    ];
    for (edit, expected) in table {
        let error = controller(false, edit).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn controllers_elect_a_leader_where_they_write_in_the_cluster() {
    type Edit = fn(&mut ControllerArgs);
    let elects = |edit: Edit| {
        let mut args = ControllerArgs {
            process: process(),
            ..ControllerArgs::default()
        };
        args.ingest.grpc_insecure = Some(true);
        args.act.kubeconfig = Some("/k".into());
        edit(&mut args);
        resolve(args).map(|settings| settings.leader_elect)
    };
    let table: [(Edit, bool); 4] = [
        (|_| (), false),
        (|args| args.act.quarantine = Some(true), true),
        (|args| args.election.leader_elect = Some(true), true),
        (
            |args| {
                args.act.quarantine = Some(true);
                args.election.leader_elect = Some(false);
            },
            false,
        ),
    ];
    for (index, (edit, expected)) in table.into_iter().enumerate() {
        assert_eq!(elects(edit).unwrap(), expected, "row {index}");
    }
    let dry_run: Edit = |args| {
        args.act.quarantine = Some(true);
        args.act.dry_run = Some(true);
    };
    assert!(!elects(dry_run).unwrap());
    let without: Edit = |args| {
        args.act.kubeconfig = None;
        args.election.leader_elect = Some(true);
    };
    let error = elects(without).unwrap_err().to_string();
    assert!(error.contains("needs a cluster"), "{error}");
}

#[test]
fn the_brake_is_on_unless_it_is_switched_off_under_either_name() {
    let plain = run("", |_| ()).unwrap().act;
    assert!(plain.circuit_breaker);
    assert_eq!(
        plain.gpu_node_label.to_string(),
        "nvidia.com/gpu.present=true"
    );
    assert_eq!(plain.namespace, "gpuwarden");
    for file in [
        "circuit-breaker = false\n",
        "circuit-breaker-enabled = false\n",
    ] {
        assert!(!run(file, |_| ()).unwrap().act.circuit_breaker, "{file}");
    }
    let flag = run("circuit-breaker = false\nnamespace = \"a\"\n", |args| {
        args.act.circuit_breaker = Some(true);
    });
    let flag = flag.unwrap().act;
    assert!(flag.circuit_breaker && flag.namespace == "a");
    for (file, expected) in [
        ("gpu-node-label = \"gpu\"\n", "--gpu-node-label \"gpu\""),
        ("namespace = \"a/b\"\n", "--namespace \"a/b\""),
        ("namespace = \"Team\"\n", "--namespace \"Team\""),
        ("policy = \"preset:mars\"\n", "--policy \"preset:mars\""),
    ] {
        let error = run(file, |_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_device_api_is_read_over_the_network_with_certificates_or_on_this_machine() {
    let network = |file: &str| run(file, |_| ()).map(|settings| settings.devices.network);
    assert_eq!(network("").unwrap(), None);
    let open = network("device-api-listen = \"127.0.0.1:9500\"\n").unwrap();
    assert_eq!(open.unwrap().tls, None);
    let listen = "device-api-listen = \"0.0.0.0:9500\"\n";
    let own = "device-api-tls-cert = \"/c\"\ndevice-api-tls-key = \"/k\"\n";
    let clients = "device-api-client-ca = \"/ca\"\n";
    let secured = network(&format!("{listen}{own}{clients}")).unwrap();
    let (pair, authority) = secured.unwrap().tls.unwrap();
    assert_eq!(
        (pair.key.as_path(), authority.as_path()),
        (Path::new("/k"), Path::new("/ca"))
    );
    for (file, expected) in [
        (
            listen.to_owned(),
            "--device-api-listen \"0.0.0.0:9500\": can be reached",
        ),
        (format!("{listen}{own}"), "--device-api-client-ca"),
        (format!("{listen}{clients}"), "needs TLS"),
        (format!("{own}{clients}"), "for --device-api-listen"),
        (clients.to_owned(), "for --device-api-listen"),
        (
            format!("{listen}{clients}device-api-tls-key = \"/k\"\n"),
            "go together",
        ),
        (
            "device-api-listen = \"gpu-7:9500\"\n".to_owned(),
            "write ADDRESS:PORT",
        ),
    ] {
        let error = network(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{file}: {error}");
    }
}

#[test]
fn the_device_api_is_in_the_data_directory_and_open_to_operators_unless_told_otherwise() {
    let plain = run("", |_| ()).unwrap().devices;
    assert_eq!(plain.socket, Path::new("/data/device-api.sock"));
    assert_eq!(
        (plain.providers, plain.job_gate),
        (Providers::Operators, None)
    );
    let file = "device-api = \"/d\"\ndevice-api-providers = \"any\"\njob-gate = \"/g\"\n";
    let told = run(file, |args| args.devices.job_gate = Some("/h".into()))
        .unwrap()
        .devices;
    assert_eq!(
        (told.socket.as_path(), told.providers),
        (Path::new("/d"), Providers::Any)
    );
    assert_eq!(told.job_gate.as_deref(), Some(Path::new("/h")));
    let refused = run("device-api-providers = \"all\"\n", |_| ()).unwrap_err();
    assert!(
        refused.to_string().contains("neither operators nor any"),
        "{refused}"
    );
}
