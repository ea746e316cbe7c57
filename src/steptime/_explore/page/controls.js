// Controls, made from what the server says of them: one truth for what there is, which values it may have and what it is called.

/** An element with attributes and children; a text is set as text. */
export function made(name, attributes = {}, ...children) {
  const result = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") result.className = value;
    else if (key.startsWith("on")) result.addEventListener(key.slice(2), value);
    else if (value === true) result.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined && value !== "") result.setAttribute(key, value);
  }
  result.append(...children.filter((child) => child !== null));
  return result;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** One control: its elements, its value, and what is wrong with it. */
class Control {
  constructor(given, changed, near, suggest) {
    this.given = given;
    this.near = near;
    this.suggest = suggest;
    this.value = given.value;
    this.id = `control-${given.name.replace(/[^a-z_]/g, "-")}`;
    this.wrong = made("p", { class: "wrong", id: `${this.id}-wrong`, hidden: true });
    this.derived = made("span", { class: "derived" });
    this.back = made("button", { type: "button", class: "back", title: "As it was", "aria-label": `${given.label}: as it was`, hidden: true,
      onclick: () => { this.set(given.value); changed(this); this.first.focus(); } }, "↺");
    this.changed = (value) => {
      this.value = value;
      this.refresh();
      changed(this);
    };
    const parts = this[given.kind]();
    this.first = parts[0];
    const label = made("label", { for: this.id }, given.label);
    const unit = given.unit && given.kind !== "changes" ? made("span", { class: "unit" }, given.unit) : null;
    const head = made("div", { class: "head" }, label, this.derived, this.back);
    const reason = given.disabled ? made("p", { class: "reason", id: `${this.id}-reason` }, given.disabled) : null;
    const row = made("div", { class: `field ${given.kind}` }, ...parts, ...(unit && !parts.some((one) => one.contains(unit)) ? [unit] : []));
    const help = given.help ? made("p", { class: "spoken", id: `${this.id}-help` }, given.help) : null;
    this.element = made("div", { class: "control", title: given.help, "data-name": given.name }, head, row, this.wrong, reason, help);
    for (const part of this.inputs()) {
      part.setAttribute("aria-describedby", [this.wrong.id, reason?.id, help?.id].filter(Boolean).join(" "));
      if (given.disabled) part.disabled = true;
    }
    this.refresh();
  }

  inputs() { return [...this.element.querySelectorAll("input, select, .add")]; }

  get differs() { return !same(this.value, this.given.value); }

  set(value) {
    this.value = value;
    this.say("");
    this.refresh();
  }

  refresh() {
    this.update?.();
    this.back.hidden = !this.differs;
    this.element?.classList.toggle("changed", this.differs);
  }

  /** What is wrong with the value, beside it; nothing where nothing is. */
  say(text) {
    this.wrong.textContent = text;
    this.wrong.hidden = !text;
    for (const part of this.element ? this.inputs() : []) part.setAttribute("aria-invalid", String(Boolean(text)));
  }

  /** What the server made of a value that was left open. */
  came(value) {
    const shown = value !== undefined && !same(value, this.value);
    this.derived.textContent = shown ? `now ${value}` : "";
  }

  whole() { return this.number(); }

  number() {
    const { given } = this, { steps, optional } = given;
    const places = optional ? [null, ...steps] : steps;
    this.places = places;
    const box = made("input", { id: this.id, type: "number", min: given.least, max: given.most, step: given.kind === "whole" ? 1 : "any",
      inputmode: given.kind === "whole" ? "numeric" : "decimal", placeholder: given.empty || null,
      onchange: () => this.changed(this.read(box)), oninput: () => { if (box.validity.valid && box.value) this.changed(this.read(box)); } });
    const slider = made("input", { type: "range", min: 0, max: Math.max(places.length - 1, 0), step: 1, "aria-label": `${given.label}, slider`,
      oninput: () => this.changed(places[Number(slider.value)]), onfocus: () => this.near(this), onpointerenter: () => this.near(this) });
    this.update = () => {
      if (document.activeElement !== box || this.read(box) !== this.value) box.value = this.value ?? "";
      slider.value = String(nearest(places, this.value));
      slider.setAttribute("aria-valuetext", this.value === null ? given.empty || "none" : `${this.value} ${given.unit}`.trim());
    };
    return places.length > 1 ? [box, slider] : [box];
  }

  /** Values at the places beside the slider's, the nearest first; one that is as it was to begin with is left out. */
  neighbours() {
    if (!this.places) return [];
    const at = nearest(this.places, this.value);
    return [at + 1, at - 1, at + 2, at - 2].filter((i) => i >= 0 && i < this.places.length).map((i) => this.places[i])
      .filter((value) => !same(value, this.given.value));
  }

