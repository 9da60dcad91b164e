// What a reader of the page meets: does it fit, can it be read, can it be used without a mouse.
const luminance = (text) => {
  const [r, g, b] = text.match(/[\d.]+/g).map(Number).map((it) => it / 255)
    .map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const isClear = (colour) => /, 0\)$/.test(colour) || colour === "transparent" || colour.startsWith("color(");
const behind = (element) => {
  for (let it = element; it; it = it.parentElement) {
    const colour = getComputedStyle(it).backgroundColor;
    if (!isClear(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const between = (a, b) => {
  const [one, two] = [a, b].map(luminance);
  return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
};
// What a colour of shapes is here, by its class.
const drawn = (of, what) => {
  const shape = document.querySelector("#wheels svg").appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
  shape.setAttribute("class", of);
  const colour = getComputedStyle(shape)[what];
  shape.remove();
  return colour;
};
// In OKLab, where distances are what one sees.
const place = (text) => {
  const [r, g, b] = text.match(/[\d.]+/g).map(Number).map((it) => it / 255)
    .map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
  const [l, m, s] = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    .map(([x, y, z]) => Math.cbrt(x * r + y * g + z * b));
  return [0.2105 * l + 0.7936 * m - 0.0041 * s, 1.978 * l - 2.4286 * m + 0.4506 * s, 0.0259 * l + 0.7828 * m - 0.8087 * s];
};
const apart = (a, b) => Math.hypot(...place(a).map((it, i) => it - place(b)[i]));
const name = (it) => `${it.tagName}#${it.id}.${it.getAttribute("class")} ${it.textContent.slice(0, 30)}`;

setTimeout(() => {
  const seen = [...document.body.querySelectorAll("*")].filter((it) => it.getClientRects().length > 0);
  const texts = seen.filter((it) => !it.closest("svg") && [...it.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const contrast = (it) => between(getComputedStyle(it).color, behind(it));
  const panel = behind(document.getElementById("wheels"));
  const ring = drawn("ring", "stroke");
  const fills = [...Array(14).keys()].map((it) => [`c${it}`, drawn(`c${it}`, "fill")]);
  const shades = [...Array(4).keys()].map((it) => [`shade${it}`, drawn(`cell shade${it}`, "stroke")]);
  const lines = ["line one", "line two", "hand", "pointer"].map((it) => [it, drawn(it, "stroke")]);
  const shapes = [...fills, ...shades, ...lines, ["bar", drawn("bar", "fill")]];
  const against = [...shapes.map((it) => [...it, panel]), ...shades.map((it) => [...it, ring])];
  const pairs = fills.flatMap((a, i) => fills.slice(i + 1).map((b) => [a, b]));
  const outside = seen.filter((it) => !it.closest(".scroll table, svg, .skip, pre") && it.getBoundingClientRect().right > innerWidth + 1);
  const usable = [...document.querySelectorAll("a[href], button, input, [tabindex='0']")];
  const labelled = (it) => it.getAttribute("aria-label") || it.getAttribute("aria-labelledby") || it.textContent.trim() || it.labels?.length;
  const pictures = [...document.querySelectorAll("svg")].filter((it) => !it.closest("[aria-hidden='true']"));
  top.document.body.dataset.probe = JSON.stringify({
    width: innerWidth,
    scrolls: document.documentElement.scrollWidth,
    outside: outside.map(name),
    pale: texts.filter((it) => contrast(it) < 4.5).map((it) => `${contrast(it).toFixed(1)} ${name(it)}`),
    faint: against.map(([of, colour, on]) => `${between(colour, on).toFixed(2)} ${of} ${colour} on ${on}`).filter((it) => !(parseFloat(it) >= 3)),
    alike: pairs.filter(([a, b]) => !(apart(a[1], b[1]) >= 0.1)).map(([a, b]) => `${a} ${b}`),
    shades: shades.map(([, colour]) => between(colour, ring)),
    back: getComputedStyle(document.body).backgroundColor,
    unreachable: usable.filter((it) => { it.focus(); return document.activeElement !== it; }).map(name),
    usable: usable.length,
    unlabelled: [...usable, ...pictures].filter((it) => !labelled(it)).map(name),
    pictures: pictures.length,
    headings: [...document.querySelectorAll("h1, h2")].map((it) => it.textContent),
    unscoped: [...document.querySelectorAll("th:not([scope])")].length,
    elsewhere: performance.getEntriesByType("resource").map((it) => it.name).filter((it) => !it.startsWith(location.origin)),
  });
}, 3000);
