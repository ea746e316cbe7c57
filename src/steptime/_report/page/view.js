// What part of the time is visible, and which lane is where.

const GUTTER = 118; // room for the names of lanes
const AXIS = 26;
const RANK_ROW = 22;
const LANE_ROW = 21;
const BAR = 16;
const NARROWEST = 200; // ns: less than any bar is long

class View {
  constructor(length) {
    this.length = length;
    this.begin = 0;
    this.end = length;
    this.width = 1; // of the drawing, less the gutter
    this.scroll = 0;
  }

  get span() { return this.end - this.begin; }

  x(time) { return GUTTER + (time - this.begin) / this.span * this.width; }

  time(x) { return this.begin + (x - GUTTER) / this.width * this.span; }

  /** Shows a stretch, as much of it as there is. */
  show(begin, end) {
    const span = Math.min(Math.max(end - begin, NARROWEST), this.length);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - span / 2, 0), this.length - span);
    this.end = this.begin + span;
  }

  /** Makes everything so many times as wide around a time, which stays where it is. */
  zoom(factor, at = (this.begin + this.end) / 2) {
    const span = Math.min(Math.max(this.span / factor, NARROWEST), this.length);
    const begin = at - (at - this.begin) * span / this.span;
    this.show(begin, begin + span);
  }

  /** Moves by a share of what is visible. */
  move(share) { this.show(this.begin + share * this.span, this.end + share * this.span); }
}

/** The rows from top to bottom: a head per rank, then its lanes. */
function layRows(ranks, hosts) {
  const rows = [];
  let y = 0;
  for (const rank of ranks) {
    rows.push({ rank, lane: null, y, height: RANK_ROW });
    y += RANK_ROW;
    for (const lane of rank.lanes) {
      if (lane.host && !hosts) continue;
      rows.push({ rank, lane, y, height: LANE_ROW });
      y += LANE_ROW;
    }
  }
  return { rows, height: y + 6, of: new Map(rows.filter((row) => row.lane).map((row) => [row.lane, row])) };
}

/** The row of a lane at a place of the drawing, with some tolerance because bars can be narrower than a pointer. */
function barAt(view, layout, x, y) {
  if (y < AXIS || x < GUTTER) return null;
  const inside = y - AXIS + view.scroll;
  const row = layout.rows.find((one) => inside >= one.y && inside < one.y + one.height);
  if (!row || !row.lane) return null;
  const { lane } = row, time = view.time(x), slack = 2 * view.span / view.width;
  const after = firstAfter(lane.end, time);
  let best = null, nearest = slack;
  for (const i of [after - 1, after]) {
    if (i < 0 || i >= lane.end.length) continue;
    const away = Math.max(lane.begin[i] - time, time - lane.end[i], 0);
    if (away <= nearest) { nearest = away; best = i; }
  }
  return best === null ? null : { lane, row: best };
}

/** A time on the scale. */
function timeText(ns, step = 1e3) {
  const digits = Math.min(Math.max(Math.ceil(6 - Math.log10(step) - 1e-9), 0), 6);
  return (ns / 1e6).toFixed(digits);
}

/** How long something takes, in the unit that fits. */
function durationText(ns) {
  if (ns < 1e3) return `${ns} ns`;
  return ns < 1e6 ? `${(ns / 1e3).toFixed(2)} µs` : `${(ns / 1e6).toFixed(3)} ms`;
}
