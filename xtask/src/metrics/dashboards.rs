//! Dashboards for Grafana, made from a short description of their panels. Every metric and label
//! of a query has to exist.

mod panels;

use std::path::{Path, PathBuf};

use anyhow::bail;
use serde_json::{Value, json};

use super::Group;
use super::expression::{Registry, Uses};

/// Directory of the dashboards.
const DIRECTORY: &str = "deploy/helm/gpuwarden/files/dashboards";
/// Version of Grafana's dashboard format, that of Grafana 11.
const SCHEMA: u32 = 39;
/// Width of Grafana's grid.
const COLUMNS: u32 = 24;
/// Height of a panel.
const HEIGHT: u32 = 8;

/// A dashboard.
struct Dashboard {
    /// Name of the file and identity in Grafana.
    name: &'static str,
    title: &'static str,
    /// Variables that a person selects: name, and the query of its values.
    variables: &'static [(&'static str, &'static str)],
    panels: &'static [Panel],
}

/// A panel of a dashboard.
struct Panel {
    title: &'static str,
    kind: PanelKind,
    /// Unit of Grafana, such as `s`, `bytes`, `percentunit` or `short`.
    unit: &'static str,
    /// Width, of [`COLUMNS`].
    width: u32,
    /// Expressions, each with the template of its legend.
    queries: &'static [(&'static str, &'static str)],
}

/// Form in which a panel shows its values.
#[derive(Clone, Copy)]
enum PanelKind {
    /// Lines over time.
    Lines,
    /// Numbers of now.
    Numbers,
    /// Rows of now.
    Table,
    /// Cells over time, one row per series, in these colours for 0 and for 1.
    States([&'static str; 2]),
}

/// Returns the files of all dashboards. Fails if a query uses what does not exist.
pub(super) fn files(root: &Path, groups: &[Group]) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let registry = Registry::new(groups);
    let mut wrong = Vec::new();
    let mut files = Vec::new();
    for dashboard in &panels::ALL {
        for (panel, query) in dashboard.queries() {
            let place = format!("{}, {panel}", dashboard.title);
            match Uses::of(query) {
                Ok(uses) => {
                    wrong.extend(registry.unknown(&uses).map(|it| format!("{place}: {it}")));
                }
                Err(error) => wrong.push(format!("{place}: {error}")),
            }
        }
        let path = root
            .join(DIRECTORY)
            .join(format!("{}.json", dashboard.name));
        let mut text = serde_json::to_vec_pretty(&dashboard.json())?;
        text.push(b'\n');
        files.push((path, text));
    }
    if !wrong.is_empty() {
        bail!("dashboards:\n  {}", wrong.join("\n  "));
    }
    Ok(files)
}

// === impl Dashboard ===

impl Dashboard {
    /// Returns the queries, each with the title of its panel or the name of its variable.
    fn queries(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let panels = self.panels.iter().flat_map(|panel| {
            let queries = panel.queries.iter();
            queries.map(|(query, _)| (panel.title, *query))
        });
        panels.chain(self.variables.iter().map(|(name, query)| (*name, *query)))
    }

