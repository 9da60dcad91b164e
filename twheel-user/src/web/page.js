// Asks the instance how it is, and shows it.
import { bits, by, chart, count, drawDue, drawWheels, html, rate, say, short, span, turnWheels } from "./draw.js";

const STATES = ["established", "syn_sent", "syn_recv", "unreplied", "fin_wait", "close_wait", "last_ack", "time_wait",
  "close", "syn_sent2", "udp", "udp_stream", "icmp"];
const REASONS = ["idle", "closed", "reset", "superseded", "evicted", "deleted", "flushed"];
const SHORTEST = 120000; // the least time that a chart shows, in milliseconds
const ROWS = 10;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// The colour of a name is its place in a list. Unknown names have the last colour.
const colour = (names, name) => `c${names.includes(name) ? names.indexOf(name) : names.length}`;
const end = (address, port) => (String(address).includes(":") ? `[${address}]:${port}` : `${address}:${port}`);

async function get(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  return answer.json();
}

// ---- Traffic.

function drawRates(status) {
  const rates = status.rates;
  const both = rates?.bits ?? [null, null];
  const full = 100 * status.flows / status.max_flows;
  const shown = [
    ["received", bits(both[0])],
    ["sent", bits(both[1])],
    ["packets/s", rate(rates?.packets)],
    ["new flows/s", rate(rates?.created)],
    ["ended flows/s", rate(rates?.ended)],
    ["flows", count(status.flows)],
    ["of the table", `${full < 10 ? full.toFixed(1) : full.toFixed(0)} %`],
    ["up", span(status.uptime_seconds)],
  ];
  by("rates").replaceChildren(...shown.map(([name, value]) => html("div", html("dt", name), html("dd", value))));
  const notes = [];
  if (rates && !rates.bits) notes.push("Bits are not known: the interfaces are in other network namespaces.");
  else notes.push("Bits are those of the interfaces, as the kernel counts them, whether twheel tracks their packets or not.");
  if (status.estimated_from) notes.push(`Flows by state are an estimate from ${count(status.estimated_from)} flows.`);
  say("traffic-note", notes.join(" "));
}

// How many there were in the last hour; "" if none.
function within(name) {
  const sum = (history.rates[name] ?? []).reduce((sum, it) => sum + it, 0) * history.seconds;
  return sum > 0 ? count(Math.max(1, sum)) : "";
}

function warn(status) {
  const warnings = [];
  if (!status.healthy) warnings.push("A stepper has failed: flows no longer expire. Restart twheel.");
  if (status.reaper?.paused) {
    warnings.push("The reaper is paused: it would have reaped too large a share of the flows. If that is right, "
      + `resume it with kill -HUP ${status.pid}`);
  }
  const lost = within("lost");
  if (lost) warnings.push(`About ${lost} events were lost in the last hour, or are missing from the history: see twheel stats.`);
  const refused = within("no_room");
  if (refused) warnings.push(`About ${refused} packets found no room for a new flow in the last hour: see --max-flows.`);
  const old = [...by("warnings").children].map((it) => it.textContent);
  if (old.join("\n") !== warnings.join("\n")) by("warnings").replaceChildren(...warnings.map((it) => html("li", it)));
}

// ---- The last hour. The server keeps it; the page asks for what is new.

const history = { times: [], flows: [], rates: {}, states: {}, reasons: {}, seconds: 5, points: 720 };

function add(group, fresh, had, came) {
  for (const name of new Set([...Object.keys(group), ...Object.keys(fresh)])) {
    group[name] = [...(group[name] ?? Array(had).fill(0)), ...(fresh[name] ?? Array(came).fill(0))].slice(-history.points);
  }
}

let askedAt = -Infinity;

async function askHistory() {
  if (performance.now() - askedAt < 1000 * (history.seconds - 0.5)) return;
  const fresh = await get(`api/history?since=${history.times.at(-1) ?? 0}`);
  askedAt = performance.now();
  const [had, came] = [history.times.length, fresh.times.length];
  Object.assign(history, { seconds: fresh.seconds, points: fresh.points });
  for (const group of ["rates", "states", "reasons"]) add(history[group], fresh[group], had, came);
  for (const name of ["times", "flows"]) history[name] = [...history[name], ...fresh[name]].slice(-history.points);
}

