// Fetches the instance's status once a second and draws it. All text goes through textContent and
// attributes, so nothing that is shown is ever parsed as markup.
"use strict";

const STATES = ["established", "syn_sent", "syn_recv", "unreplied", "fin_wait", "close_wait", "last_ack", "time_wait",
  "close", "syn_sent2", "udp", "udp_stream", "icmp"];
const HISTORY = 300; // in seconds, and the most samples
const still = matchMedia("(prefers-reduced-motion: reduce)");

const by = (id) => document.getElementById(id);

// Creates an element with text, or with children.
function html(tag, ...inside) {
  const made = document.createElement(tag);
  made.append(...inside.map((it) => (it instanceof Node ? it : document.createTextNode(String(it)))));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A state's colour is its index in this list. Unknown states have the last colour.
const colour = (state) => `c${STATES.includes(state) ? STATES.indexOf(state) : STATES.length}`;
const count = (n) => Math.round(n).toLocaleString("en");
const seconds = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${s.toFixed(0)} s`
  : s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(0)} h`);
const end = (address, port) => (String(address).includes(":") ? `[${address}]:${port}` : `${address}:${port}`);

// ---- The wheels: level 0 is the outer ring.

const radius = (level) => 90 - 17 * level;

function point(r, part) {
  const angle = 2 * Math.PI * part - Math.PI / 2;
  return `${(r * Math.cos(angle)).toFixed(3)} ${(r * Math.sin(angle)).toFixed(3)}`;
}

// Adjacent slots are drawn as one arc.
function arcs(r, occupied, slots) {
  let path = "";
  for (let i = 0; i < occupied.length;) {
    let n = 1;
    while (i + n < occupied.length && occupied[i + n] === occupied[i] + n) n += 1;
    const from = occupied[i] / slots;
    // Wide enough to be seen, but less than a whole turn, which would draw nothing.
    const to = from + Math.min(Math.max(n / slots, 1 / 300), 0.99999);
    path += `M${point(r, from)}A${r} ${r} 0 ${to - from > 0.5 ? 1 : 0} 1 ${point(r, to)}`;
    i += n;
  }
  return path;
}

let hands = []; // { line, turn: ticks of a whole turn }
let time = null; // { tick, at, perSecond }

function drawWheels(status) {
  hands = [];
  const figures = status.wheels.map((wheel) => {
    const parts = [];
    wheel.occupied.forEach((occupied, level) => {
      const r = radius(level);
      const line = svg("line", { class: "hand", x1: 0, x2: 0, y1: -(r - 8), y2: -(r + 8) });
      hands.push({ line, turn: status.slots ** (level + 1) });
      parts.push(
        svg("circle", { class: "ring", r }),
        svg("path", { class: "lit", d: arcs(r, occupied, status.slots), "data-level": level, "data-slots": occupied.length }),
        line,
      );
    });
    const held = wheel.occupied.map((occupied) => occupied.length).join(", ");
    const label = `The wheel of CPU ${wheel.cpu}: slots that hold flows, by level: ${held}`;
    return html("figure", svg("svg", { viewBox: "-100 -100 200 200", role: "img", "aria-label": label }, ...parts),
      html("figcaption", `CPU ${wheel.cpu} · tick ${wheel.elapsed} · slots with flows: ${held}`));
  });
  by("wheels").replaceChildren(...figures);
  time = { tick: status.tick ?? 0, at: performance.now(), perSecond: 1 / status.tick_seconds };
  turn(performance.now());
  const levels = status.levels === 1 ? "1 level" : `${status.levels} levels`;
  by("geometry").textContent = `${status.scheme}: ${levels} of ${status.slots} slots, the finest outside; `
    + `a tick is ${Math.round(status.tick_seconds * 1000)} ms. Lit slots hold flows; `
    + "the hands show the present time.";
}

