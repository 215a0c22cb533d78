//! `gpuwarden janitor-provider`: reboots nodes at a janitor's request over gRPC.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use cli::JanitorProviderSettings;
use janitor::Provider;
use janitor::generic::Generic;
use janitor::server::{self, Callers};
use runtime::logging;
use runtime::tls::{ClientCertificates, ServerTls};
use tokio::net::TcpListener;

use crate::parts;
use crate::tasks::{Tasks, log_failure};

/// Runs until SIGTERM or SIGINT, or until a task fails.
pub(crate) async fn run(settings: JanitorProviderSettings) -> anyhow::Result<ExitCode> {
    let (log, format) = (&settings.log, settings.log_format);
    let metrics = parts::start_logging("janitor-provider", log, format)?;
    let shutdown = parts::until_signal();
    let audit = settings.audit.as_ref();
    let cluster = parts::connect(settings.cluster, audit, "janitor-provider", &metrics).await?;
    let listen = settings.listen;
    let listener = TcpListener::bind(listen).await;
    let listener = listener
        .with_context(|| format!("cannot listen on {listen}; --listen chooses another address"))?;
    let tls = match settings.tls {
        Some(files) => Some(Arc::new(ServerTls::load(files, ClientCertificates::None)?)),
        None => None,
    };
    let callers = match settings.callers {
        Some((audience, allowed)) => Callers::by_token(Arc::clone(&cluster), audience, allowed),
        None => Callers::anybody(),
    };
    let generic = Generic::new(cluster, settings.generic, &settings.namespace);
    let generic = generic.with_resets(settings.resets);
    let provider: Arc<dyn Provider> = Arc::new(generic);
    let (version, address) = (env!("CARGO_PKG_VERSION"), listener.local_addr()?);
    logging::tell(format!(
        "gpuwarden {version} janitor-provider {}: answering janitors on {address}",
        provider.name()
    ));
    let mut tasks = Tasks::default();
    let serving = server::serve(listener, tls, provider, callers, tasks.no_more());
    let port = "the gRPC port";
    tasks.input(port, log_failure(port, serving));
    let ended = tasks.until_shutdown_or_failure(shutdown).await;
    tasks.end_within(WITHIN, async {}).await;
    ended.map(|()| ExitCode::SUCCESS)
}

/// Time for calls in progress at shutdown: the outcome of an interrupted reboot request would be
/// unknown.
const WITHIN: std::time::Duration = std::time::Duration::from_secs(20);
