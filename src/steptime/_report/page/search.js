// Finding: by a part of a name, by family. What does not match is drawn faintly.

class Search {
  constructor(timeline) {
    this.timeline = timeline;
    this.families = new Set();
    this.query = "";
    this.matches = null; // by program: whether each of its labels matches; null: everything does
    this.order = null;
    this.current = -1;
  }

  get active() { return this.matches !== null; }

  set(query, families = this.families) {
    this.query = query;
    this.families = families;
    this.order = null;
    this.current = -1;
    const wanted = query.trim().toLowerCase();
    this.matches = !wanted && !families.size ? null : new Map(this.timeline.programs.map((program) => [
      program, Uint8Array.from(program.labels, (label) => Search.fits(label, wanted, families))]));
  }

  static fits(label, wanted, families) {
    if (families.size && !families.has(label.family)) return false;
    return !wanted || [label.name, label.op, label.full].some((text) => text.toLowerCase().includes(wanted));
  }

  /** Whether each label of a lane's program matches; null: all do. */
  of(lane) { return this.matches && this.matches.get(lane.rank.program); }

  fits(lane, row) { return this.matches === null || this.of(lane)[lane.label[row]] === 1; }

  /** All matches, by time. */
  found() {
    if (this.order) return this.order;
    this.order = [];
    if (!this.active) return this.order;
    for (const rank of this.timeline.ranks) {
      for (const lane of rank.lanes) {
        for (let row = 0; row < lane.begin.length; row++) if (this.fits(lane, row)) this.order.push({ lane, row });
      }
    }
    this.order.sort((a, b) => a.lane.begin[a.row] - b.lane.begin[b.row]);
    return this.order;
  }

  /** The match so many further on, around the end. */
  go(by) {
    const { length } = this.found();
    if (!length) return null;
    this.current = this.current < 0 && by < 0 ? length - 1 : (this.current + by + length) % length;
    return this.order[this.current];
  }

  /** How many there are and how long they take, host and device apart. */
  said() {
    if (!this.active) return "";
    const found = this.found();
    if (!found.length) return "no match";
    const works = found.filter(({ lane }) => !lane.host);
    const busy = works.reduce((sum, { lane, row }) => sum + lane.end[row] - lane.begin[row], 0);
    const place = this.current < 0 ? "" : `${(this.current + 1).toLocaleString("en")} of `;
    return `${place}${found.length.toLocaleString("en")} found` + (works.length ? `, ${durationText(busy)} on devices` : "");
  }
}

/** The families that are there, by the time devices spend in them; what hosts do comes last. */
function familiesByTime(timeline) {
  const spent = new Map();
  for (const rank of timeline.ranks) {
    for (const lane of rank.lanes) {
      for (let row = 0; row < lane.begin.length; row++) {
        const { family } = rank.program.labels[lane.label[row]];
        spent.set(family, (spent.get(family) ?? 0) + (lane.host ? 0 : lane.end[row] - lane.begin[row]));
      }
    }
  }
  return [...spent.keys()].sort((a, b) => spent.get(b) - spent.get(a) || a - b);
}
