// Refreshes the page: after each message of the stream, or periodically without a stream.
// Shows a warning when the data is old.

import { age, clock, plural, setClock } from "./dom.js";
import { noStory, showIncidents, showStatus, showStory, storyFailed } from "./view.js";

// All times are in milliseconds.
const LONGEST_WAIT = 8000; // for a response
const PACE = 300; // between two requests
const EVERY_WITH_STREAM = 15000; // between requests while the stream is open
const EVERY_WITHOUT_STREAM = 5000; // between requests while it is not
const SECOND_LOOK = 1200; // after a change, since the journal may be written after the state
const REOPEN = 10000; // delay after the stream was refused

let streaming = false;
let asking = false;
let askAgain = false;
let askedAt = 0;
let answeredAt = 0;
let failure = "";
let secondLook = 0;
let status = null;

function selected() {
  const name = new URLSearchParams(location.hash.slice(1)).get("node");
  if (name) {
    return name;
  }
  // This node if it has a fault, else the first unhealthy one.
  const own = status.fleet.nodes.find((node) => node.name === status.nodeName);
  const faulty = own?.faults.length > 0 || own?.session
    ? own
    : status.fleet.nodes.find((node) => node.state === "unhealthy") ?? status.fleet.nodes[0];
  // A controller monitors no node itself: without a fault there is no timeline to show.
  return faulty?.name ?? (status.role === "controller" ? null : status.nodeName);
}

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(LONGEST_WAIT) });
  const body = await response.json();
  if (!response.ok) {
    throw new Error(`${body.error}. ${body.hint}`);
  }
  return body;
}

async function ask() {
  if (asking) {
    askAgain = true;
    return;
  }
  asking = true;
  askedAt = Date.now();
  try {
    const [now, incidents] = await Promise.all([get("/api/v1/status"), get("/api/v1/incidents")]);
    status = now;
    setClock(status.now);
    answeredAt = Date.now();
    failure = "";
    const node = selected();
    showStatus(status, node);
    showIncidents(incidents);
    try {
      if (node === null) {
        noStory();
      } else {
        showStory(await get(`/api/v1/nodes/${encodeURIComponent(node)}/explain`));
      }
    } catch (error) {
      storyFailed(node, error.message);
    }
  } catch (error) {
    failure = error.message;
  }
  asking = false;
  tick();
  if (askAgain) {
    askAgain = false;
    setTimeout(ask, PACE);
  }
}

function changed() {
  ask();
  clearTimeout(secondLook);
  secondLook = setTimeout(ask, SECOND_LOOK);
}

function listen() {
  const stream = new EventSource("/api/v1/stream");
  stream.addEventListener("changed", () => {
    streaming = true;
    changed();
  });
  stream.addEventListener("error", () => {
    streaming = false;
    tick();
    // The browser reconnects by itself, except after a refusal.
    if (stream.readyState === EventSource.CLOSED) {
      setTimeout(listen, REOPEN);
    }
  });
}

function tick() {
  const now = Date.now();
  if (!asking && now - askedAt > (streaming ? EVERY_WITH_STREAM : EVERY_WITHOUT_STREAM)) {
    ask();
  }
  age();
  const stale = failure !== "" || (answeredAt > 0 && now - answeredAt > 2 * EVERY_WITH_STREAM);
  const live = document.getElementById("live");
  live.className = stale ? "gone" : answeredAt === 0 ? "" : streaming ? "live" : "polling";
  const seconds = plural(Math.round((now - answeredAt) / 1000), "second", "seconds");
  live.textContent = answeredAt === 0
    ? "no answer yet"
    : stale
      ? `old: last answer ${seconds} ago`
      : `${streaming ? "live" : "asking every 5 s"}, updated ${seconds} ago`;
  const banner = document.getElementById("stale");
  const text = answeredAt === 0
    ? `gpuwarden does not answer: ${failure}`
    : `gpuwarden does not answer. What is shown here is as of ${clock(answeredAt)}. (${failure || "no answer in time"})`;
  if (stale && banner.textContent !== text) {
    banner.textContent = text;
  }
  banner.hidden = !stale;
  document.body.classList.toggle("is-stale", stale);
}

window.addEventListener("hashchange", ask);
document.addEventListener("visibilitychange", () => document.hidden || ask());
setInterval(tick, 1000);
ask();
listen();
