//! Arguments of the labels of nodes. The names after the first are those of NVSentinel's labeler.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::roles::group;

group! {
    /// Labels of nodes.
    pub(crate) struct LabelArgs {
        /// Label nodes by their software and devices, as `NVSentinel`'s labeler does.
        #[arg(long, env = "GPUWARDEN_LABEL_NODES", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub label_nodes: Option<bool>,
        /// With --label-nodes: values of the label `app` of pods with DCGM [default:
        /// nvidia-dcgm,nvidia-dcgm-dra].
        #[arg(long, env = "GPUWARDEN_DCGM_APP_LABEL", value_name = "VALUE,...")]
        pub dcgm_app_label: Option<String>,
        /// Values of the label `app` of pods that install the driver [default:
        /// nvidia-driver-daemonset].
        #[arg(long, env = "GPUWARDEN_DRIVER_APP_LABEL", value_name = "VALUE,...")]
        pub driver_app_label: Option<String>,
        /// Values of the label `k8s-app` of pods that install the driver on GKE [default:
        /// nvidia-driver-installer].
        #[arg(long, env = "GPUWARDEN_GKE_INSTALLER_APP_LABEL", value_name = "VALUE,...")]
        pub gke_installer_app_label: Option<String>,
        /// Label of nodes that also tells that they run Kata Containers [default:
        /// katacontainers.io/kata-runtime alone].
        #[arg(long, env = "GPUWARDEN_KATA_LABEL", value_name = "KEY")]
        pub kata_label: Option<String>,
        /// Label every node with GPUs as one with a driver, whatever pods it has.
        #[arg(long, env = "GPUWARDEN_ASSUME_DRIVER_INSTALLED", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub assume_driver_installed: Option<bool>,
        /// Keep the label with DCGM's version on nodes without a pod of DCGM.
        #[arg(long, env = "GPUWARDEN_ASSUME_DCGM_AVAILABLE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub assume_dcgm_available: Option<bool>,
        /// Wait until the pod of DCGM is ready before a node gets the label for the first time
        /// [default: true].
        #[arg(long, env = "GPUWARDEN_REQUIRE_DCGM_READY_FOR_BOOTSTRAP", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub require_dcgm_ready_for_bootstrap: Option<bool>,
        /// Version of DCGM on nodes whose pod tells none, such as by an image that is named by its
        /// digest [default: none; such nodes keep their label].
        #[arg(long, env = "GPUWARDEN_DCGM_VERSION", value_name = "3.x|4.x")]
        pub dcgm_version: Option<String>,
        /// Classes of devices to count: `NVSentinel`'s file, in TOML [default: GPUs and NICs, as in
        /// its chart].
        #[arg(long, env = "GPUWARDEN_EXPECTED_DEVICE_COUNTS_CONFIG_FILE", value_name = "FILE")]
        pub expected_device_counts_config_file: Option<PathBuf>,
    }
}
