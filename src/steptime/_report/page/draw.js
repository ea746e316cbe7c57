// Drawing: a scale, a row per lane, the critical path, what was chosen. Only what is visible is looked at.

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, "Liberation Sans", sans-serif';
const LETTER = 5.9; // px: a letter of that font, about; text is cut by it, because measuring every text takes too long
const DIM = 0.16;
const WIDE = 5; // px: what is on a lane for so long is joined to where the critical path goes on

class Drawing {
  constructor(canvas, state) {
    this.pen = canvas.getContext("2d");
    this.canvas = canvas;
    this.state = state;
    this.recolour();
  }

  recolour() { this.colours = readColours(this.pen, this.state.timeline.families); }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  draw() {
    const { pen, colours, state } = this, { view, layout } = state;
    pen.globalAlpha = 1;
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, this.width, this.height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const ticks = this.ticks();
    pen.fillStyle = colours.faint;
    for (const tick of ticks.times) pen.fillRect(Math.round(view.x(tick)), AXIS, 1, this.height);
    for (const row of layout.rows) {
      const y = row.y - view.scroll + AXIS;
      if (y + row.height < AXIS || y > this.height) continue;
      if (row.lane) this.lane(row.lane, y);
      else this.rank(row.rank, y);
    }
    if (state.highlight) this.path();
    if (state.chosen) this.launches(state.chosen);
    this.outline(state.hovered, colours.muted);
    this.outline(state.chosen, colours.ink);
    this.names();
    this.axis(ticks);
  }

  /** Round times at a readable distance. */
  ticks() {
    const { view } = this.state, rough = view.span / Math.max(view.width / 110, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= rough);
    const times = [];
    for (let tick = Math.ceil(view.begin / step) * step; tick <= view.end; tick += step) times.push(tick);
    return { step, times };
  }

  axis({ step, times }) {
    const { pen, colours, state: { view, stretch } } = this;
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, this.width, AXIS);
    if (stretch) {
      const [from, to] = [view.x(stretch[0]), view.x(stretch[1])];
      pen.fillStyle = colours.focus;
      pen.globalAlpha = 0.2;
      pen.fillRect(Math.min(from, to), 0, Math.abs(to - from), this.height);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = colours.faint;
    pen.fillRect(0, AXIS - 1, this.width, 1);
    // Which part of the whole is visible.
    pen.fillStyle = colours.muted;
    if (view.span < view.length) {
      pen.fillRect(GUTTER + view.begin / view.length * view.width, AXIS - 2, Math.max(view.span / view.length * view.width, 3), 2);
    }
    pen.textAlign = "left";
    for (const tick of times) {
      const x = Math.round(view.x(tick));
      if (x > this.width - 30) continue;
      pen.fillRect(x, AXIS - 7, 1, 5);
      pen.fillText(timeText(tick, step), x + 4, AXIS / 2);
    }
    pen.fillText("ms", 10, AXIS / 2);
  }

  /** Where the host enters and leaves each step of a rank. */
  rank(rank, y) {
    const { pen, colours, state: { view } } = this;
    pen.globalAlpha = 1;
    pen.fillStyle = colours.hover;
    pen.fillRect(0, y, this.width, RANK_ROW - 3);
    pen.textAlign = "left";
    for (const [number, begin, end] of rank.steps) {
      const from = Math.max(view.x(begin), GUTTER), to = Math.min(view.x(end), this.width);
      if (to <= from) continue;
      pen.fillStyle = colours.muted;
      if (view.x(begin) >= GUTTER) pen.fillRect(Math.round(from), y, 1, RANK_ROW - 3);
      if (to - from > 48) pen.fillText(`step ${number}`, from + 6, y + RANK_ROW / 2 - 1);
    }
  }

