// The pointer: what it is over, dragging, the wheel.

let held = null;
const place = (event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

stage.addEventListener("pointerdown", (event) => {
  const [x, y] = place(event);
  if (event.button !== 0 || x > drawing.width) return;
  held = { x, y, begin: view.begin, end: view.end, scroll: stage.scrollTop, moved: false, scale: y < AXIS && x > GUTTER };
  stage.setPointerCapture(event.pointerId);
});

stage.addEventListener("pointermove", (event) => {
  const [x, y] = place(event);
  if (!held) {
    state.hovered = barAt(view, state.layout, x, y);
    showTip(tip, state.hovered, timeline, event.clientX, event.clientY);
    return void redraw();
  }
  if (!held.moved && Math.hypot(x - held.x, y - held.y) < 4) return;
  held.moved = true;
  tip.hidden = true;
  stage.classList.add("moving");
  if (held.scale) state.stretch = [view.time(held.x), view.time(Math.max(x, GUTTER))];
  else {
    const by = (held.x - x) / view.width * (held.end - held.begin);
    view.show(held.begin + by, held.end + by);
    stage.scrollTop = held.scroll + held.y - y;
  }
  redraw();
});

function release(event) {
  if (!held) return;
  const [x, y] = place(event);
  if (state.stretch) view.show(Math.min(...state.stretch), Math.max(...state.stretch));
  else if (!held.moved && event.type === "pointerup") choose(barAt(view, state.layout, x, y));
  held = null;
  state.stretch = null;
  stage.classList.remove("moving");
  redraw();
}
stage.addEventListener("pointerup", release);
stage.addEventListener("pointercancel", release);
stage.addEventListener("pointerleave", () => {
  state.hovered = null;
  tip.hidden = true;
  redraw();
});
stage.addEventListener("dblclick", (event) => {
  const bar = barAt(view, state.layout, ...place(event));
  if (!bar) return;
  const begin = bar.lane.begin[bar.row], end = bar.lane.end[bar.row], margin = (end - begin) / 8;
  view.show(begin - margin, end + margin);
  redraw();
});
stage.addEventListener("wheel", (event) => {
  const zooms = event.ctrlKey || event.metaKey, across = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
  if (!zooms && Math.abs(across) <= Math.abs(event.shiftKey ? 0 : event.deltaY)) return; // up and down is the page's own
  event.preventDefault();
  if (zooms) view.zoom(Math.exp(-event.deltaY / 300), view.time(Math.max(place(event)[0], GUTTER)));
  else view.move(across / view.width);
  redraw();
}, { passive: false });
