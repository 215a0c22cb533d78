// Renders the responses of the API.

import { ago, bytes, day, el, facts, moment, plural, show, table, zone } from "./dom.js";

const MOST_ROWS = 200;
const MOST_ENTRIES = 400;

const STATES = {
  healthy: ["ok", "healthy"],
  degraded: ["warn", "degraded"],
  unhealthy: ["bad", "unhealthy"],
  held: ["bad", "held back"],
  quarantining: ["warn", "being quarantined"],
  quarantined: ["warn", "quarantined"],
  draining: ["warn", "being drained"],
  drained: ["warn", "drained"],
  remediating: ["warn", "being remediated"],
  remediated: ["warn", "remediated"],
  "remediation-failed": ["bad", "waits for a person"],
  "partly-quarantined": ["warn", "in service but for devices"],
  releasing: ["warn", "being released"],
  "no-fault-known": ["muted", "no fault known"],
};

const GRAVEST_FIRST = [
  "unhealthy", "remediation-failed", "held", "quarantining", "quarantined", "draining", "drained", "remediating", "remediated", "partly-quarantined", "releasing", "degraded", "no-fault-known", "healthy",
];

const SOURCE_STATES = {
  "catching-up": ["warn", "catching up"],
  following: ["ok", "following"],
  ended: ["muted", "read to its end"],
  failing: ["bad", "failing"],
  stuck: ["bad", "stuck"],
};

const ACTIONS = {
  NONE: "nothing to do",
  COMPONENT_RESET: "reset the GPU",
  CONTACT_SUPPORT: "contact support",
  RUN_FIELDDIAG: "run the field diagnostic",
  RESTART_VM: "restart the machine",
  RESTART_BM: "restart the machine",
  REPLACE_VM: "replace the machine",
  RUN_DCGMEUD: "run the DCGM diagnostic",
  UNKNOWN: "not known",
};

const MODES = {
  observe: "observe: watches only, writes nothing to the cluster",
  quarantine: "quarantine: takes bad nodes out of service",
  "dry-run": "dry run: decides and shows, writes nothing to the cluster",
};

const KINDS = {
  decoded: "read as",
  "dry-run": "dry run",
  call: "API call",
};

function stateWord([level, word]) {
  return el("span", { class: `state ${level}` }, word);
}

function nodeLink(name) {
  return el("a", { href: `#node=${encodeURIComponent(name)}`, "data-key": name }, name);
}

function action(name) {
  return ACTIONS[name] ? [ACTIONS[name], " ", el("span", { class: "muted" }, `(${name})`)] : name;
}

// Renders a text with `commands` in it.
function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 === 1 ? el("code", {}, part) : part));
}

export function showStatus(status, selected) {
  const { fleet } = status;
  document.title = `${headline(status)[1]} - gpuwarden`;
  show("whereabouts", [status.nodeName, status.version],
    () => el("span", {}, `on ${status.nodeName}, version ${status.version}`));
  showOverall(status);
  show("nodes", [fleet.nodes, status.nodeName, status.ready, selected], () => nodes(status, selected));
  show("faults", [fleet.nodes, status.xids], () => faults(status));
  document.getElementById("gpus-section").hidden = !status.gpus;
  show("gpus", status.gpus, () => gpus(status.gpus ?? []));
  show("cluster", [fleet.cluster, fleet.brake, status.mode, status.leadership], () => cluster(status));
  show("sources", status.sources.map((source) => ({ ...source, aliveAt: "" })),
    () => sources(status.sources));
  show("policy", status.policy, () => policy(status.policy));
  show("process", [status.store, status.dataDir, status.socket, status.startedAt],
    () => processFacts(status));
}

