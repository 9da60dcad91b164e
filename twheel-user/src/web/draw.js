// Draws charts and wheels. All text goes through textContent and attributes, so nothing that is
// shown is ever parsed as markup.

export const by = (id) => document.getElementById(id);

// Creates an element with text, or with children.
export function html(tag, ...inside) {
  const made = document.createElement(tag);
  made.append(...inside.map((it) => (it instanceof Node ? it : document.createTextNode(String(it)))));
  return made;
}

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Sets a text only if it differs: screen readers tell of each change.
export function say(id, text) {
  if (by(id).textContent !== text) by(id).textContent = text;
}

// ---- Numbers as text.

export const count = (n) => Math.round(n).toLocaleString("en");
export const rate = (n) => (n === null || n === undefined ? "–" : n < 10 ? n.toFixed(1) : count(n));

export function bits(n, unit = "bit/s") {
  if (n === null || n === undefined) return "–";
  const units = ["", "k", "M", "G", "T"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${at > 0 && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}${unit}`;
}

export function short(n) {
  const units = ["", "k", "M", "G"];
  let at = 0;
  while (n >= 10000 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${count(n)}${units[at]}`;
}

export function span(s) {
  for (const [unit, length, up] of [["ms", 0.001, 1], ["s", 1, 120], ["min", 60, 7200], ["h", 3600, 172800], ["d", 86400, 63115200]]) {
    if (Math.abs(s) < up) {
      const n = s / length;
      return `${n < 10 && n !== Math.round(n) && unit !== "ms" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    }
  }
  return `${(s / 31557600).toFixed(1)} y`;
}

// ---- Charts over time.

const WIDTH = 600;
const HEIGHT = 120;

function square(colour) {
  return svg("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, svg("rect", { class: colour, width: 1, height: 1 }));
}

// A round number not below n.
function ceiling(n) {
  const power = 10 ** Math.floor(Math.log10(n));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((it) => it * power).find((it) => it >= n * 0.999);
}

// The times of day in a range.
function clock(range) {
  const second = range.to - range.from < 1800000 ? "2-digit" : undefined;
  return (time) => new Date(time).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second });
}

// The part of the chart's width at which a time is, for each point; a gap in time breaks lines.
function places(times, range) {
  return times.map((time) => WIDTH * (time - range.from) / (range.to - range.from));
}

function line(x, values, times, step, y) {
  let path = "";
  let pen = false;
  values.forEach((value, i) => {
    pen = pen && times[i] - times[i - 1] < 3 * step;
    if (value === null) { pen = false; return; }
    path += `${pen ? "L" : "M"}${x[i].toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return path;
}

// The chart that the pointer is on: { id, part: of its width }.
let pointed = null;

// Shows, while the pointer is on a chart, the values of the time under it.
function heed(figure, again) {
  const move = (event) => {
    const { left, width } = figure.querySelector(".plot").getBoundingClientRect();
    pointed = { id: figure.id, part: (event.clientX - left) / width };
    figure.redraw();
  };
  if (!figure.redraw) {
    figure.addEventListener("pointermove", move);
    figure.addEventListener("pointerleave", () => { pointed = null; figure.redraw(); });
  }
  figure.redraw = again;
}

// The number of the point that is next to the pointer; undefined if that is elsewhere.
function underPointer(id, x) {
  if (pointed?.id !== id) return undefined;
  const away = x.map((at) => Math.abs(at - WIDTH * pointed.part));
  const nearest = away.indexOf(Math.min(...away));
  return away[nearest] <= WIDTH / 20 ? nearest : undefined;
}

// Draws series, each { name, colour, values, now: text }, as lines or one upon the other.
export function chart(id, history, range, series, options) {
  heed(by(id), () => chart(id, history, range, series, options));
  const { stacked = false, unit } = options;
  const { times, seconds } = history;
  const x = places(times, range);
  const below = times.map(() => 0);
  const sums = stacked ? times.map((_, i) => series.reduce((sum, it) => sum + it.values[i], 0)) : [];
  const most = Math.max(0, ...(stacked ? sums : series.flatMap((it) => it.values)));
  const top = most > 0 ? ceiling(most) : 1;
  const y = (value) => HEIGHT - (HEIGHT - 4) * value / top;
  const grid = [0.5, 1].map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(part * top), y2: y(part * top) }));
  const shapes = series.map((it) => {
    if (!stacked) return svg("path", { class: `line ${it.colour}`, d: line(x, it.values, times, 1000 * seconds, y) });
    const lower = x.map((at, i) => `${at.toFixed(1)},${y(below[i]).toFixed(1)}`);
    it.values.forEach((value, i) => { below[i] += value; });
    const upper = x.map((at, i) => `${at.toFixed(1)},${y(below[i]).toFixed(1)}`);
    return svg("polygon", { class: it.colour, points: [...upper, ...lower.reverse()].join(" ") });
  });
  const place = underPointer(id, x);
  const pointer = place === undefined ? [] : [svg("line", { class: "pointer", x1: x[place], x2: x[place], y1: 0, y2: HEIGHT })];
  const title = by(id).querySelector("figcaption").textContent;
  const at = clock(range);
  const label = `${title} from ${at(range.from)} to ${at(range.to)}, at most ${unit(most)}`;
  const picture = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...grid, ...shapes, ...pointer);
  const scale = html("p", html("span", unit(top)), html("span", unit(top / 2)), html("span", "0"));
  scale.className = "scale";
  scale.setAttribute("aria-hidden", "true");
  const middle = place === undefined ? html("span", at((range.from + range.to) / 2)) : html("b", at(times[place]));
  const axis = html("p", html("span", at(range.from)), middle, html("span", at(range.to)));
  axis.className = "axis";
  axis.setAttribute("aria-hidden", "true");
  const value = (it) => (place === undefined ? it.now : unit(it.values[place]));
  const legend = html("ul", ...series.map((it) => html("li", square(it.colour.replace("line", "")), `${it.name} ${value(it)}`)));
  legend.className = "legend";
  const plot = html("div", picture, scale);
  plot.className = "area";
  by(id).replaceChildren(by(id).querySelector("figcaption"), plot, axis, legend);
}

