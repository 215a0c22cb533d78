//! `gpuwarden webhook`: injects preflight checks into pods, and maintains the objects that their
//! gangs need.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use certificates::CertificateKeeper;
use cli::{Reached, WebhookSettings};
use cluster::Cluster;
use connector::{AcceptNodes, Connector, Direct};
use runtime::logging;
use runtime::metrics::Metrics;
use runtime::tls::{CertificateFiles, ClientCertificates, ServerTls};
use tokio::net::TcpListener;
use tokio::sync::watch;
use webhook::admission::Admission;
use webhook::discoveries::Discoveries;
use webhook::facts::Facts;
use webhook::failures;
use webhook::gangs::GangKeeper;
use webhook::registration::{self, Asked, NAME, Registered, Registration, WebhookAddress};
use webhook::rendezvous::Rendezvous;
use webhook::requests::RequestAdmission;
use webhook::server::WebhookServer;

use crate::parts;
use crate::tasks::Tasks;

/// Port of the webhook's Service.
const SERVICE_PORT: u16 = 443;

/// Runs until SIGTERM or SIGINT, or until a task fails.
pub(crate) async fn run(settings: WebhookSettings) -> anyhow::Result<ExitCode> {
    let metrics = parts::start_logging("webhook", &settings.log, settings.log_format)?;
    for what in &settings.preflight.warnings {
        tracing::warn!(%what, "a key of the configuration has no effect, or a different one than in NVSentinel");
    }
    let shutdown = parts::until_signal();
    let (options, audit) = (settings.cluster.clone(), settings.audit.as_ref());
    let cluster = parts::connect(options, audit, "webhook", &metrics).await?;
    let config = Arc::new(settings.preflight.clone());
    let mut tasks = Tasks::default();

    let listener = listen(settings.listen, "--listen").await?;
    let open = listen(settings.metrics_listen, "--metrics-listen").await?;
    let (facts, following) = Facts::new(Arc::clone(&cluster), tasks.done());
    tasks.worker("the device classes", following);
    let discoveries = Discoveries::new(config.discovery.clone());
    let configs = discoveries
        .clone()
        .follow(Arc::clone(&cluster), tasks.done());
    tasks.worker("the PreflightConfigs", configs);
    let connector = connector(&settings, &metrics)?;
    let by = discoveries.clone();
    let mut admission = Admission::new(Arc::clone(&config), discoveries, facts.clone(), &metrics);
    let certificate = Certificate::open(&settings, &cluster, &mut tasks).await?;
    if let Some(own) = &certificate.own {
        let mut rendezvous = Rendezvous::new(
            Arc::clone(&cluster),
            &own.gang_key,
            facts.clone(),
            by,
            config.topologies.clone(),
        );
        if let Some(connector) = &connector {
            rendezvous = rendezvous.with_reports(connector.clone(), Arc::clone(&config));
        }
        let at = serve_pods(&settings, own, rendezvous, &certificate.tls, &mut tasks).await?;
        let authorities = own.authorities.clone();
        admission = admission.with_rendezvous(at, authorities, connector.is_some());
    }
    let failed = failures::tell(Arc::clone(&cluster), Arc::clone(&config), tasks.done());
    tasks.worker("the Events of failed checks", failed);
    if config.coordination.enabled {
        let me = identity(&listener)?;
        let cluster = Arc::clone(&cluster);
        let gangs = GangKeeper::new(cluster, facts, &admission, &settings.namespace, me)
            .with_connector(connector);
        tasks.writer("the gangs", gangs.run(tasks.done()));
    }
    let requests = settings
        .validates_requests
        .then(|| RequestAdmission::new(Arc::clone(&cluster)));
    let server = WebhookServer::new(admission, metrics).with_requests(requests);
    greet(&settings, &listener, &open)?;
    let (serving, cancel, drain) = (server.clone(), tasks.no_more(), settings.drain);
    tasks.input("the webhook", async move {
        serving
            .serve(listener, certificate.tls, drain, cancel)
            .await;
    });
    let serving = server.serve_metrics(open, tasks.done());
    let serving = serving.context("cannot serve probes and metrics")?;
    tasks.worker("the metrics", serving);
    let ended = tasks.until_shutdown_or_failure(shutdown).await;
    // Covers the drain and a request that arrives at its end.
    tasks
        .end_within(drain + Duration::from_secs(2), async {})
        .await;
    ended.map(|()| ExitCode::SUCCESS)
}

/// Certificate of the webhook.
struct Certificate {
    tls: Arc<ServerTls>,
    /// `None` if the certificate is provided from elsewhere.
    own: Option<OwnCertificate>,
}

/// A certificate that the webhook issues itself.
struct OwnCertificate {
    authorities: watch::Receiver<String>,
    gang_key: String,
    /// DNS name or address in the certificate.
    host: String,
}