// Returns [level, words].
function headline(status) {
  const of = (...states) => status.fleet.nodes.filter((node) => states.includes(node.state));
  const who = (nodes, one, many) =>
    nodes.length === 1 ? `${nodes[0].name} ${one}` : `${nodes.length} nodes ${many}`;
  const sick = of("unhealthy", "held");
  if (sick.length > 0) {
    const serving = sick.every((node) => node.inCluster && node.unschedulable === false);
    const still = !serving ? "" : sick.length === 1 ? " and is still in service" : " and are still in service";
    return ["bad", who(sick, "has a fatal fault", "have a fatal fault") + still];
  }
  const out = of("quarantined", "quarantining", "draining", "drained", "remediating", "remediated", "remediation-failed");
  if (out.length > 0) {
    return ["warn", who(out, "is out of service", "are out of service")];
  }
  const partly = of("partly-quarantined");
  if (partly.length > 0) {
    return ["warn", who(partly, "has devices out of service", "have devices out of service")];
  }
  const back = of("releasing");
  if (back.length > 0) {
    return ["warn", who(back, "is being given back", "are being given back")];
  }
  const degraded = of("degraded");
  if (degraded.length > 0) {
    return ["warn", who(degraded, "has a fault that is not fatal", "have faults that are not fatal")];
  }
  return status.ready
    ? ["ok", "No open fault"]
    : ["warn", "No open fault known, but gpuwarden does not see everything"];
}

function showOverall(status) {
  const [level, words] = headline(status);
  const { brake } = status.fleet;
  const remarks = [
    ...status.notReady.map((reason) => `Not ready: ${reason}`),
    brake?.paused && `New quarantines are ${brake.paused}`,
    brake?.enabled && brake.state !== "CLOSED" && `The circuit breaker is ${brake.state}`,
    brake?.held > 0 && `${plural(brake.held, "node", "nodes")} held back from quarantine`,
  ].filter(Boolean);
  const faulty = status.fleet.nodes.filter((node) => node.faults.length > 0);
  const count = faulty.reduce((sum, node) => sum + node.faults.length, 0);
  if (count > 0) {
    remarks.unshift(`${plural(count, "open fault", "open faults")} on ${plural(faulty.length, "node", "nodes")}`);
  }
  document.getElementById("overall").className = level;
  show("headline", words, () => el("span", {}, words));
  show("remarks", remarks, () => remarks.map((remark) => el("li", {}, remark)));
}

function nodes(status, selected) {
  const known = [...status.fleet.nodes];
  const ownNode = status.role !== "controller";
  if (ownNode && !known.some((node) => node.name === status.nodeName)) {
    // A process that cannot observe everything must not call a node healthy.
    const state = status.ready ? "healthy" : "no-fault-known";
    known.push({ name: status.nodeName, state, faults: [], notes: [] });
  }
  if (known.length === 0) {
    return el("p", { class: "empty" }, "No node has an open fault.");
  }
  const grave = (node) => GRAVEST_FIRST.indexOf(node.state);
  known.sort((a, b) => grave(a) - grave(b) || (a.name < b.name ? -1 : 1));
  const shown = known.slice(0, MOST_ROWS);
  const rows = shown.map((node) => {
    const since = node.session?.since
      ?? node.faults.map((fault) => fault.firstSeen).sort((a, b) => Date.parse(a) - Date.parse(b))[0];
    const own = ownNode && node.name === status.nodeName;
    return {
      current: node.name === selected,
      cells: [
        [nodeLink(node.name), own && el("span", { class: "muted" }, " this machine")].filter(Boolean),
        stateWord(STATES[node.state] ?? ["", node.state]),
        node.faults.length === 0 ? "none" : String(node.faults.length),
        inCluster(node),
        since ? ago(since) : "-",
        node.notes.length === 0 ? "-" : node.notes.map((note) => el("div", {}, note)),
      ],
    };
  });
  return [
    table("Nodes", [["Node", "name"], ["State", "fit"], ["Faults", "fit num"], ["Cluster", "fit"], ["Since", "fit"], ["Notes"]], rows),
    more(known.length - shown.length, "nodes", "gpuwarden status -o wide"),
  ];
}

