// Asking the server: the newest question counts, and a server that has gone is looked for until it is back.

const PATIENCE = 300; // ms that an answer may take before a newer question cuts in
const LOOK = 1000; // ms between looking for a server that has gone
const AGAIN = 500; // ms between tries while too many questions wait
const IDLE = 5000; // ms between looking whether it is still there

/** A name for this tab, so that tabs do not supersede each other. */
const page = [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const KEPT = "steptime-token"; // of this tab, so that it outlives a reload; unlike a cookie it goes to no other port

/** The token for the one, or the ticket, in the address that opened this tab. */
async function ownToken() {
  const given = new URLSearchParams(location.search).get("token");
  if (given) {
    const response = await fetch("/api/token", { headers: { "x-steptime-token": given } });
    if (response.ok) sessionStorage.setItem(KEPT, (await response.json()).token);
  }
  return sessionStorage.getItem(KEPT) ?? "";
}

const headers = { "content-type": "application/json", "x-steptime-token": await ownToken() };

/** A request with the token. */
export async function request(path, more = {}) {
  return fetch(path, { ...more, headers });
}

/** A question, put again while too many others wait. */
async function post(body, signal, path = "/api/ask") {
  for (;;) {
    const response = await request(path, { method: "POST", body: JSON.stringify({ page, ...body }), signal });
    if (response.status !== 429) return response;
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
    signal?.throwIfAborted();
  }
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
      const response = await request("/api/alive");
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