  /** One lane. Of bars that share a pixel the longest is drawn, as strong as they fill it. */
  lane(lane, y) {
    const { view, search } = this.state, pixel = view.span / view.width, matches = search.of(lane);
    const top = y + (LANE_ROW - BAR) / 2;
    let column = -1, best = -1, longest = -1, filled = 0;
    const flush = () => {
      if (best >= 0) this.sliver(lane, best, column, top, Math.min(0.35 + 0.65 * filled / pixel, 1));
      best = -1; longest = -1; filled = 0;
    };
    for (let i = firstAfter(lane.end, view.begin); i < lane.end.length && lane.begin[i] < view.end; i++) {
      const length = lane.end[i] - lane.begin[i];
      if (length >= pixel) {
        flush();
        column = -1;
        this.bar(lane, i, top);
        continue;
      }
      const here = Math.floor(view.x(lane.begin[i]));
      if (here !== column) { flush(); column = here; }
      filled += length;
      // What was searched for is never hidden behind something longer.
      const weight = matches && matches[lane.label[i]] ? length + pixel : length;
      if (weight > longest) { longest = weight; best = i; }
    }
    flush();
  }

  strength(lane, i) { return this.state.search.fits(lane, i) ? 1 : DIM; }

  fill(lane, i) { return lane.host ? this.colours.call : this.colours.fills[lane.rank.program.labels[lane.label[i]].family]; }

  sliver(lane, i, x, top, alpha) {
    if (x < GUTTER) return;
    this.pen.globalAlpha = alpha * this.strength(lane, i);
    this.pen.fillStyle = lane.host ? this.colours.fills.at(-1) : this.fill(lane, i);
    this.pen.fillRect(x, top, 1, BAR);
  }

  bar(lane, i, top) {
    const { pen, colours, state: { view } } = this;
    const left = Math.max(view.x(lane.begin[i]), GUTTER), middle = Math.min(Math.max(view.x(lane.middle[i]), left), this.width);
    const whole = Math.min(view.x(lane.end[i]), this.width), right = whole - left > 3 ? whole - 0.75 : whole;
    pen.globalAlpha = this.strength(lane, i);
    if (middle > left) {
      pen.fillStyle = lane.host ? colours.fills.at(-1) : colours.waiting;
      pen.fillRect(left, top, Math.min(middle, right) - left, BAR);
    }
    if (right > middle) {
      pen.fillStyle = this.fill(lane, i);
      pen.fillRect(middle, top, right - middle, BAR);
    }
    if (lane.blocked && lane.blocked[i] > 0) this.blocked(lane, i, top, middle, right);
    this.write(lane, i, top, left, middle, right);
  }

  blocked(lane, i, top, middle, right) {
    const { pen, colours, state: { view } } = this, from = Math.max(view.x(lane.end[i] - lane.blocked[i]), middle);
    if (right <= from) return;
    pen.fillStyle = colours.panel;
    pen.fillRect(from, top, right - from, BAR);
    pen.fillStyle = colours.blocked;
    pen.fillRect(from, top, right - from, BAR);
  }

  /** The name, in the widest part of a bar, where there is room for some letters. */
  write(lane, i, top, left, middle, right) {
    const { pen, colours } = this, { name, family } = lane.rank.program.labels[lane.label[i]];
    const early = middle - left > right - middle, from = early ? left : middle, room = (early ? middle : right) - from - 8;
    const letters = Math.floor(room / LETTER);
    if (letters < 3) return;
    pen.fillStyle = early ? colours.ink : lane.host ? colours.callLetters : colours.letters[family];
    pen.textAlign = "left";
    pen.fillText(name.length > letters ? `${name.slice(0, letters - 1)}…` : name, from + 4, top + BAR / 2 + 0.5, room + 4);
  }

  /** Titles of rows, over what reaches into their room. */
  names() {
    const { pen, colours, state: { view, layout } } = this;
    pen.globalAlpha = 1;
    pen.textAlign = "left";
    for (const row of layout.rows) {
      const y = row.y - view.scroll + AXIS;
      if (y + row.height < AXIS || y > this.height) continue;
      pen.fillStyle = row.lane ? colours.panel : colours.hover;
      pen.fillRect(0, y, GUTTER - 1, row.height - (row.lane ? 0 : 3));
      pen.fillStyle = row.lane ? colours.muted : colours.ink;
      pen.font = row.lane ? FONT : `600 ${FONT}`;
      const title = row.lane ? row.lane.title : rankText(row.rank);
      pen.fillText(title, row.lane ? 18 : 10, y + (row.lane ? LANE_ROW : RANK_ROW - 2) / 2, GUTTER - 22);
    }
    pen.font = FONT;
  }