function inCluster(node) {
  if (node.inCluster === undefined) {
    return "-";
  }
  if (!node.inCluster) {
    return "not in the cluster";
  }
  return node.unschedulable ? "cordoned" : "schedulable";
}

function more(count, what, command) {
  return count > 0
    ? el("p", { class: "empty muted" }, `${count} more ${what}: `, el("code", {}, command))
    : null;
}

export function showIncidents({ incidents }) {
  const several = incidents.filter((incident) => incident.nodes.length > 1);
  document.getElementById("incidents-section").hidden = several.length === 0;
  show("incidents", several, () => incidentTable(several));
}

function incidentTable(all) {
  const rows = all.slice(0, MOST_ROWS).map(({ id, since, primaryNode, primary, nodes }) => {
    const faults = nodes.flatMap((node) => node.faults);
    const explained = faults.filter((fault) => fault.explainedBy).length;
    const proposals = nodes.filter((node) => node.proposal).length;
    return {
      cells: [
        el("code", {}, id),
        [
          el("strong", {}, `${primary.check} ${primary.code} on ${primary.subject}`),
          el("div", {}, "on ", nodeLink(primaryNode)),
        ],
        [
          `${faults.length} faults on ${nodes.length} nodes`,
          explained > 0 && el("div", { class: "muted" }, `${explained} explained by another fault`),
          proposals > 0 && el("div", {}, `${plural(proposals, "node awaits", "nodes await")} an approval: `,
            el("code", {}, `gpuwarden approve ${id}`)),
        ].filter(Boolean),
        ago(since),
      ],
    };
  });
  return [
    table("Incidents", [["Incident", "fit"], ["Cause", "where"], ["What belongs to it"], ["Seen", "fit"]], rows),
    more(all.length - rows.length, "incidents", "gpuwarden incidents"),
  ];
}

function faults(status) {
  const of = (list) => status.fleet.nodes.flatMap((node) => list(node).map((fault) => [node.name, fault]));
  const open = of((node) => node.faults);
  open.sort(([, a], [, b]) => b.fatal - a.fatal || Date.parse(a.firstSeen) - Date.parse(b.firstSeen));
  const notices = of((node) => node.notices ?? []);
  notices.sort(([, a], [, b]) => Date.parse(b.lastSeen) - Date.parse(a.lastSeen));
  return [
    ...(open.length > 0 ? faultTable(status, "Open faults", "open faults", open) : [
      el("p", { class: "empty" }, "No open fault."),
      el("p", { class: "empty muted" }, "To see what one looks like, try: ", el("code", {}, "gpuwarden inject xid 79")),
    ]),
    ...(notices.length > 0 ? [
      el("p", { class: "empty" }, el("strong", {}, "Notices"), " of the last day, which need no remediation"),
      ...faultTable(status, "Notices", "notices", notices),
    ] : []),
  ];
}

function faultTable(status, title, what, all) {
  const shown = all.slice(0, MOST_ROWS);
  const rows = shown.map(([node, fault]) => {
    const xid = fault.check === "SysLogsXIDError" ? status.xids[fault.code] : undefined;
    const name = fault.check === "SysLogsXIDError" ? `XID ${fault.code}` : `${fault.check} ${fault.code}`;
    return {
      cells: [
        [
          el("strong", {}, name),
          el("div", {}, stateWord(fault.fatal ? ["bad", "fatal"] : ["warn", "not fatal"])),
        ],
        [nodeLink(node), el("div", {}, fault.subject)],
        [
          el("div", { class: xid ? undefined : "muted" },
            xid ? xid.meaning : "The catalogue has no row for this code."),
          el("div", {}, el("span", { class: "muted" }, "Recommended: "), action(fault.recommendedAction)),
          fault.explainedBy && el("div", {}, "Explained by ", fault.explainedBy.fault, " of ",
            nodeLink(fault.explainedBy.node)),
          el("span", { class: "raw" }, fault.message),
        ].filter(Boolean),
        [
          el("div", {}, "first ", ago(fault.firstSeen)),
          fault.count > 1 && el("div", {}, "last ", ago(fault.lastSeen)),
          fault.reportedBy && el("div", { class: "muted" }, "reported by " + fault.reportedBy),
          fault.count > 1 && el("div", { class: "muted" }, `${fault.count} reports`),
        ].filter(Boolean),
      ],
    };
  });
  return [
    table(title, [["Fault", "fit"], ["Where", "where"], ["What it means"], ["Seen", "fit"]], rows),
    more(all.length - shown.length, what, "gpuwarden status -o wide"),
  ];
}

