//! Arguments of the network between agents and their controller.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::common::address;
use super::roles::group;

group! {
    /// Delivery of events from a node to its controller.
    pub(crate) struct DeliveryArgs {
        /// Address of the controller, such as `https://controller.example:50051`.
        #[arg(long, env = "GPUWARDEN_CONTROLLER", value_name = "URL")]
        pub controller: Option<String>,
        /// Certificates of the authority of the controller's certificate (PEM).
        #[arg(long, env = "GPUWARDEN_TLS_CA", value_name = "FILE")]
        pub tls_ca: Option<PathBuf>,
        /// Certificate that identifies this node (PEM); read again when it changes.
        #[arg(long, env = "GPUWARDEN_TLS_CERT", value_name = "FILE")]
        pub tls_cert: Option<PathBuf>,
        /// Key of the certificate (PEM).
        #[arg(long, env = "GPUWARDEN_TLS_KEY", value_name = "FILE")]
        pub tls_key: Option<PathBuf>,
        /// `ServiceAccount` token that identifies this node, instead of a certificate; read for every
        /// request.
        #[arg(long, env = "GPUWARDEN_TOKEN_FILE", value_name = "FILE")]
        pub token_file: Option<PathBuf>,
        /// Largest size of the events that wait for the controller [default: 64MiB].
        #[arg(long, env = "GPUWARDEN_OUTBOX_SIZE", value_name = "SIZE")]
        pub outbox_size: Option<String>,
    }
}

group! {
    /// Port of a controller for events.
    pub(crate) struct IngestArgs {
        /// Address on which agents and central monitors report [default: 0.0.0.0:50051; with
        /// --grpc-insecure 127.0.0.1:50051].
        #[arg(long, env = "GPUWARDEN_GRPC_LISTEN", value_name = "ADDRESS:PORT",
              value_parser = address)]
        pub grpc_listen: Option<SocketAddr>,
        /// Certificate of that address (PEM); read again when it changes [default: with a cluster, a
        /// certificate of its own, kept in the Secret gpuwarden-controller-tls and renewed in time.
        /// Its authorities are in the `ConfigMap` gpuwarden-ca, for the --tls-ca of agents].
        #[arg(long, env = "GPUWARDEN_GRPC_TLS_CERT", value_name = "FILE")]
        pub grpc_tls_cert: Option<PathBuf>,
        /// Key of the certificate (PEM).
        #[arg(long, env = "GPUWARDEN_GRPC_TLS_KEY", value_name = "FILE")]
        pub grpc_tls_key: Option<PathBuf>,
        /// Service of that address in the namespace of --namespace: the controller's own certificate
        /// is for its DNS names [default: gpuwarden-controller].
        #[arg(long, env = "GPUWARDEN_GRPC_SERVICE", value_name = "NAME")]
        pub grpc_service: Option<String>,
        /// Lifetime of the controller's own certificates, at least 10s [default: 90d].
        #[arg(long, env = "GPUWARDEN_CERTIFICATE_LIFETIME", value_name = "DURATION")]
        pub certificate_lifetime: Option<String>,
        /// Certificates of the authority of nodes' certificates (PEM). A certificate identifies the
        /// node in its common name `system:node:NAME`, or in its only DNS name.
        #[arg(long, env = "GPUWARDEN_GRPC_CLIENT_CA", value_name = "FILE")]
        pub grpc_client_ca: Option<PathBuf>,
        /// No TLS and no authentication: on this machine only, for tests.
        #[arg(long, env = "GPUWARDEN_GRPC_INSECURE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub grpc_insecure: Option<bool>,
        /// Audience that `ServiceAccount` tokens must have [default: gpuwarden].
        #[arg(long, env = "GPUWARDEN_TOKEN_AUDIENCE", value_name = "AUDIENCE")]
        pub token_audience: Option<String>,
        /// `ServiceAccount`s whose pods report for the node that they run on [default:
        /// gpuwarden-agent in the namespace of --namespace].
        #[arg(long, env = "GPUWARDEN_AGENTS", value_name = "NAMESPACE/NAME", value_delimiter = ',')]
        pub agents: Option<Vec<String>>,
        /// `ServiceAccount`s that report for any node, such as monitors of clouds [default: none].
        #[arg(long, env = "GPUWARDEN_CENTRAL_MONITORS", value_name = "NAMESPACE/NAME",
              value_delimiter = ',')]
        pub central_monitors: Option<Vec<String>>,
    }
}
