// DOM elements and times. Foreign text only ever becomes a text node.

/** Creates an element with attributes and children; a child that is not a node becomes text. */
export function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== "") {
      element.append(child instanceof Node ? child : String(child));
    }
  }
  return element;
}

/**
 * Creates a table that assistive technology recognises even if its style turns rows into cards.
 * Columns are [title, class]; a row is {cells, current}.
 */
export function table(label, columns, rows) {
  const head = el("tr", { role: "row" },
    columns.map(([title]) => el("th", { role: "columnheader", scope: "col" }, title)));
  const body = rows.map(({ cells, current }) =>
    el("tr", { role: "row", "aria-current": current ? "true" : undefined },
      cells.map((cell, index) => {
        const [title, className] = columns[index];
        const content = el("div", {}, cell);
        return el("td", { role: "cell", class: className, "data-label": title }, content);
      })));
  return el("table", { role: "table", "aria-label": label },
    el("thead", { role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, body));
}

/** Creates a list of terms and values, without the pairs that have no value. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return el("dl", {}, shown.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

const shown = new Map();

/** Puts `build()` into the element `id` if `data` has changed since the last call. */
export function show(id, data, build) {
  const text = JSON.stringify(data) ?? "";
  if (shown.get(id) === text) {
    return;
  }
  shown.set(id, text);
  const place = document.getElementById(id);
  const focused = place.contains(document.activeElement)
    ? document.activeElement.getAttribute("data-key")
    : null;
  place.replaceChildren(...[build()].flat().filter((child) => child));
  if (focused !== null) {
    const again = [...place.querySelectorAll("[data-key]")];
    again.find((element) => element.getAttribute("data-key") === focused)?.focus();
  }
}

// Time by which the server's clock is ahead of ours, in milliseconds.
let clockOffset = 0;

export function setClock(serverNow) {
  clockOffset = Date.parse(serverNow) - Date.now();
}

export function serverTime() {
  return Date.now() + clockOffset;
}

function two(number) {
  return String(number).padStart(2, "0");
}

/** Formats the local day, as 2026-01-31. */
export function day(at) {
  const time = new Date(at);
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
}

/** Formats the local time of day, as 10:15:30.123 or 10:15:30. */
export function clock(at, withMilliseconds) {
  const time = new Date(at);
  const seconds = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  return withMilliseconds
    ? `${seconds}.${String(time.getMilliseconds()).padStart(3, "0")}`
    : seconds;
}

/** Formats the offset of local time, as UTC+02:00. */
export function zone(at) {
  const minutes = -new Date(at).getTimezoneOffset();
  const size = Math.abs(minutes);
  return minutes === 0
    ? "UTC"
    : `UTC${minutes < 0 ? "-" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)}`;
}

/** Creates a `time` element of the timeline. */
export function moment(at) {
  return el("time", { datetime: at, title: at }, clock(at, true));
}

/** Creates an element with the age of a time, which `age` updates. */
export function ago(at) {
  return el("time", { datetime: at, title: at, "data-ago": true }, agoText(at));
}

/** Updates every element of `ago`. */
export function age() {
  for (const element of document.querySelectorAll("time[data-ago]")) {
    const text = agoText(element.getAttribute("datetime"));
    if (element.textContent !== text) {
      element.textContent = text;
    }
  }
}

export function agoText(at) {
  const seconds = Math.max(0, Math.round((serverTime() - Date.parse(at)) / 1000));
  if (seconds < 60) {
    return `${seconds} s ago`;
  }
  if (seconds < 3600) {
    return `${Math.floor(seconds / 60)} min ago`;
  }
  if (seconds < 48 * 3600) {
    const hours = Math.floor(seconds / 3600);
    return `${hours} h ${Math.floor((seconds % 3600) / 60)} min ago`;
  }
  // A time from a clock that was not set: ten years or more are shown as a date.
  return seconds < 3650 * 86400 ? `${Math.floor(seconds / 86400)} days ago` : day(at);
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count : count.toFixed(1)} ${units[unit]}`;
}

export function plural(count, one, many) {
  return `${count} ${count === 1 ? one : many}`;
}