const PHASES = {
  Ready: ["ok", "ready"],
  NotReady: ["bad", "not ready"],
  Pending: ["warn", "pending"],
  Unknown: ["warn", "not known"],
};

function gpus(all) {
  const rows = all.map((gpu) => {
    const wrong = gpu.conditions.filter((one) => one.status !== "True" && one.type !== "Ready");
    const since = gpu.conditions.find((one) => one.type === "Ready")?.lastTransitionTime;
    return {
      cells: [
        [el("strong", {}, `GPU ${gpu.index}`), el("div", {}, stateWord(PHASES[gpu.phase] ?? ["", gpu.phase]))],
        [el("div", {}, gpu.product), el("span", { class: "raw" }, `${gpu.name} ${gpu.pci}`)],
        since ? ago(since) : "-",
        wrong.length === 0 ? "-" : wrong.map((one) => el("div", {}, `${one.type} ${one.reason}: ${one.message}`)),
      ],
    };
  });
  return table("GPUs", [["GPU", "fit"], ["Which", "where"], ["Since", "fit"], ["What is wrong"]], rows);
}

function cluster(status) {
  const { cluster: connection } = status.fleet;
  if (!connection) {
    return facts([["Connection", "none: watches this machine only"], ["Mode", MODES[status.mode] ?? status.mode]]);
  }
  const connected = connection.connected ? ["ok", "connected"] : ["bad", "not connected"];
  return facts([
    ["Connection", stateWord(connected)],
    ["Server", connection.server],
    ["Error", connection.error],
    ["Nodes", String(connection.nodes)],
    ["Mode", MODES[status.mode] ?? status.mode],
    ["Leader", status.leadership && (status.leadership.leads ? "this process" : status.leadership.leader)],
    ...brakeFacts(status.fleet.brake),
  ]);
}

function brakeFacts(brake) {
  if (!brake) {
    return [];
  }
  if (!brake.enabled) {
    return [["Brake", el("span", { class: "warn" }, "off: nothing limits quarantines")]];
  }
  const limits = brake.limits.map(({ limit, ofWhich, used, allowed, of }) =>
    el("div", { class: used >= allowed ? "warn" : undefined },
      `${used} of ${allowed} out of service (${limit} of ${of} ${ofWhich})`));
  return [
    ["Brake", stateWord(brake.state === "CLOSED" ? ["ok", "closed"] : ["bad", brake.state])],
    ["Limits", brake.unknown ? `unknown: ${brake.unknown}` : limits.length === 0 ? "none" : limits],
    ["Brake notes", brake.notes.length === 0 ? null : brake.notes.map((note) => el("div", {}, note))],
  ];
}

function sources(all) {
  if (all.length === 0) {
    return el("p", { class: "empty warn" }, "Nothing: no source is configured.");
  }
  return el("ul", { class: "sources" }, all.map((source) => el("li", {},
    el("div", { class: "name" }, el("span", {}, source.name), stateWord(SOURCE_STATES[source.state] ?? ["", source.state])),
    el("div", { class: "muted" }, source.detail),
    source.advice ? el("div", { class: "muted" }, source.advice) : null,
    el("div", {},
      source.lastRecordAt ? ["last record ", ago(source.lastRecordAt)] : "no record yet",
      `, ${plural(source.records, "record", "records")}, ${plural(source.faults, "fault", "faults")}`),
    el("div", { class: source.lost + source.malformed + source.refused > 0 ? "warn" : "muted" },
      `${source.lost} lost, ${source.malformed} malformed, ${source.refused} refused`))));
}

