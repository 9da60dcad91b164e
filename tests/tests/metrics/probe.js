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
const name = (it) => `${it.tagName}#${it.id}.${it.getAttribute("class")} ${it.textContent.slice(0, 30)}`;

setTimeout(() => {
  const seen = [...document.body.querySelectorAll("*")].filter((it) => it.getClientRects().length > 0);
  const texts = seen.filter((it) => !it.closest("svg") && [...it.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const contrast = (it) => {
    const [a, b] = [getComputedStyle(it).color, behind(it)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const outside = seen.filter((it) => !it.closest(".scroll table, svg, .skip, pre") && it.getBoundingClientRect().right > innerWidth + 1);
  const usable = [...document.querySelectorAll("a[href], button, input, [tabindex='0']")];
  const labelled = (it) => it.getAttribute("aria-label") || it.getAttribute("aria-labelledby") || it.textContent.trim() || it.labels?.length;
  const pictures = [...document.querySelectorAll("svg")].filter((it) => !it.closest("[aria-hidden='true']"));
  top.document.body.dataset.probe = JSON.stringify({
    width: innerWidth,
    scrolls: document.documentElement.scrollWidth,
    outside: outside.map(name),
    pale: texts.filter((it) => contrast(it) < 4.5).map((it) => `${contrast(it).toFixed(1)} ${name(it)}`),
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
