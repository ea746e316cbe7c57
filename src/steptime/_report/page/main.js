// The page: its state, drawing it, choosing bars, finding them.

const byId = (id) => document.getElementById(id);
const [stage, canvas, spacer, tip] = ["stage", "canvas", "spacer", "tip"].map(byId);
const timeline = readTimeline(JSON.parse(byId("data").textContent));
const search = new Search(timeline);
const state = {
  timeline,
  search,
  view: new View(timeline.end),
  layout: layRows(timeline.ranks, true),
  highlight: true,
  hovered: null,
  chosen: null,
  stretch: null, // begin and end while a person drags along the scale
};
const { view } = state;
const drawing = new Drawing(canvas, state);

// --- Drawing once per frame, however much has changed ---

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
  const height = Math.min(state.layout.height + AXIS, Math.max(384, Math.round(innerHeight * 0.68)));
  drawing.resize(stage.clientWidth, height);
  spacer.style.height = `${Math.max(state.layout.height + AXIS - height, 0)}px`;
  view.width = Math.max(stage.clientWidth - GUTTER, 1);
  view.scroll = stage.scrollTop;
  redraw();
}

new ResizeObserver(fitStage).observe(stage);
addEventListener("resize", fitStage);
stage.addEventListener("scroll", () => { view.scroll = stage.scrollTop; redraw(); });

// --- Choosing bars ---

function choose(bar) {
  state.chosen = bar;
  showChosen(byId("chosen"), bar, timeline);
  redraw();
}

/** Brings a bar into sight, without zooming in more than it takes to see it. */
function reveal(bar) {
  const begin = bar.lane.begin[bar.row], end = bar.lane.end[bar.row], middle = (begin + end) / 2;
  if (bar.lane.host && !byId("hosts").checked) byId("hosts").click();
  if ((end - begin) / view.span * view.width < 3) view.show(middle - (end - begin) * 60, middle + (end - begin) * 60);
  else if (begin < view.begin || end > view.end) view.show(middle - view.span / 2, middle + view.span / 2);
  const row = state.layout.of.get(bar.lane);
  if (row.y < stage.scrollTop || row.y + LANE_ROW > stage.scrollTop + drawing.height - AXIS) {
    stage.scrollTop = row.y - drawing.height / 2;
  }
  choose(bar);
}

/** The bar so many further on in the lane of the chosen one; the first that is visible if there is none. */
function step(by) {
  if (state.chosen) {
    const { lane, row } = state.chosen;
    if (row + by >= 0 && row + by < lane.begin.length) reveal({ lane, row: row + by });
    return;
  }
  for (const { lane } of state.layout.rows) {
    const row = lane ? firstAfter(lane.end, view.begin) : 0;
    if (lane && row < lane.begin.length) return void reveal({ lane, row });
  }
}

// --- Searching ---

const query = byId("query");

function find(text, families) {
  query.value = text;
  search.set(text, families);
  byId("found").textContent = search.said();
  redraw();
}

function go(by) {
  const bar = search.go(by);
  if (bar) reveal(bar);
  byId("found").textContent = search.said();
}

query.addEventListener("input", () => find(query.value));
query.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); go(event.shiftKey ? -1 : 1); }
  if (event.key === "Escape") { find(""); stage.focus(); }
});
byId("next").addEventListener("click", () => go(1));
byId("previous").addEventListener("click", () => go(-1));
for (const button of document.querySelectorAll("[data-find]")) {
  button.addEventListener("click", () => {
    find(button.dataset.find);
    byId("timeline").scrollIntoView();
  });
}

/** A button per family, those with the most device time first, host work last. */
function addLegend() {
  const swatch = document.querySelector(".swatch");
  for (const family of familiesByTime(timeline)) {
    const { key, name } = timeline.families[family];
    const button = element("button", name), square = swatch.cloneNode(true);
    square.firstElementChild.setAttribute("class", key);
    button.type = "button";
    button.prepend(square);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const families = new Set(search.families);
      if (!families.delete(family)) families.add(family);
      button.setAttribute("aria-pressed", String(families.has(family)));
      find(query.value, families);
    });
    byId("legend").append(button);
  }
}
addLegend();
