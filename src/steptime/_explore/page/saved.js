// Variants that were kept, side by side.

import { made } from "/page/controls.js";

const KEY = "steptime-saved";

const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumSignificantDigits: digits }));
export const time = (ms) => (ms < 100 ? ms.toFixed(3) : ms.toLocaleString("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 }));
const gib = (bytes) => (bytes ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : "–");

/** What of an answer a table shows. */
function figures(answer) {
  const { step_time_ms, interval_ms, samples_per_s, tokens_per_s, mfu, memory, bound_by, ranks, platform } = answer;
  return { step_time_ms, interval_ms, samples_per_s, tokens_per_s, mfu, peak: memory?.peak_bytes ?? null, fits: memory?.fits ?? null,
    bound: bound_by.split(":")[0], ranks: ranks.length, platform };
}

/** Values that differ from those to begin with, in words. */
export function words(values, controls) {
  const parts = Object.entries(values).map(([name, value]) => {
    const label = controls.all.get(name)?.given.label ?? name;
    return `${label.toLowerCase()} ${Array.isArray(value) ? value.join("; ") : value ?? "open"}`;
  });
  return parts.join(", ") || "as it was";
}

export class Saved {
  constructor(section, controls, show) {
    this.section = section;
    this.controls = controls;
    this.show = show;
    this.rows = [];
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
      if (Array.isArray(kept)) this.rows = kept.filter((row) => row && row.values && row.figures);
    } catch { /* nothing was kept */ }
    this.draw();
  }

  add(values, answer) {
    const text = words(values, this.controls);
    this.rows = this.rows.filter((row) => row.text !== text);
    this.rows.push({ values, text, figures: figures(answer) });
    this.keep();
  }

  keep() {
    try { sessionStorage.setItem(KEY, JSON.stringify(this.rows)); } catch { /* it stays as long as the page does */ }
    this.draw();
  }

  draw() {
    this.section.hidden = !this.rows.length;
    const heads = ["Variant", "step, ms", "90 % interval", "against the first", "samples/s", "tokens/s", "MFU", "memory", "bound by", ""];
    const head = made("tr", {}, ...heads.map((text, i) => made("th", { scope: "col", class: i && i < 8 ? "number" : "" }, text)));
    const body = this.rows.map((row, i) => this.row(row, i));
    this.section.querySelector("table").replaceChildren(made("thead", {}, head), made("tbody", {}, ...body));
  }

  row(row, i) {
    const { figures: f } = row, first = this.rows[0].figures;
    const ratio = f.step_time_ms / first.step_time_ms - 1;
    const cells = [time(f.step_time_ms), `${time(f.interval_ms[0])} – ${time(f.interval_ms[1])}`,
      i ? `${ratio > 0 ? "+" : "−"}${Math.abs(100 * ratio).toFixed(1)} %` : "", number(f.samples_per_s), number(f.tokens_per_s),
      f.mfu === null ? "–" : `${(100 * f.mfu).toFixed(1)} %`, f.fits === false ? `${gib(f.peak)}, does not fit` : gib(f.peak), f.bound];
    return made("tr", { class: f.fits === false ? "unfit" : "" },
      made("th", { scope: "row" }, made("button", { type: "button", class: "find", title: "Take these values", onclick: () => this.show(row.values) }, row.text)),
      ...cells.map((text, column) => made("td", { class: column < 7 ? "number" : "" }, text)),
      made("td", {}, made("button", { type: "button", class: "back", "aria-label": `Remove ${row.text}`, onclick: () => {
        this.rows.splice(i, 1);
        this.keep();
      } }, "×")));
  }
}
