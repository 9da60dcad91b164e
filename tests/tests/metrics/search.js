// Types, without searching; searches with a filter that is wrong, then one that nothing matches, then
// chooses a service and sorts by another column.
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const by = (id) => document.getElementById(id);
const texts = () => [...by("latest").rows].map((row) => row.cells[3].textContent);
const steps = {};
await wait(2000);
steps.first = texts();
for (const typed of ["r", "reas", "dport == 1"]) {
  by("filter").value = typed;
  by("filter").dispatchEvent(new InputEvent("input", { bubbles: true }));
  await wait(1500);
}
steps.typed = { said: by("wrong").textContent, found: by("found").textContent, rows: texts(), hash: location.hash };
let told = 0;
new MutationObserver(() => { told += 1; }).observe(by("wrong"), { childList: true, characterData: true, subtree: true });
by("filter").value = "reason == idle and prot == tcp";
by("search").requestSubmit();
await wait(3500);
steps.wrong = { told, said: by("wrong").textContent, found: by("found").textContent, rows: texts(),
  invalid: by("filter").getAttribute("aria-invalid"), link: by("link").textContent };
by("filter").value = "dport == 1 or reason != reset";
by("search").requestSubmit();
await wait(2000);
steps.none = { said: by("wrong").textContent, found: by("found").textContent, rows: texts() };
const button = [...document.querySelectorAll("#services button")].find((it) => it.textContent.includes("/"));
button.focus();
button.click();
await wait(2500);
steps.chosen = { filter: by("filter").value, hash: location.hash, rows: texts(), kept: document.activeElement === button };
[...document.querySelectorAll("#services th button")].at(-1).click();
await wait(1500);
steps.sorted = [...document.querySelectorAll("#services th[aria-sort]")].map((it) => it.textContent);
top.document.body.dataset.probe = JSON.stringify(steps);