function drawHistory(status) {
  // By the server's clock.
  const to = history.times.at(-1) ?? Date.now();
  const from = Math.min(history.times[0] ?? to, to - SHORTEST);
  const range = { from: Math.max(from, to - 1000 * history.seconds * history.points), to };
  const rates = status.rates;
  const of = (name) => history.rates[name] ?? [];
  const draw = (id, series, options) => chart(id, history, range, series, options);
  draw("chart-bits", [
    { name: "received", colour: "one", values: of("received"), now: bits(rates?.bits?.[0]) },
    { name: "sent", colour: "two", values: of("sent"), now: bits(rates?.bits?.[1]) },
  ], { unit: bits });
  draw("chart-flows", [
    { name: "new", colour: "one", values: of("created"), now: rate(rates?.created) },
    { name: "ended", colour: "two", values: of("ended"), now: rate(rates?.ended) },
  ], { unit: rate });
  const known = (names, group, now) => [...new Set([...names, ...Object.keys(group)])].filter((it) => group[it] || now[it]);
  const empty = history.times.map(() => 0);
  draw("chart-states", known(STATES, history.states, status.states).map((name) => ({
    name, colour: colour(STATES, name), values: history.states[name] ?? empty, now: count(status.states[name] ?? 0),
  })), { stacked: true, unit: short });
  draw("chart-reasons", known(REASONS, history.reasons, {}).map((name) => ({
    name, colour: colour(REASONS, name), values: history.reasons[name], now: rate(history.reasons[name].at(-1)),
  })), { stacked: true, unit: rate });
}

// ---- Tables. Cells are changed where they are, so that focus, selections and clicks last.

// Fills a row with cells, each a text, or { text, data }: a button that carries data.
function fill(row, tag, cells, columns) {
  while (row.children.length > cells.length) row.lastChild.remove();
  cells.forEach((it, i) => {
    const cell = row.children[i] ?? row.appendChild(html(tag));
    cell.className = columns[i].number ? "number" : "";
    if (tag === "th") cell.scope = "col";
    if (columns[i].sorted && tag === "th") cell.setAttribute("aria-sort", "descending");
    else cell.removeAttribute("aria-sort");
    const text = String(it.text ?? it);
    if (it.data && !cell.firstElementChild) cell.replaceChildren(html("button"));
    const into = it.data ? cell.firstElementChild : cell;
    if (it.data) Object.assign(into, { type: "button" });
    Object.assign(into.dataset, it.data ?? {});
    if (into.textContent !== text) into.textContent = text;
  });
}

function fillBody(body, columns, rows) {
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((row, i) => fill(body.children[i] ?? body.appendChild(html("tr")), "td", row, columns));
}

// Columns are { head: a cell, number, sorted }.
function table(id, columns, rows) {
  const into = by(id);
  if (!into.tHead) into.append(html("thead", html("tr")), html("tbody"));
  fill(into.tHead.rows[0], "th", columns.map((it) => it.head), columns);
  fillBody(into.tBodies[0], columns, rows);
}

const sorted = {}; // by table: the chosen column
let latestStatus = null;

const FILTERS = {
  sources: (name) => `src == ${name}`,
  services: (name) => `proto == ${name.split("/")[0]} and dport == ${name.split("/")[1]}`,
};

for (const id of Object.keys(FILTERS)) {
  by(id).addEventListener("click", ({ target }) => {
    if (target.dataset.filter !== undefined) search(target.dataset.filter, true);
    if (target.dataset.sort === undefined) return;
    sorted[id] = target.dataset.sort;
    drawTalkers(latestStatus);
  });
}

function drawTalkers(status) {
  latestStatus = status;
  const talkers = status.talkers;
  const columns = [["flows", "flows"], ["bits", "bit/s"], ["ended", `ends, ${talkers.minutes} min`]]
    .filter(([key]) => key !== "bits" || status.accounting);
  for (const [id, title] of [["sources", "source"], ["services", "service"]]) {
    const order = sorted[id] ?? (status.accounting ? "bits" : "flows");
    const heads = columns.map(([key, text]) => ({ number: true, sorted: key === order, head: { text, data: { sort: key } } }));
    const lines = [...talkers[id]].sort((a, b) => (b[order] ?? 0) - (a[order] ?? 0)).slice(0, ROWS);
    table(id, [{ head: title }, ...heads], lines.map((it) => [
      { text: it.name, data: { filter: FILTERS[id](it.name) } },
      ...columns.map(([key]) => (key === "bits" ? bits(it.bits, "") : count(it[key]))),
    ]));
  }
  const notes = [`As of ${span(status.talkers_age_seconds)} ago.`];
  if (!status.accounting) notes.push("Bits of talkers and services are counted with twheel run --accounting.");
  if (talkers.is_partial) notes.push("There are too many to count all: these have at least this much.");
  say("talkers-note", notes.join(" "));
}

