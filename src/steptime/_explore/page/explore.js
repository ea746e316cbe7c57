// The application: what a person changes is asked about at once; what is shown says whether it is of what is set.

import { Connection, request } from "/page/connection.js";
import { Controls, made } from "/page/controls.js";
import { Saved, time } from "/page/saved.js";
import { find, recolour, showTimeline } from "/page/timeline.js";

const byId = (id) => document.getElementById(id);
const STALE = 150; // ms after which it is shown that an answer is being made
const SPOKEN = 600; // ms of quiet after which a screen reader is told the answer

history.replaceState(null, "", `/${location.hash}`); // the token stays out of sight and of bookmarks

const first = await request("/api/controls");
if (first.status === 401) {
  byId("gone").hidden = false;
  byId("gone").textContent = "Open the address that steptime explore printed: it has the token that this page lacks.";
  await new Promise(() => {}); // nothing else works without it
}
const described = await first.json();
byId("name").textContent = described.name;
document.title = `${described.name} · steptime explore`;
byId("footer").textContent = `steptime ${described.version}`;

let shown = null; // the answer in sight, and the values it is of
let start = null; // the answer to begin with
let last = null; // the control moved last
let staleTimer = null, spokenTimer = null, helpsTimer = null;

const controls = new Controls(byId("controls"), described.controls, (control) => {
  last = control;
  ask();
}, (control) => { if (shown && !control.given.disabled) connection.expect(controls.values, control); },
() => connection.said("suggest", controls.values));

function ask() {
  const { values } = controls;
  history.replaceState(null, "", Object.keys(values).length ? `/#${encodeURIComponent(JSON.stringify(values))}` : "/");
  connection.ask(values, last);
}

function busy() {
  clearTimeout(helpsTimer);
  byId("answer").setAttribute("aria-busy", "true");
  staleTimer ??= setTimeout(() => {
    document.body.classList.add("stale");
    const began = performance.now() - STALE;
    const tell = () => { byId("status").textContent = `predicting … ${((performance.now() - began) / 1000).toFixed(1)} s`; };
    tell();
    staleTimer = { interval: setInterval(tell, 500) };
  }, STALE);
}

function settled() {
  byId("answer").setAttribute("aria-busy", "false");
  if (staleTimer?.interval) clearInterval(staleTimer.interval);
  else clearTimeout(staleTimer);
  staleTimer = null;
}

/** Markup of the server is escaped there; the content policy would run nothing of it anyway. */
function fill(id, markup) { byId(id).innerHTML = markup; }

function answer(given, question, more) {
  shown = { given, values: question.values };
  controls.silence();
  controls.came(given.derived);
  byId("problem").hidden = true;
  for (const name of ["summary", "families", "ranks", "path", "coverage"]) fill(name, given.sections[name]);
  fill("memory-part", given.sections.memory);
  byId("note").textContent = given.note;
  byId("note").hidden = !given.note;
  byId("command").querySelector("code").textContent = given.command;
  figure(given.answer, question.values);
  showTimeline(given.timeline);
  if (more) return;
  settled();
  document.body.classList.remove("stale", "impossible");
  byId("status").textContent = "";
  // For benchmarks/explore_latency.py: from the change to the first frame that may show its answer.
  requestAnimationFrame(() => performance.measure("answered", { start: question.at, end: performance.now(), detail: given.took }));
  clearTimeout(helpsTimer);
  if (given.answer.memory?.fits === false) helpsTimer = setTimeout(() => helps(question.values), SPOKEN);
  connection.expect(question.values, last);
  clearTimeout(spokenTimer);
  spokenTimer = setTimeout(() => speak(given.answer), SPOKEN);
}

/** What would make it fit is tried, which takes a while, and said once it is known. */
async function helps(values) {
  const { summary, remedies } = await connection.said("helps", values);
  if (!summary || shown.values !== values) return;
  fill("summary", summary);
  document.querySelectorAll("#summary .helps li").forEach((item, i) => {
    if (remedies[i]) item.append(" ", made("button", { type: "button", onclick: () => { controls.take(remedies[i]); ask(); } }, "Apply"));
  });
}