function policy(policyView) {
  return facts([
    ["Source", policyView.source],
    ["Not loaded", policyView.error ? el("div", { class: "bad" }, policyView.error) : null],
    ["Rule sets", policyView.ruleSets.length === 0 ? "none" : policyView.ruleSets.map((name) => el("div", {}, name))],
    ["Policies for nodes", policyView.policies ? policyView.policies.map((name) => el("div", {}, name)) : null],
    ["Warnings", policyView.warnings.length === 0 ? null : policyView.warnings.map((text) => el("div", { class: "warn" }, text))],
  ]);
}

function processFacts(status) {
  const { store } = status;
  return facts([
    ["Events", store.error ? el("span", { class: "bad" }, store.error) : `${store.events} (${bytes(store.bytes)})`],
    ["Unreadable", store.unreadable ? el("span", { class: "bad" }, `${store.unreadable}, passed over`) : null],
    ["Note", store.notes ? store.notes.map((text) => el("div", { class: "warn" }, text)) : null],
    ["Newest", store.newest && ago(store.newest)],
    ["Data", el("span", { class: "raw" }, status.dataDir)],
    ["Socket", el("span", { class: "raw" }, status.socket)],
    ["Started", ago(status.startedAt)],
  ]);
}

export function showStory(story) {
  title(story.node);
  show("next", [story.awaits, story.howToClear], () => [
    el("p", {}, el("strong", {}, "Awaits: "), story.awaits),
    story.howToClear.length > 0 && el("ul", {}, story.howToClear.map((line) => el("li", {}, withCode(line)))),
  ]);
  const shown = story.entries.slice(-MOST_ENTRIES);
  show("timeline", story.entries, () => shown.length === 0
    ? el("p", { class: "empty muted" }, "Nothing is recorded about this node.")
    : [
      more(story.entries.length - shown.length, "earlier entries", "gpuwarden explain"),
      el("ol", { class: "entries" }, entries(shown)),
    ]);
}

// Shows that no node is selected.
export function noStory() {
  show("timeline-title", "", () => el("span", {}, "Timeline"));
  show("next", "", () => []);
  show("timeline", "", () => el("p", { class: "empty muted" }, "No node is selected."));
}

export function storyFailed(node, reason) {
  title(node);
  show("next", [node, reason], () => el("p", { class: "bad" }, reason));
  show("timeline", [node, reason], () => []);
}

function title(node) {
  show("timeline-title", node, () => el("span", {}, `Timeline of ${node}`));
}

// Keys of the entries that the user has expanded, which stay expanded after a refresh.
const opened = new Set();

function entries(all) {
  let today = "";
  return all.flatMap((entry) => {
    const rows = [];
    if (day(entry.at) !== today) {
      today = day(entry.at);
      rows.push(el("li", { class: "day" }, `${today}, times are ${zone(entry.at)}`));
    }
    const word = entry.kind === "line"
      ? (entry.detail?.kernelLog ? "log line" : "message")
      : KINDS[entry.kind] ?? entry.kind;
    rows.push(el("li", {},
      moment(entry.at),
      el("span", { class: `kind ${entry.kind}` }, word),
      el("span", { class: entry.kind === "line" ? "text raw" : "text" }, entry.text),
      entry.detail === undefined ? null : details(entry)));
    return rows;
  });
}

function details(entry) {
  const key = `${entry.at} ${entry.kind} ${entry.text}`;
  const element = el("details", { open: opened.has(key) },
    el("summary", { "data-key": key }, "detail"),
    el("pre", {}, JSON.stringify(entry.detail, null, 2)));
  element.addEventListener("toggle", () => (element.open ? opened.add(key) : opened.delete(key)));
  return element;
}