  read(box) {
    if (box.validity.badInput) return "no number";
    return box.value === "" ? null : Number(box.value);
  }

  choice() {
    const { given } = this;
    const options = given.choices.map(([value, text]) => made("option", { value }, text));
    if (given.optional) options.unshift(made("option", { value: "" }, given.empty || "—"));
    const select = made("select", { id: this.id, onchange: () => this.changed(select.value === "" && given.optional ? null : select.value) }, ...options);
    for (const option of options) if (!option.getAttribute("value")) option.setAttribute("value", "");
    this.update = () => { select.value = this.value ?? ""; };
    return [select];
  }

  switch() {
    const box = made("input", { id: this.id, type: "checkbox", onchange: () => this.changed(box.checked) });
    this.update = () => { box.checked = this.value; };
    return [box];
  }

  changes() {
    const { given } = this;
    const known = made("datalist", { id: `${this.id}-known` }, ...given.choices.map(([value]) => made("option", { value })));
    const box = made("input", { id: this.id, type: "text", list: known.id, placeholder: "matmul * 0.5", spellcheck: "false",
      onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); add(); } } });
    const list = made("ul", { class: "chips" });
    const add = () => {
      const text = box.value.trim();
      if (!text) return;
      box.value = "";
      this.changed([...this.value, text]);
    };
    const button = made("button", { type: "button", class: "add", onclick: add }, "Add");
    const found = made("ul", { class: "suggestions", "aria-live": "polite" });
    const suggest = made("button", { type: "button", class: "suggest", onclick: async () => {
      suggest.disabled = true;
      found.replaceChildren(made("li", {}, "trying changes …"));
      const { changes, error } = await this.suggest();
      suggest.disabled = false;
      if (error || !changes.length) return void found.replaceChildren(made("li", {}, error ?? "no change would help"));
      found.replaceChildren(...changes.map(({ change, saves_ms, speedup, meaning }) => made("li", {}, made("button", { type: "button", class: "find",
        title: meaning, onclick: () => this.changed([...this.value.filter((text) => text !== change), change]) }, change),
      made("span", {}, `step ${saves_ms > 0 ? "−" : "+"}${Math.abs(saves_ms).toPrecision(3)} ms, samples/s ${speedup < 1 ? "" : "+"}${(100 * (speedup - 1)).toFixed(0)} %`))));
    } }, "Which would help?");
    this.update = () => {
      list.replaceChildren(...this.value.map((text, i) => made("li", {}, text, made("button", { type: "button", "aria-label": `Remove ${text}`,
        onclick: () => { this.changed(this.value.filter((_, j) => j !== i)); box.focus(); } }, "×"))));
    };
    return [box, button, known, list, suggest, found];
  }
}

/** The place of the value that is nearest, by ratio. */
function nearest(places, value) {
  if (value === null) return Math.max(places.indexOf(null), 0);
  let best = 0, least = Infinity;
  places.forEach((place, i) => {
    const away = place === null ? Infinity : Math.abs(Math.log((place || 0.5) / (value || 0.5)));
    if (away < least) { least = away; best = i; }
  });
  return best;
}

/** All controls in their groups; `changed` is told which one a person moved, `near` which slider they may move next;
 *  `suggest` is asked which changes would help. */
export class Controls {
  constructor(form, given, changed, near, suggest) {
    this.all = new Map(given.map((one) => [one.name, new Control(one, changed, near, suggest)]));
    const groups = Map.groupBy ? Map.groupBy(this.all.values(), (one) => one.given.group) : grouped(this.all.values());
    form.replaceChildren(...[...groups].map(([name, members], i) => {
      const often = members.filter((one) => !one.given.more), more = members.filter((one) => one.given.more);
      const rest = more.length ? made("details", { class: "more" }, made("summary", {}, often.length ? `More (${more.length})` : `${more.length} keys`),
        ...more.map((one) => one.element)) : null;
      const body = made("fieldset", {}, made("legend", {}, name), ...often.map((one) => one.element), rest);
      body.dataset.order = i;
      return body;
    }));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** The values that differ from those to begin with. */
  get values() { return Object.fromEntries([...this.all].filter(([, one]) => one.differs).map(([name, one]) => [name, one.value])); }

  /** Takes these values, and of all other controls those to begin with. */
  take(values) {
    for (const [name, one] of this.all) one.set(Object.hasOwn(values, name) ? values[name] : one.given.value);
  }

  came(derived) { for (const [name, one] of this.all) one.came(derived[name]); }

  silence() { for (const one of this.all.values()) one.say(""); }
}

function grouped(controls) {
  const result = new Map();
  for (const one of controls) result.set(one.given.group, [...(result.get(one.given.group) ?? []), one]);
  return result;
}
