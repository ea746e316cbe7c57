// What is known of one bar. Everything is set as text: names come from traces.

/** Pairs of what and how much, the name apart. */
function describe({ lane, row }, timeline) {
  const label = lane.rank.program.labels[lane.label[row]];
  const begin = lane.begin[row], middle = lane.middle[row], end = lane.end[row], blocked = lane.blocked ? lane.blocked[row] : 0;
  const facts = [["Duration", durationText(end - begin)]];
  if (lane.host) {
    facts.push(["Call", `${label.full}, ${durationText(end - middle)}`], ["Host work before it", durationText(middle - begin)]);
    if (blocked > 0) facts.push(["Blocked", durationText(blocked)]);
  } else {
    if (middle > begin) facts.push(["Waits for the last rank", durationText(middle - begin)], ["Moves data", durationText(end - middle)]);
    if (label.op) facts.push(["Op", label.op]);
    facts.push(["Family", timeline.families[label.family].name]);
    if (label.more) facts.push(["Size", label.more]);
  }
  facts.push(["Begins at", `${timeText(begin)} ms`]);
  if (label.step >= 0) facts.push(["Step", String(label.step)]);
  facts.push(["Where", `${rankText(lane.rank)}, ${lane.title}`]);
  if (lane.onPath[row]) facts.push(["Critical path", "yes"]);
  return { name: label.name, full: label.full, facts };
}

/** The rank, or the ranks that do the same at the same times. */
function rankText(rank) { return `rank${/[-,]/.test(rank.title) ? "s" : ""} ${rank.title}`; }

function element(name, text, style) {
  const made = document.createElement(name);
  made.textContent = text;
  if (style) made.className = style;
  return made;
}

/** The box beside the pointer. */
function showTip(tip, bar, timeline, x, y) {
  tip.hidden = !bar;
  if (!bar) return;
  const { name, full, facts } = describe(bar, timeline);
  const known = new Map(facts), lines = [known.get("Duration")];
  if (known.has("Waits for the last rank")) lines[0] += `, ${known.get("Waits for the last rank")} of it waiting for the last rank`;
  if (known.has("Op")) lines.push(`${known.get("Op")} · ${known.get("Family")}`);
  else if (known.has("Call")) lines.push(known.get("Call"));
  else lines.push(known.get("Family"));
  lines.push([known.get("Where"), known.get("Size"), known.has("Critical path") ? "on the critical path" : ""].filter(Boolean).join(" · "));
  tip.replaceChildren(element("b", name), ...lines.map((line) => element("span", line)));
  if (!bar.lane.host && full !== name) tip.append(element("span", full.length > 160 ? `${full.slice(0, 160)}…` : full));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, innerWidth - width - 8), 8)}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
}

/** The list under the timeline. */
function showChosen(list, bar, timeline) {
  if (!bar) return list.replaceChildren();
  const { name, full, facts } = describe(bar, timeline);
  const pair = (term, value) => {
    const box = document.createElement("div");
    box.append(element("dt", term), element("dd", value));
    return box;
  };
  const whole = pair(bar.lane.host ? "Host" : "Device", bar.lane.host || full === name ? name : full);
  whole.className = "name";
  return list.replaceChildren(whole, ...facts.map(([term, value]) => pair(term, value)));
}
