// The timeline of the newest answer. Reading, drawing and pointing at it are the page's own (_report/page).

const byId = (id) => document.getElementById(id);
const [stage, canvas, spacer, tip] = ["stage", "canvas", "spacer", "tip"].map(byId);
const NOTHING = { strings: [], families: [], programs: [], ranks: [], end: 1,
  path: { reasons: [], ranks: "", lanes: "", starts: "", lengths: "", why: "" } };
let timeline = readTimeline(NOTHING);
const state = {
  timeline,
  search: new Search(timeline),
  view: new View(1),
  layout: layRows([], true),
  highlight: true,
  hovered: null,
  chosen: null,
  stretch: null,
};
const { view } = state;
const drawing = new Drawing(canvas, state);

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    drawing.draw();
    byId("range").textContent = `${timeText(view.begin)} – ${timeText(view.end)} ms`;
  });
}

function fitStage() {
  const height = Math.min(state.layout.height + AXIS, Math.max(300, Math.round(innerHeight * 0.5)));
  drawing.resize(stage.clientWidth, height);
  spacer.style.height = `${Math.max(state.layout.height + AXIS - height, 0)}px`;
  view.width = Math.max(stage.clientWidth - GUTTER, 1);
  view.scroll = stage.scrollTop;
  redraw();
}

function choose(bar) {
  state.chosen = bar;
  showChosen(byId("chosen"), bar, timeline);
  redraw();
}

function layOut() {
  state.layout = layRows(timeline.ranks, byId("hosts").checked);
  fitStage();
}

/** From the first to the last work: hosts may have begun long before. */
function devices() {
  const lanes = timeline.ranks.flatMap((rank) => rank.lanes).filter((lane) => !lane.host && lane.begin.length);
  if (!lanes.length) return [0, timeline.end];
  const begin = Math.min(...lanes.map((lane) => lane.begin[0])), end = Math.max(...lanes.map((lane) => lane.end.at(-1)));
  return [begin - (end - begin) / 100, end + (end - begin) / 100];
}

function show(begin, end) { view.show(begin, end); redraw(); }
function zoom(factor) { view.zoom(factor); redraw(); }

let zoomed = false; // whether a person has zoomed in: then the same share of the step stays in view

/** Draws another timeline; a stretch that a person zoomed into stays the same share of it. */
function showTimeline(given) {
  const from = view.begin / view.length, to = view.end / view.length;
  timeline = readTimeline(given);
  Object.assign(state, { timeline, search: new Search(timeline), hovered: null, chosen: null });
  find(byId("query").value);
  tip.hidden = true;
  showChosen(byId("chosen"), null, timeline);
  view.length = timeline.end;
  if (zoomed) view.show(from * timeline.end, to * timeline.end);
  else view.show(...devices());
  drawing.recolour();
  layOut();
}

/** Marks what has this in its name. */
function find(text) {
  byId("query").value = text;
  state.search.set(text);
  byId("found").textContent = state.search.said();
  redraw();
}
byId("query").addEventListener("input", () => find(byId("query").value));
byId("query").addEventListener("keydown", (event) => { if (event.key === "Escape") { find(""); stage.focus(); } });

function recolour() {
  drawing.recolour();
  redraw();
}

function step(by) {
  const start = state.chosen ?? state.layout.rows.filter((row) => row.lane).map(({ lane }) => (
    { lane, row: firstAfter(lane.end, view.begin) - by })).find(({ lane, row }) => row + by < lane.begin.length);
  if (!start || start.row + by < 0 || start.row + by >= start.lane.begin.length) return;
  const bar = { lane: start.lane, row: start.row + by }, middle = (bar.lane.begin[bar.row] + bar.lane.end[bar.row]) / 2;
  if (middle < view.begin || middle > view.end) view.show(middle - view.span / 2, middle + view.span / 2);
  choose(bar);
}

const STAGE_KEYS = {
  ArrowLeft: () => { view.move(-0.15); redraw(); },
  ArrowRight: () => { view.move(0.15); redraw(); },
  ArrowUp: () => { stage.scrollTop -= 2 * LANE_ROW; },
  ArrowDown: () => { stage.scrollTop += 2 * LANE_ROW; },
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  0: () => show(0, timeline.end),
  d: () => show(...devices()),
  ".": () => step(1),
  ",": () => step(-1),
  Escape: () => { find(""); choose(null); },
};
stage.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !STAGE_KEYS[event.key]) return;
  event.preventDefault();
  zoomed = event.key !== "d";
  STAGE_KEYS[event.key]();
});
stage.addEventListener("scroll", () => { view.scroll = stage.scrollTop; redraw(); });
for (const kind of ["pointerdown", "wheel", "dblclick"]) stage.addEventListener(kind, (event) => { zoomed ||= kind !== "wheel" || event.ctrlKey; });
byId("in").addEventListener("click", () => { zoomed = true; zoom(1.5); });
byId("out").addEventListener("click", () => { zoomed = true; zoom(1 / 1.5); });
byId("fit").addEventListener("click", () => { zoomed = true; show(0, timeline.end); });
byId("devices").addEventListener("click", () => { zoomed = false; show(...devices()); });
byId("hosts").addEventListener("change", layOut);
byId("highlight").addEventListener("change", (event) => { state.highlight = event.target.checked; redraw(); });
new ResizeObserver(fitStage).observe(stage);

export { find, recolour, showTimeline };
