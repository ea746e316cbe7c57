// Reading what the page carries. Times are nanoseconds; a double holds them exactly for 104 days.

/** A column of integers: LEB128 with the sign in the lowest bit, as base64 (see _report/html/timeline.py). */
function column(text) {
  const bytes = atob(text);
  let count = 0;
  for (let i = 0; i < bytes.length; i++) count += bytes.charCodeAt(i) < 128;
  const values = new Float64Array(count);
  let at = 0, value = 0, weight = 1;
  for (let i = 0; i < bytes.length; i++) {
    const byte = bytes.charCodeAt(i);
    // Products and not shifts, which end at 32 bits.
    value += (byte & 127) * weight;
    weight *= 128;
    if (byte < 128) {
      values[at++] = value % 2 ? -(value + 1) / 2 : value / 2;
      value = 0;
      weight = 1;
    }
  }
  return values;
}

function runningSum(values) {
  for (let i = 1; i < values.length; i++) values[i] += values[i - 1];
  return values;
}

/** One lane of one rank: begin, middle and end of every row. Of a work the middle is where a collective's data begin to move;
 *  of a call it is where the call itself begins, after the host's work before it. */
function readLane(times, shared, rank, host) {
  const begin = column(times.lead), middle = column(times.first), end = column(times.rest);
  let before = 0;
  for (let i = 0; i < begin.length; i++) {
    begin[i] += before;
    middle[i] += begin[i];
    end[i] += middle[i];
    before = end[i];
  }
  const blocked = times.blocked ? column(times.blocked) : null;
  return { ...shared, rank, host, begin, middle, end, blocked, onPath: new Uint8Array(begin.length) };
}

function readTimeline(given) {
  const text = (number) => given.strings[number];
  const programs = given.programs.map((program) => ({
    device: text(program.device),
    hosts: program.hosts,
    labels: program.labels.map(([name, full, op, family, step, more]) => (
      { name: text(name), full: text(full), op: text(op), family, step, more: text(more) })),
    lanes: program.lanes.map((lane) => ({
      title: text(lane.title),
      label: Int32Array.from(column(lane.labels)),
      calls: lane.calls ? Int32Array.from(runningSum(column(lane.calls))) : null,
    })),
  }));
  const ranks = given.ranks.map((one) => {
    const program = programs[one.program];
    const rank = { number: one.rank, title: one.title, device: program.device, steps: one.steps, program };
    rank.lanes = one.lanes.map((times, i) => readLane(times, program.lanes[i], rank, i < program.hosts));
    return rank;
  });
  const path = readPath(given.path, ranks);
  // Every segment ends where the next begins or later, so that what is visible is found by halving.
  const pathEnds = Float64Array.from(path, (segment) => segment.end);
  return { ranks, programs, path, pathEnds, families: given.families, end: given.end };
}

/** The segments of the critical path, and on every lane which rows lie on it. */
function readPath(given, ranks) {
  const places = column(given.ranks), lanes = column(given.lanes), why = column(given.why);
  const starts = runningSum(column(given.starts)), lengths = column(given.lengths);
  return Array.from(starts, (begin, i) => {
    const lane = ranks[places[i]].lanes[lanes[i]], end = begin + lengths[i];
    for (let row = firstAfter(lane.end, begin); row < lane.end.length && lane.begin[row] < end; row++) lane.onPath[row] = 1;
    return { lane, begin, end, reason: given.reasons[why[i]] };
  });
}

/** The first place in an ascending column whose value is greater. */
function firstAfter(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const half = (low + high) >> 1;
    if (values[half] > limit) high = half;
    else low = half + 1;
  }
  return low;
}

/** What launched a work: the lane and row of the call, or null. */
function launchOf(lane, row) {
  let place = lane.calls ? lane.calls[row] : -1;
  if (place < 0) return null;
  for (const one of lane.rank.lanes) {
    if (!one.host) break;
    if (place < one.begin.length) return { lane: one, row: place };
    place -= one.begin.length;
  }
  return null;
}

/** What a call launched. */
function launchedBy(lane, row) {
  const found = [];
  let place = row;
  for (const one of lane.rank.lanes) {
    if (one === lane) break;
    place += one.begin.length;
  }
  for (const one of lane.rank.lanes) {
    if (one.calls) one.calls.forEach((call, i) => { if (call === place) found.push({ lane: one, row: i }); });
  }
  return found;
}