  /** The critical path: a line under what is on it, as strong as it fills a pixel, joined where it stays on a lane for a while.
   *  A path that changes lanes within pixels would otherwise paint all of them. */
  path() {
    const { pen, colours, state: { view, layout, timeline, search } } = this, strength = search.active ? 0.35 : 1;
    const filled = new Map(), joins = [];
    let run = null, before = null; // stretches on one lane, the last one and the last that was wide
    const end = () => {
      if (run && run.to - run.from >= WIDE) {
        if (before && before.row !== run.row && run.from - before.to < WIDE) joins.push([before, run]);
        before = run;
      }
    };
    for (let i = firstAfter(timeline.pathEnds, view.begin); i < timeline.path.length; i++) {
      const segment = timeline.path[i], row = layout.of.get(segment.lane);
      if (segment.begin > view.end) break;
      if (!row) { end(); run = null; continue; }
      const from = Math.max(view.x(segment.begin), GUTTER), to = Math.max(Math.min(view.x(segment.end), this.width), from);
      this.underline(filled, row, from, to);
      if (run && run.row === row && from - run.to < 1) run.to = to;
      else { end(); run = { row, from, to }; }
    }
    end();
    pen.fillStyle = colours.path;
    for (const [row, columns] of filled) {
      const y = row.y - view.scroll + AXIS + LANE_ROW - 2.5;
      if (y < AXIS || y > this.height) continue;
      const level = (x) => (columns[x] > 0 ? Math.max(Math.round(Math.min(columns[x], 1) * 8) / 8, 0.3) : 0);
      for (let x = 0; x < columns.length;) {
        const alpha = level(x), begin = x;
        while (x < columns.length && level(x) === alpha) x++;
        if (!alpha) continue;
        pen.globalAlpha = strength * alpha;
        pen.fillRect(begin, y, x - begin, 3);
      }
    }
    pen.globalAlpha = 0.7 * strength;
    pen.strokeStyle = colours.path;
    pen.lineWidth = 1;
    pen.beginPath();
    for (const [one, other] of joins) {
      const x = Math.round(other.from) + 0.5, [top, bottom] = [one, other].map(({ row }) => row.y - view.scroll + AXIS + LANE_ROW - 1);
      pen.moveTo(x, top);
      pen.lineTo(x, bottom);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  /** Adds a stretch to what is filled of every pixel of a row. */
  underline(filled, row, from, to) {
    if (!filled.has(row)) filled.set(row, new Float32Array(Math.ceil(this.width) + 1));
    const columns = filled.get(row), first = Math.floor(from), last = Math.floor(to);
    if (first === last) { columns[first] += to - from; return; }
    columns[first] += first + 1 - from;
    columns.fill(1, first + 1, last);
    columns[last] += to - last;
  }

  /** From a launch to its work: from the chosen bar to what belongs to it. */
  launches({ lane, row }) {
    const { pen, colours, state: { view, layout } } = this;
    const pairs = lane.host ? launchedBy(lane, row).map((work) => [{ lane, row }, work]) : [[launchOf(lane, row), { lane, row }]];
    pen.strokeStyle = colours.focus;
    pen.lineWidth = 1.5;
    for (const [call, work] of pairs) {
      const from = call && layout.of.get(call.lane), to = layout.of.get(work.lane);
      if (!from || !to) continue;
      const [x0, x1] = [view.x(call.lane.middle[call.row]), view.x(work.lane.begin[work.row])];
      const [y0, y1] = [from.y + LANE_ROW - 3, to.y + 3].map((y) => y - view.scroll + AXIS);
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
      pen.stroke();
    }
  }

  outline(bar, colour) {
    const { pen, state: { view, layout } } = this, row = bar && layout.of.get(bar.lane);
    if (!row) return;
    const left = Math.max(view.x(bar.lane.begin[bar.row]), GUTTER), right = Math.min(view.x(bar.lane.end[bar.row]), this.width);
    if (right < left) return;
    pen.globalAlpha = 1;
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.strokeRect(left - 0.75, row.y - view.scroll + AXIS + (LANE_ROW - BAR) / 2 - 0.75, Math.max(right - left, 1) + 1.5, BAR + 1.5);
  }
}
