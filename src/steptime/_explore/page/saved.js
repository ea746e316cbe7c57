// Variants that were kept, and how they compare: what `steptime compare` says of them, by the same code.

import { made } from "/page/controls.js";

const KEY = "steptime-saved";
const MOST = 12;

export const time = (ms) => (ms < 100 ? ms.toFixed(3) : ms.toLocaleString("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 }));

/** Values that differ from those to begin with, in words. */
export function words(values, controls) {
  const parts = Object.entries(values).map(([name, value]) => {
    const label = controls.all.get(name)?.given.label ?? name;
    return `${label.toLowerCase()} ${Array.isArray(value) ? value.join("; ") : value ?? "open"}`;
  });
  return parts.join(", ") || "as it was";
}

export class Saved {
  /** `show` takes the values of a variant, `compare` asks about several. */
  constructor(section, controls, show, compare) {
    Object.assign(this, { section, controls, show, compare, rows: [], asked: 0 });
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
      if (Array.isArray(kept)) this.rows = kept.filter((row) => row && typeof row.values === "object" && row.step > 0).slice(0, MOST);
    } catch { /* nothing was kept */ }
    this.draw();
  }

  get variants() { return this.rows.map((row) => row.values); }

  add(values, answer) {
    const text = words(values, this.controls);
    this.rows = [...this.rows.filter((row) => row.text !== text), { values, text, step: answer.step_time_ms, fits: answer.memory?.fits ?? null }].slice(-MOST);
    this.keep();
  }

  remove(row) {
    this.rows = this.rows.filter((one) => one !== row);
    this.keep();
    (this.section.querySelector(".variants button") ?? document.getElementById("save")).focus();
  }

  keep() {
    try { sessionStorage.setItem(KEY, JSON.stringify(this.rows)); } catch { /* it stays as long as the page does */ }
    this.draw();
  }

  async draw() {
    this.section.hidden = !this.rows.length;
    this.section.querySelector(".variants").replaceChildren(...this.rows.map((row) => made("li", { class: row.fits === false ? "unfit" : "" },
      made("button", { type: "button", class: "find", title: "Take these values", onclick: () => this.show(row.values) }, row.text),
      made("span", {}, `${time(row.step)} ms${row.fits === false ? ", does not fit" : ""}`),
      made("button", { type: "button", class: "back", "aria-label": `Remove ${row.text}`, onclick: () => this.remove(row) }, "×"))));
    const compared = this.section.querySelector(".compared"), number = ++this.asked;
    document.getElementById("comparison").hidden = this.rows.length < 2;
    if (this.rows.length < 2) return void compared.replaceChildren();
    const { sections, error } = await this.compare(this.variants);
    if (number !== this.asked) return;
    if (error) compared.replaceChildren(made("p", { class: "note" }, error));
    else compared.innerHTML = sections; // escaped where it was made
  }
}