    fn json(&self) -> Value {
        let (mut x, mut y) = (0, 0);
        let mut panels = Vec::new();
        for (id, panel) in (1..).zip(self.panels) {
            if x + panel.width > COLUMNS {
                (x, y) = (0, y + HEIGHT);
            }
            panels.push(panel.json(id, x, y));
            x += panel.width;
        }
        let source = json!({
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
        });
        let variables = self
            .variables
            .iter()
            .map(|(name, query)| variable(name, query));
        let variables: Vec<Value> = std::iter::once(source).chain(variables).collect();
        json!({
            "uid": self.name,
            "title": self.title,
            "tags": ["gpuwarden"],
            "schemaVersion": SCHEMA,
            "editable": true,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "links": [{
                "type": "dashboards",
                "title": "gpuwarden",
                "tags": ["gpuwarden"],
                "asDropdown": true,
                "icon": "external link",
                "includeVars": true,
                "keepTime": true,
                "targetBlank": false,
                "tooltip": "",
                "url": "",
            }],
            "templating": {"list": variables},
            "panels": panels,
        })
    }
}

/// Returns a variable whose values are those that the label of the same name has in the series
/// of `query`.
fn variable(name: &str, query: &str) -> Value {
    let query = format!("label_values({query}, {name})");
    json!({
        "name": name,
        "type": "query",
        "datasource": data_source(),
        "query": {"query": query, "refId": "variable"},
        "includeAll": true,
        "multi": true,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    })
}

fn data_source() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

// === impl Panel ===

impl Panel {
    fn json(&self, id: u32, x: u32, y: u32) -> Value {
        let is_of_now = matches!(self.kind, PanelKind::Numbers | PanelKind::Table);
        let targets = ('A'..='Z').zip(self.queries).map(|(id, (query, legend))| {
            json!({
                "refId": id.to_string(),
                "datasource": data_source(),
                "expr": query,
                "legendFormat": legend,
                "instant": is_of_now,
                "range": !is_of_now,
                "format": if matches!(self.kind, PanelKind::Table) { "table" } else { "time_series" },
            })
        });
        let targets: Vec<Value> = targets.collect();
        let (kind, options) = match self.kind {
            PanelKind::Lines => (
                "timeseries",
                json!({
                    "legend": {
                        "displayMode": "list",
                        "placement": "bottom",
                        "showLegend": true,
                        "calcs": [],
                    },
                    "tooltip": {"mode": "multi", "sort": "desc"},
                }),
            ),
            PanelKind::Numbers => (
                "stat",
                json!({
                    "colorMode": "value",
                    "graphMode": "none",
                    "justifyMode": "auto",
                    "orientation": "auto",
                    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": false},
                    "textMode": "value_and_name",
                    "wideLayout": true,
                    "showPercentChange": false,
                    "percentChangeColorMode": "standard",
                }),
            ),
            PanelKind::Table => (
                "table",
                json!({"showHeader": true, "showTypeIcons": false, "frameIndex": 0}),
            ),
            PanelKind::States(_) => (
                "state-timeline",
                json!({
                    "showValue": "never",
                    "mergeValues": true,
                    "rowHeight": 0.9,
                    "legend": {
                        "displayMode": "list",
                        "placement": "bottom",
                        "showLegend": true,
                        "calcs": [],
                    },
                    "tooltip": {"mode": "single", "sort": "none"},
                }),
            ),
        };
        let mut defaults = json!({"unit": self.unit});
        if let PanelKind::States([zero, one]) = self.kind {
            defaults["color"] = json!({"mode": "thresholds"});
            defaults["thresholds"] = json!({
                "mode": "absolute",
                "steps": [{"color": zero, "value": null}, {"color": one, "value": 1}],
            });
        }
        json!({
            "id": id,
            "type": kind,
            "title": self.title,
            "datasource": data_source(),
            "gridPos": {"h": HEIGHT, "w": self.width, "x": x, "y": y},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": options,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn panels_fill_the_grid_without_overlap() {
        for dashboard in &panels::ALL {
            let json = dashboard.json();
            let mut taken = BTreeSet::new();
            for panel in json["panels"].as_array().unwrap() {
                let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
                for x in at("x")..at("x") + at("w") {
                    assert!(x < u64::from(COLUMNS), "{}: {panel}", dashboard.name);
                    assert!(taken.insert((x, at("y"))), "{}: {panel}", dashboard.name);
                }
            }
        }
    }

    #[test]
    fn a_query_of_an_unknown_metric_is_refused() {
        let error = files(Path::new("/"), &[]).unwrap_err().to_string();
        let expected = "gpuwarden: Fleet, Nodes by state: there is no metric gpuwarden_nodes";
        assert!(error.contains(expected), "{error}");
    }
}