// ---- What falls due when.

// A whole number of the largest unit that has one.
function whole(s) {
  const [unit, length] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, it]) => s % it === 0);
  return `${s / length} ${unit}`;
}

export function drawDue(due) {
  const most = Math.max(1, ...due.map((it) => it.flows));
  by("due").replaceChildren(...due.map((it, i) => {
    const height = it.flows > 0 ? Math.max(2, 100 * it.flows / most) : 0;
    const name = it.within === null ? `> ${whole(due[i - 1].within)}` : `≤ ${whole(it.within)}`;
    const bar = svg("svg", { viewBox: "0 0 10 100", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "bar", x: 0, width: 10, y: 100 - height, height }));
    const flows = html("span", short(it.flows));
    flows.className = "flows";
    const label = html("span", name);
    label.className = "within";
    const item = html("li", flows, bar, label);
    item.dataset.flows = it.flows;
    return item;
  }));
}

// ---- The wheels: level 0 is the outer ring. What is at the top is due now, what is at the bottom
// in half a round.

const radius = (level) => 84 - 21 * level;
const BAND = 15; // the width of a ring, as in style.css
// The least number of flows of each colour.
const SHADES = [1, 10, 100, 1000];

function point(r, part) {
  const angle = 2 * Math.PI * part - Math.PI / 2;
  return `${(r * Math.cos(angle)).toFixed(2)} ${(r * Math.sin(angle)).toFixed(2)}`;
}

const shade = (flows) => SHADES.findLastIndex((least) => flows >= least);

// One path for the cells of each colour.
function cells(r, flows) {
  const gap = 0.06 / flows.length;
  return SHADES.map((_, of) => {
    let path = "";
    flows.forEach((n, i) => {
      if (shade(n) === of) path += `M${point(r, i / flows.length + gap)}A${r} ${r} 0 0 1 ${point(r, (i + 1) / flows.length - gap)}`;
    });
    return path && svg("path", { class: `cell shade${of}`, d: path });
  }).filter(Boolean);
}

let rings = []; // { ring, turn: ticks of a whole turn }
let time = null; // { tick, at, perSecond }

function wheel(of, status) {
  const parts = of.levels.flatMap((level, at) => {
    const r = radius(at);
    const ring = svg("g", { class: "turns" }, ...cells(r, level.cells));
    rings.push({ ring, turn: status.slots ** (at + 1) });
    const marks = [[0.5, 0, r + 3]];
    if (at === 0) marks.push([0.25, r, 3], [0.75, -r, 3]);
    const labels = marks.map(([part, x, y]) => svg("text", { x, y }, span(part * level.round)));
    return [svg("circle", { class: "ring", r }), ring, ...labels];
  });
  // The hand stands beside the rings, so that it covers no place.
  const beside = of.levels.map((_, at) => `M0 ${BAND / 2 - radius(at)}L0 ${BAND / 2 - radius(at) + 5}`).join("");
  const now = svg("path", { class: "hand", d: `M0 -99L-4 -92.5L4 -92.5Z${beside}` });
  const rounds = of.levels.map((level) => span(level.round)).join(", ");
  const held = of.levels.map((level) => level.slots).join(", ");
  const name = of.cpu === undefined ? `all ${status.wheels.cpus} CPUs` : `CPU ${of.cpu}`;
  const next = of.next_ms === null ? "empty" : of.next_ms <= 0 ? "a slot is due" : `next slot in ${span(of.next_ms / 1000)}`;
  const label = `The wheel of ${name}: slots that hold flows, by level: ${held}; a round of each level: ${rounds}; ${next}`;
  return html("figure", svg("svg", { viewBox: "-100 -100 200 200", role: "img", "aria-label": label }, ...parts, now),
    html("figcaption", html("b", name), ` ${next}`, html("br"), `a round: ${rounds}`, html("br"), `slots with flows: ${held}`));
}

export function drawWheels(status) {
  rings = [];
  by("wheels").replaceChildren(...status.wheels.wheels.map((it) => wheel(it, status)));
  time = { tick: status.tick ?? 0, at: performance.now(), perSecond: 1 / status.tick_seconds };
  turnWheels();
  const levels = status.levels === 1 ? "one level" : `${status.levels} levels`;
  say("geometry", `${status.scheme}: ${levels} of ${status.slots} slots, the finest outside; a tick is ${span(status.tick_seconds)}. `
    + "The hand at the top is now; the times say how far ahead a place is.");
  if (!by("occupancy").hasChildNodes()) {
    const names = ["1 flow or more in a place", "10", "100", "1,000"];
    by("occupancy").replaceChildren(...names.map((name, i) => html("li", square(`shade${i}`), name)));
  }
}

export function turnWheels() {
  if (!time) return;
  const tick = time.tick + Math.max(0, performance.now() - time.at) / 1000 * time.perSecond;
  for (const { ring, turn } of rings) ring.setAttribute("transform", `rotate(${(-360 * ((tick / turn) % 1)).toFixed(2)})`);
}
