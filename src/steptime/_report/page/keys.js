// Buttons and keys, light and dark; and the first picture.

const ZOOM = 1.5, MOVE = 0.15;
function zoom(factor) { view.zoom(factor); redraw(); }
function fit() { view.show(0, timeline.end); redraw(); }

/** From the first to the last work: hosts may have begun long before. */
function showDevices() {
  const lanes = timeline.ranks.flatMap((rank) => rank.lanes).filter((lane) => !lane.host && lane.begin.length);
  if (!lanes.length) return void fit();
  const begin = Math.min(...lanes.map((lane) => lane.begin[0])), end = Math.max(...lanes.map((lane) => lane.end.at(-1)));
  const margin = (end - begin) / 100;
  view.show(begin - margin, end + margin);
  redraw();
}

byId("in").addEventListener("click", () => zoom(ZOOM));
byId("out").addEventListener("click", () => zoom(1 / ZOOM));
byId("fit").addEventListener("click", fit);
byId("devices").addEventListener("click", showDevices);
byId("highlight").addEventListener("change", (event) => { state.highlight = event.target.checked; redraw(); });
byId("hosts").addEventListener("change", (event) => {
  state.layout = layRows(timeline.ranks, event.target.checked);
  fitStage();
});
byId("ask").addEventListener("click", () => byId("help").showModal());

const KEYS = {
  "+": () => zoom(ZOOM),
  "=": () => zoom(ZOOM), // the same key without Shift
  "-": () => zoom(1 / ZOOM),
  0: fit,
  d: showDevices,
  "/": () => { byId("timeline").scrollIntoView(); query.select(); },
  "?": () => byId("help").showModal(),
  n: () => go(1),
  N: () => go(-1),
  p: () => byId("highlight").click(),
  h: () => byId("hosts").click(),
  Escape: () => {
    for (const pressed of document.querySelectorAll("#legend [aria-pressed=true]")) pressed.setAttribute("aria-pressed", "false");
    find("", new Set());
    choose(null);
  },
};
// These scroll the page unless the timeline has the focus.
const STAGE_KEYS = {
  ArrowLeft: () => { view.move(-MOVE); redraw(); },
  ArrowRight: () => { view.move(MOVE); redraw(); },
  ArrowUp: () => { stage.scrollTop -= 2 * LANE_ROW; },
  ArrowDown: () => { stage.scrollTop += 2 * LANE_ROW; },
  ".": () => step(1),
  ",": () => step(-1),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.target.matches("input[type=search], textarea, select")) return;
  const action = KEYS[event.key] ?? (document.activeElement === stage ? STAGE_KEYS[event.key] : undefined);
  if (!action) return;
  event.preventDefault();
  action();
});

// --- Light and dark ---

const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), theme = byId("theme");
const isDark = () => (root.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";

function recolour() {
  theme.textContent = isDark() ? "Light" : "Dark";
  drawing.recolour();
  drawing.draw();
}

theme.addEventListener("click", () => { root.style.colorScheme = isDark() ? "light" : "dark"; recolour(); });
dark.addEventListener("change", recolour);
let before = "";
addEventListener("beforeprint", () => { before = root.style.colorScheme; root.style.colorScheme = "light"; recolour(); });
addEventListener("afterprint", () => { root.style.colorScheme = before; recolour(); });

fitStage();
showDevices();
recolour();