/** By how much a step is another one than to begin with; of another batch, what that means for samples. */
function against(found) {
  if (!start || found.step_time_ms === start.step_time_ms) return "";
  const samples = found.batch !== start.batch && found.samples_per_s && start.samples_per_s;
  const ratio = samples ? found.samples_per_s / start.samples_per_s - 1 : found.step_time_ms / start.step_time_ms - 1;
  return `${ratio < 0 ? "−" : "+"}${Math.abs(100 * ratio).toFixed(1)} % ${samples ? "samples/s" : "step time"} against the start`;
}

/** The step in the header, where it stays in sight. */
function figure(found, values) {
  if (!Object.keys(values).length) start = found;
  const unfit = found.memory?.fits === false, step = `${time(found.step_time_ms)} ms`;
  byId("figure").replaceChildren(made("strong", {}, unfit ? "does not fit" : step), made("span", {}, unfit ? `${step} if there were room` : against(found)));
  byId("figure").hidden = false;
}

function speak(found) {
  const [low, high] = found.interval_ms, fits = found.memory?.fits === false ? ", does not fit in memory" : "";
  byId("spoken").textContent = `${time(found.step_time_ms)} ms per step, ${time(low)} to ${time(high)}${fits}; ${found.bound_by}`;
}

/** What cannot be: beside the control, the last good answer stays and is called that. */
function wrong({ error, control }, question) {
  settled();
  controls.silence();
  const beside = controls.all.get(control) ?? question.about;
  if (beside) beside.say(error);
  byId("problem").textContent = error;
  byId("problem").hidden = Boolean(beside);
  document.body.classList.add("stale", "impossible");
  byId("status").textContent = shown ? "Showing the last valid answer" : "not possible";
}

function gone(text) {
  settled();
  document.body.classList.add("stale");
  byId("status").textContent = "no server";
  byId("gone").textContent = text;
  byId("gone").hidden = false;
}

function back() {
  byId("gone").hidden = true;
  byId("status").textContent = "the server is back";
  ask();
}

const connection = new Connection({ answer, wrong, busy, gone, back });
const saved = new Saved(byId("saved"), controls, (values) => {
  controls.take(values);
  last = null;
  ask();
}, (variants) => connection.said("compare", {}, variants));


// --- Saving, exporting ---

byId("save").addEventListener("click", () => { if (shown) saved.add(shown.values, shown.given.answer); });
byId("reset").addEventListener("click", () => { controls.take({}); last = null; ask(); });

/** Says on a button what happened, for a moment. */
function flash(button, text) {
  const before = button.dataset.text ??= button.textContent;
  button.textContent = text;
  setTimeout(() => { button.textContent = before; }, 1400);
}

byId("copy").addEventListener("click", async (event) => {
  if (!shown) return;
  try {
    await navigator.clipboard.writeText(shown.given.command);
    flash(event.target, "Copied");
  } catch {
    getSelection().selectAllChildren(byId("command").querySelector("code"));
    flash(event.target, "Selected below");
  }
});

const config = document.querySelector("[data-form=toml]");
config.disabled = Boolean(described.without_config);
config.title = described.without_config;

for (const button of document.querySelectorAll("[data-form]")) {
  button.addEventListener("click", async () => {
    if (!shown) return;
    const { form } = button.dataset, several = form === "comparison";
    const { blob, error } = await connection.file(shown.values, form, several ? saved.variants : []);
    if (error) {
      byId("problem").textContent = error;
      byId("problem").hidden = false;
      return;
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    const which = several ? "-comparison" : Object.keys(shown.values).length ? "-variant" : "";
    link.download = `${described.name.replace(/[^\w.-]+/g, "-")}${which}.${several ? "html" : form}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    flash(button, "Saved");
  });
}

/** Names of the critical path are found in the timeline. */
byId("path").addEventListener("click", (event) => {
  const name = event.target.closest("[data-find]")?.dataset.find;
  if (!name) return;
  find(name);
  byId("timeline").scrollIntoView();
});

// --- Light and dark ---

const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), theme = byId("theme");
const isDark = () => (root.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
function paint() {
  theme.textContent = isDark() ? "Light" : "Dark";
  recolour();
}
theme.addEventListener("click", () => { root.style.colorScheme = isDark() ? "light" : "dark"; paint(); });
dark.addEventListener("change", paint);
paint();

// --- The first answer: of what the address says ---

function fromAddress() {
  try {
    const values = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
    controls.take(values && typeof values === "object" ? values : {});
  } catch { controls.take({}); }
}
addEventListener("hashchange", () => { fromAddress(); ask(); });
fromAddress();
ask();