function drawReaper({ reaper }) {
  const outcomes = reaper?.outcomes ?? [];
  const state = !reaper ? "There is no reaper." : reaper.paused ? "Paused." : reaper.queued > 0 ? `${count(reaper.queued)} ${reaper.queued === 1 ? "action is" : "actions are"} queued.`
    : outcomes.length > 0 ? "No action is queued." : "No action was requested.";
  say("reaper", state);
  const rows = outcomes.map((it) => [it.action, it.meaning, count(it.count)]);
  table("outcomes", rows.length > 0 ? [{ head: "action" }, { head: "outcome" }, { head: "flows", number: true }] : [], rows);
}

function drawInterfaces(status) {
  const columns = ["interface", "received", "sent", "packets/s", "new flows/s"];
  table("carried", columns.map((head, i) => ({ head, number: i > 0 })), status.carried.map((it) => [
    it.name, bits(it.bits?.[0]), bits(it.bits?.[1]), rate(it.packets), rate(it.created),
  ]));
  const more = status.interface_count - status.carried.length;
  say("carried-note", more > 0 ? `And ${count(more)} more, with fewer packets.` : "");
}

// ---- The latest ends.

let chosen = ""; // the filter of what is shown: what is typed counts once it is searched for
let refused = false; // that is not a filter
let searched = false; // the next answer is one to a search: screen readers tell it, and no later ones

const ENDS = [...by("ends").querySelectorAll("th")].map((it) => ({ number: it.className === "number" }));

function drawEnds(found) {
  fillBody(by("latest"), ENDS, found.flows.map((it) => [
    span(it.seconds_ago), it.proto, end(it.src, it.sport), end(it.dst, it.dport), it.state, it.reason, it.rule ?? "", it.iface ?? "",
    span(it.age_us / 1e6), span(it.idle_us / 1e6), it.orig_bytes === undefined ? "" : short(it.orig_bytes + it.reply_bytes),
  ]));
  by("found").setAttribute("aria-live", searched ? "polite" : "off");
  searched = false;
  const shown = found.flows.length < found.matching ? `, the latest ${count(found.flows.length)} are shown` : "";
  say("found", chosen.trim() === "" ? `The latest ${count(found.of)} ends${shown}.`
    : `${count(found.matching)} of the latest ${count(found.of)} ends match${shown}. Earlier ones: twheel expired.`);
}

async function askEnds() {
  if (refused) return;
  const filter = chosen;
  try {
    const found = await get(`api/ended?filter=${encodeURIComponent(filter)}`);
    if (chosen !== filter) return;
    by("filter").removeAttribute("aria-invalid");
    say("wrong", "");
    drawEnds(found);
  } catch (error) {
    if (error.status !== 400) throw error;
    if (chosen !== filter) return;
    refused = true;
    by("latest").replaceChildren();
    by("filter").setAttribute("aria-invalid", "true");
    say("found", "");
    say("wrong", error.message);
  }
}

function search(filter, go) {
  by("filter").value = filter;
  // What was wrong is said again if it still is.
  if (refused) say("wrong", "");
  [chosen, refused, searched] = [filter, false, true];
  // So the address can be passed on, and is there again after a reload.
  window.history.replaceState(null, "", filter === "" ? location.pathname : `#filter=${encodeURIComponent(filter)}`);
  if (go) by("ends").scrollIntoView({ behavior: still.matches ? "auto" : "smooth" });
  askEnds().catch(lost);
}

by("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search(by("filter").value, false);
});
// An emptied filter shows all again.
by("filter").addEventListener("search", () => { if (by("filter").value === "") search("", false); });
const given = new URLSearchParams(location.hash.slice(1)).get("filter");
if (given) by("filter").value = chosen = given;

// ---- Updates: once a second, while the page is visible.

function tell(text, isLost) {
  document.body.classList.toggle("lost", isLost);
  say("link", text);
}

function lost(error) {
  console.warn(error);
  tell("connection lost: what you see is old; trying again", true);
}

async function ask() {
  try {
    const [status] = await Promise.all([get("api/status"), askEnds(), askHistory()]);
    say("host", status.host);
    say("interfaces", status.interfaces.join(", "));
    say("version", `twheel ${status.version}`);
    document.title = `${status.host}: twheel ${status.interfaces.join(", ")}`;
    for (const draw of [drawRates, warn, drawHistory, drawTalkers, drawReaper, drawInterfaces, drawWheels]) draw(status);
    drawDue(status.due);
    tell(status.healthy ? "live" : "a stepper has failed: flows no longer expire", !status.healthy);
  } catch (error) {
    lost(error);
  }
}

let waiting = false;

async function watch() {
  if (waiting || document.hidden) return;
  waiting = true;
  await ask();
  setTimeout(() => { waiting = false; watch(); }, 1000);
}

document.addEventListener("visibilitychange", watch);
setInterval(() => {
  if (!still.matches && !document.hidden && !document.body.classList.contains("lost")) turnWheels();
}, 200);
watch();