function turn(at) {
  if (!time) return;
  const tick = time.tick + Math.max(0, at - time.at) / 1000 * time.perSecond;
  for (const { line, turn } of hands) line.setAttribute("transform", `rotate(${(360 * ((tick / turn) % 1)).toFixed(3)})`);
}

function animate(at) {
  if (!document.body.classList.contains("lost")) turn(at);
  if (!still.matches) requestAnimationFrame(animate);
}

// ---- Flows by state, over time.

const samples = []; // { at: seconds, states }

function drawStates(status) {
  const at = performance.now() / 1000;
  samples.push({ at, states: status.states });
  while (samples.length > HISTORY || at - samples[0].at > HISTORY) samples.shift();
  const known = [...new Set([...STATES, ...samples.flatMap((it) => Object.keys(it.states))])]
    .filter((state) => samples.some((it) => it.states[state] > 0));
  const total = (states) => Object.values(states).reduce((sum, n) => sum + n, 0);
  const most = Math.max(1, ...samples.map((it) => total(it.states)));
  const below = samples.map(() => 0);
  const areas = known.map((state) => {
    const lower = samples.map((it, i) => [HISTORY - (at - it.at), 100 - 95 * below[i] / most]);
    samples.forEach((it, i) => { below[i] += it.states[state] ?? 0; });
    const upper = samples.map((it, i) => [HISTORY - (at - it.at), 100 - 95 * below[i] / most]);
    const points = [...upper, ...lower.reverse()].map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(" ");
    return svg("polygon", { class: colour(state), points });
  });
  document.querySelector("#history svg").replaceChildren(...areas);
  by("most").textContent = `at most ${count(most)}`;
  by("states").replaceChildren(...known.map((state) => html("li",
    svg("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, svg("rect", { class: colour(state), width: 1, height: 1 })),
    `${state} ${count(status.states[state] ?? 0)}`)));
}

// ---- Numbers.

let before = null;

function drawRates(status) {
  const at = performance.now() / 1000;
  const ended = (c) => c.expired + c.evicted + c.deleted + c.superseded;
  const rate = (of) => (before && at > before.at
    ? count(Math.max(0, of(status.counters) - of(before.counters)) / (at - before.at)) : "–");
  const shown = [
    ["flows", `${count(status.flows)}`],
    ["capacity", count(status.max_flows)],
    ["packets/s", rate((c) => c.touched)],
    ["new flows/s", rate((c) => c.created)],
    ["ended/s", rate(ended)],
    ["visits/s", rate((c) => c.visits)],
    ["events lost", count(status.counters.events_lost)],
    ["up", seconds(status.uptime_seconds)],
  ];
  by("rates").replaceChildren(...shown.map(([name, value]) => html("div", html("dt", name), html("dd", value))));
  before = { at, counters: status.counters };
}

function drawLatest(status) {
  by("latest").replaceChildren(...status.latest.map((it) => html("tr", ...[
    seconds(it.seconds_ago), it.proto, end(it.src, it.sport), end(it.dst, it.dport), it.state, it.reason, it.rule ?? "",
    seconds(it.age_us / 1e6), seconds(it.idle_us / 1e6),
  ].map((text) => html("td", text)))));
}

// ---- Updates: once a second, while the page is visible.

function say(text, lost) {
  document.body.classList.toggle("lost", lost);
  if (by("link").textContent !== text) by("link").textContent = text;
}

async function ask() {
  try {
    const answer = await fetch("api/status", { signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(await answer.text());
    const status = await answer.json();
    by("interfaces").textContent = status.interfaces.join(", ");
    by("version").textContent = `twheel ${status.version}`;
    document.title = `twheel ${status.interfaces.join(", ")}`;
    for (const draw of [drawRates, drawWheels, drawStates, drawLatest]) draw(status);
    say(status.healthy ? "live" : "a stepper has failed: flows no longer expire", !status.healthy);
  } catch (error) {
    console.warn(error);
    say("connection lost: what you see is old; trying again", true);
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
if (!still.matches) requestAnimationFrame(animate);
watch();