impl Certificate {
    /// Opens the configured certificate. For one that the webhook issues, starts the tasks that
    /// renew it and maintain the registration.
    async fn open(
        settings: &WebhookSettings,
        cluster: &Arc<Cluster>,
        tasks: &mut Tasks,
    ) -> anyhow::Result<Self> {
        let (place, host, ends_with_us) = match &settings.reached {
            Reached::Elsewhere(files) => {
                let tls = server_tls(files.clone())?;
                return Ok(Self { tls, own: None });
            }
            Reached::Service(name) => {
                let namespace = settings.namespace.clone();
                let host = format!("{name}.{namespace}.svc");
                let place = WebhookAddress::Service {
                    namespace,
                    name: name.clone(),
                    port: SERVICE_PORT,
                };
                (place, host, false)
            }
            Reached::Url { url, host, keep } => {
                (WebhookAddress::Url(url.clone()), host.clone(), !keep)
            }
        };
        let plan = registration::certificate_plan(&host, settings.certificate_lifetime);
        let registered = Registered(Arc::clone(cluster));
        let shared = Arc::clone(cluster);
        let keeper = CertificateKeeper::open(shared, &settings.namespace, plan, registered).await?;
        let tls = server_tls(keeper.files())?;
        let own = OwnCertificate {
            authorities: keeper.authorities(),
            gang_key: keeper.random_key(),
            host,
        };
        let registration = Registration {
            cluster: Arc::clone(cluster),
            place,
            asked: Asked::Pods {
                config: Arc::new(settings.preflight.clone()),
                failure_policy: settings.failure_policy,
                own_namespace: settings.namespace.clone(),
            },
            authorities: keeper.authorities(),
            ends_with_us,
        };
        if settings.validates_requests {
            let of_requests = Registration {
                cluster: Arc::clone(cluster),
                place: registration.place.clone(),
                asked: Asked::Requests,
                authorities: keeper.authorities(),
                ends_with_us,
            };
            let name = "the registration for requests";
            tasks.input(name, of_requests.run(tasks.no_more()));
        }
        // At shutdown the registration is removed first: the server still answers for a while.
        tasks.input("the registration", registration.run(tasks.no_more()));
        tasks.worker("the certificate", keeper.run(tasks.done()));
        Ok(Self {
            tls,
            own: Some(own),
        })
    }
}

/// Returns the connector that sends the reports of pods to the controller, if one is configured.
fn connector(settings: &WebhookSettings, metrics: &Metrics) -> anyhow::Result<Option<Connector>> {
    let Some(delivery) = &settings.delivery else {
        return Ok(None);
    };
    let channel = parts::controller_channel(delivery)?;
    let header = connector::token_header(delivery.token_file.clone());
    // This process has no local users whose events could be for a node.
    let nobody = AcceptNodes::Own(String::new());
    let direct = Direct::new(channel, header);
    Ok(Some(Connector::new(direct, nobody, metrics, parts::CLOCK)))
}

/// Starts the server for the pods' requests and reports. Returns its URL.
async fn serve_pods(
    settings: &WebhookSettings,
    own: &OwnCertificate,
    rendezvous: Rendezvous,
    tls: &Arc<ServerTls>,
    tasks: &mut Tasks,
) -> anyhow::Result<String> {
    let listener = listen(settings.rendezvous_listen, "--rendezvous-listen").await?;
    let port = listener.local_addr()?.port();
    let host = if own.host.contains(':') {
        format!("[{}]", own.host)
    } else {
        own.host.clone()
    };
    let url = settings.rendezvous_url.clone();
    let serving = rendezvous.serve(listener, Arc::clone(tls), tasks.no_more());
    tasks.input("the rendezvous", serving);
    Ok(url.unwrap_or_else(|| format!("https://{host}:{port}")))
}

fn server_tls(files: CertificateFiles) -> anyhow::Result<Arc<ServerTls>> {
    Ok(Arc::new(ServerTls::load(files, ClientCertificates::None)?))
}

async fn listen(address: std::net::SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    let listening = TcpListener::bind(address).await;
    listening.with_context(|| format!("cannot listen on {address}; {flag} chooses another address"))
}

/// Returns a name that is unique across processes: host, port, process and time.
fn identity(listener: &TcpListener) -> anyhow::Result<String> {
    let host = host::identity::host_name().unwrap_or_else(|| "webhook".to_owned());
    let port = listener.local_addr()?.port();
    Ok(format!(
        "{host}-{port}-{}-{}",
        std::process::id(),
        parts::CLOCK().as_millisecond()
    ))
}

/// Prints the greeting on stdout.
fn greet(
    settings: &WebhookSettings,
    listener: &TcpListener,
    open: &TcpListener,
) -> anyhow::Result<()> {
    let (address, open) = (listener.local_addr()?, open.local_addr()?);
    let version = env!("CARGO_PKG_VERSION");
    let reached = match &settings.reached {
        Reached::Service(name) => format!("{NAME}, by the Service {name}"),
        Reached::Url { url, .. } => format!("{NAME}, by {url}"),
        Reached::Elsewhere(_) => "somebody else's".to_owned(),
    };
    let checks: Vec<&str> = settings
        .preflight
        .checks
        .iter()
        .map(|check| &*check.name)
        .collect();
    logging::tell(format!(
        "gpuwarden {version} webhook: preflight checks for pods with GPUs\n\
         admission    https://{address}/mutate\n\
         metrics      http://{open}/metrics\n\
         registration {reached}\n\
         checks       {}",
        checks.join(", ")
    ));
    Ok(())
}
