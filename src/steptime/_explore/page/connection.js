// Asking the server: the newest question counts, and a server that has gone is looked for until it is back.

const PATIENCE = 300; // ms that an answer may take before a newer question cuts in
const LOOK = 1000; // ms between looking for a server that has gone
const IDLE = 5000; // ms between looking whether it is still there

/** A name for this tab, so that tabs do not supersede each other. */
const page = [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

async function post(body, signal, path = "/api/ask") {
  return fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ page, ...body }), signal });
}

export class Connection {
  /** `on` has answer, wrong, busy, gone and back, each told what happened. */
  constructor(on) {
    this.on = on;
    this.flight = null;
    this.next = null;
    this.lost = false;
    setInterval(() => { if (!this.flight && !this.lost && !document.hidden) this.look(); }, IDLE);
  }

  /** Asks about values; of questions in a row some are skipped, never the last. */
  ask(values, about) {
    this.next = { values, about, at: performance.now() };
    this.on.busy();
    if (this.lost) return;
    if (!this.flight) this.send();
    else if (performance.now() - this.flight.begun > PATIENCE) this.flight.abort.abort();
    else this.flight.timer ??= setTimeout(() => this.flight?.abort.abort(), PATIENCE);
  }

  async send() {
    const question = this.next, abort = new AbortController();
    const flight = { abort, begun: performance.now(), timer: null };
    this.next = null;
    this.flight = flight;
    try {
      const response = await post({ values: question.values }, abort.signal);
      if (response.status === 401) return void this.unknown();
      const text = await response.json();
      if (response.ok) this.on.answer(text, question, this.next !== null);
      else if (!text.superseded && !this.next) this.on.wrong(text, question);
    } catch (error) {
      if (error.name !== "AbortError") {
        this.next ??= question;
        this.leave();
      }
    } finally {
      clearTimeout(flight.timer);
      this.flight = null;
      if (this.next && !this.lost) this.send();
    }
  }

  /** What is said beside the answer: of several variants, of changes that would help. */
  async said(form, values, variants = []) {
    try {
      return await (await post({ values, variants, form })).json();
    } catch {
      this.leave();
      return { error: "the server has gone" };
    }
  }

  /** A file of a variant, or of several. */
  async file(values, form, variants = []) {
    try {
      const response = await post({ values, form, variants });
      return response.ok ? { blob: await response.blob() } : await response.json();
    } catch {
      this.leave();
      return { error: "the server has gone" };
    }
  }

  /** Says what may be asked next: the neighbours of a slider's place. */
  expect(values, control) {
    const near = control?.neighbours() ?? [];
    if (this.lost || !near.length) return;
    const differing = Object.fromEntries(Object.entries(values).filter(([name]) => name !== control.given.name));
    post({ values: differing, about: control.given.name, near }, undefined, "/api/near").catch(() => {});
  }

  async look() {
    try {
      const response = await fetch("/api/alive");
      if (response.status === 401) return void this.unknown();
      if (!response.ok || !this.lost) return;
      this.lost = false;
      this.on.back();
      if (this.next) this.send();
    } catch {
      this.leave();
    }
  }

  leave() {
    if (!this.lost) this.on.gone("The server has ended. This page goes on when it is back.");
    this.lost = true;
    setTimeout(() => this.look(), LOOK);
  }

  /** A server that does not know the token: another one. */
  unknown() {
    this.lost = true;
    this.on.gone("Another server runs here now. Open the address that it printed: this page does not have its token.");
    setTimeout(() => this.look(), 3 * LOOK);
  }
}
