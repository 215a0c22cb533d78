//! End-to-end tests: the real binary against a real Kubernetes control plane.
//!
//! Components come from `cargo xtask setup`. A test without its component reports a skip.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "e2e/admission.rs"]
mod admission;
#[path = "e2e/analysis.rs"]
mod analysis;
#[path = "e2e/apart.rs"]
mod apart;
#[path = "e2e/audit.rs"]
mod audit;
#[path = "e2e/brake.rs"]
mod brake;
#[path = "e2e/burst.rs"]
mod burst;
#[path = "e2e/chart.rs"]
mod chart;
#[path = "e2e/checks.rs"]
mod checks;
#[path = "e2e/cloud_apis.rs"]
mod cloud_apis;
#[path = "e2e/collect.rs"]
mod collect;
#[path = "e2e/commands.rs"]
mod commands;
#[path = "e2e/conditions.rs"]
mod conditions;
#[path = "e2e/connector.rs"]
mod connector;
#[path = "e2e/crash.rs"]
mod crash;
#[path = "e2e/device_taints.rs"]
mod device_taints;
#[path = "e2e/devices.rs"]
mod devices;
#[path = "e2e/doctor.rs"]
mod doctor;
#[path = "e2e/drain.rs"]
mod drain;
#[path = "e2e/forward.rs"]
mod forward;
#[path = "e2e/gangs.rs"]
mod gangs;
#[path = "e2e/gpus.rs"]
mod gpus;
#[path = "e2e/group.rs"]
mod group;
#[path = "e2e/hostile.rs"]
mod hostile;
#[path = "e2e/hostile_ports.rs"]
mod hostile_ports;
#[path = "e2e/image.rs"]
mod image;
#[path = "e2e/installed.rs"]
mod installed;
#[path = "e2e/janitor.rs"]
mod janitor;
#[path = "e2e/janitor_labels.rs"]
mod janitor_labels;
#[path = "e2e/kubectl.rs"]
mod kubectl;
#[path = "e2e/labels.rs"]
mod labels;
#[path = "e2e/late.rs"]
mod late;
#[path = "e2e/leader.rs"]
mod leader;
#[path = "e2e/ledger.rs"]
mod ledger;
#[path = "e2e/machines.rs"]
mod machines;
#[path = "e2e/maintenance_requests.rs"]
mod maintenance_requests;
#[path = "e2e/metadata_service.rs"]
mod metadata_service;
#[path = "e2e/monitoring.rs"]
mod monitoring;
#[path = "e2e/notices.rs"]
mod notices;
#[path = "e2e/objects.rs"]
mod objects;
#[path = "e2e/outage.rs"]
mod outage;
#[path = "e2e/output.rs"]
mod output;
#[path = "e2e/own_certificate.rs"]
mod own_certificate;
#[path = "e2e/packages.rs"]
mod packages;
#[path = "e2e/page.rs"]
mod page;
#[path = "e2e/places.rs"]
mod places;
#[path = "e2e/player.rs"]
mod player;
#[path = "e2e/pods.rs"]
mod pods;
#[path = "e2e/policy.rs"]
mod policy;
#[path = "e2e/policy_tools.rs"]
mod policy_tools;
#[path = "e2e/prometheus.rs"]
mod prometheus;
#[path = "e2e/quarantine.rs"]
mod quarantine;
#[path = "e2e/reboot.rs"]
mod reboot;
#[path = "e2e/remediation.rs"]
mod remediation;
#[path = "e2e/replay.rs"]
mod replay;
#[path = "e2e/reports.rs"]
mod reports;
#[path = "e2e/requests.rs"]
mod requests;
#[path = "e2e/rivals.rs"]
mod rivals;
#[path = "e2e/rules.rs"]
mod rules;
#[path = "e2e/runbook.rs"]
mod runbook;
#[path = "e2e/scheduled.rs"]
mod scheduled;
#[path = "e2e/snapshot.rs"]
mod snapshot;
#[path = "e2e/stages.rs"]
mod stages;
#[path = "e2e/stories.rs"]
mod stories;
#[path = "e2e/story.rs"]
mod story;
#[path = "e2e/story_failing.rs"]
mod story_failing;
#[path = "e2e/story_killed.rs"]
mod story_killed;
#[path = "e2e/story_uncordoned.rs"]
mod story_uncordoned;
#[path = "e2e/story_unrepaired.rs"]
mod story_unrepaired;
#[path = "e2e/support.rs"]
mod support;
#[path = "e2e/throttled.rs"]
mod throttled;
#[path = "e2e/tutorial.rs"]
mod tutorial;
#[path = "e2e/uninstall.rs"]
mod uninstall;
#[path = "e2e/validating.rs"]
mod validating;
#[path = "e2e/validation.rs"]
mod validation;
#[path = "e2e/webhook.rs"]
mod webhook;
