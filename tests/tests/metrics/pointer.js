// Points at a chart at several places, and leaves it.
const wait = (ms) => new Promise((done) => { setTimeout(done, ms); });
const figure = document.getElementById("chart-states");
const shown = () => ({
  line: figure.querySelectorAll(".pointer").length,
  time: figure.querySelector(".axis b")?.textContent ?? null,
  legend: figure.querySelector(".legend").textContent,
});
await wait(3000);
const { left, width } = figure.querySelector(".plot").getBoundingClientRect();
const steps = [shown()];
for (const part of [0, 1]) {
  figure.dispatchEvent(new PointerEvent("pointermove", { clientX: left + part * width }));
  steps.push(shown());
}
await wait(1500);
steps.push(shown());
figure.dispatchEvent(new PointerEvent("pointerleave"));
steps.push(shown());
top.document.body.dataset.probe = JSON.stringify(steps);
