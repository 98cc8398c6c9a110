// Story: a panel with the log of the run, an island or a fragment as sentences, newest last.

import { card, fillCard } from "./now.js";
import { attr, h, keyed, put, show } from "./dom.js";
import { runTime, wallTime } from "./format.js";

const REFRESH_MS = 3000;
const PAGE = 200;

export class Story {
  constructor(host, { net, onTravel }) {
    Object.assign(this, { host, net, onTravel, about: null, limit: PAGE, lines: [] });
    this.title = h("h2", { id: "story-title", tabindex: "-1" });
    this.when = h("p", { class: "soft" });
    this.filter = h("input", {
      type: "search",
      placeholder: "Filter",
      "aria-label": "Filter the story",
      on: { input: () => this.fill() },
    });
    this.older = h(
      "button",
      { type: "button", class: "quiet small", hidden: true, on: { click: () => this.more() } },
      "Older",
    );
    this.list = h("ol", { class: "lines", tabindex: "0", "aria-label": "Story lines" });
    this.note = h("p", { class: "soft empty", hidden: true });
    this.slot = h("ul", { class: "cards" });
    const close = h(
      "button",
      { type: "button", class: "quiet", "aria-label": "Close the story", on: { click: () => this.close() } },
      "✕",
    );
    host.append(
      h("div", { class: "head" }, this.title, h("span", { class: "spacer" }), close),
      this.slot,
      h("div", { class: "tools" }, this.filter, this.older),
      this.when,
      this.list,
      this.note,
    );
    host.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
  }

  get open() {
    return this.about !== null;
  }

  /** about: {run, runName, learner} or {run, runName, fragment} or {run, runName}. */
  show(about) {
    const same = this.open && ["run", "learner", "fragment"].every((key) => this.about[key] === about[key]);
    this.back = this.open ? this.back : document.activeElement;
    this.about = about;
    this.limit = PAGE;
    this.lines = same ? this.lines : [];
    this.stick = true;
    this.filter.value = "";
    put(this.title, `${about.runName ? `${about.runName}: ` : ""}${this.subject()}`);
    show(this.host, true);
    document.body.classList.add("story-open");
    this.slot.replaceChildren();
    this.slot.keyedNodes = undefined;
    put(this.note, "Reading…");
    this.fill();
    this.load();
    this.title.focus({ preventScroll: true });
  }

  subject() {
    const { learner, fragment } = this.about;
    return learner !== undefined
      ? `learner ${learner}`
      : fragment !== undefined
        ? `fragment ${fragment}`
        : "the whole run";
  }

  close() {
    if (!this.open) return;
    this.about = null;
    show(this.host, false);
    document.body.classList.remove("story-open");
    if (this.back?.isConnected) this.back.focus({ preventScroll: true });
  }

  more() {
    this.limit += PAGE * 2;
    this.stick = false;
    this.load();
  }

  async load() {
    const { about } = this;
    if (!about || this.busy === about) return;
    this.busy = about;
    this.at = performance.now();
    const query = new URLSearchParams({ limit: this.limit });
    for (const key of ["learner", "fragment"]) if (about[key] !== undefined) query.set(key, about[key]);
    if (this.until !== null && this.until !== undefined) query.set("until", this.until);
    const requested = query.toString();
    try {
      const reply = await this.net.get(`api/run/${about.run}/story?${query}`);
      if (this.about !== about) return;
      this.lines = reply.lines;
      this.requested = requested;
      show(this.older, reply.has_more);
      put(this.note, "No events yet.");
      this.fill();
    } catch (error) {
      if (this.about === about && !this.lines.length) put(this.note, `Cannot load the story: ${error.message}`);
    } finally {
      if (this.busy === about) this.busy = null;
    }
    if (this.about === about && this.until !== this.shownUntil) this.render(this.status);
  }

  render(status) {
    if (!this.open || !status) return;
    this.status = status;
    this.wall0 = status.wall0;
    const until = status.now ? null : status.at;
    put(
      this.when,
      until === null ? "Click a time to travel to it." : `Until ${runTime(until, true)}, the time that is shown.`,
    );
    const island = status.islands.find((some) => some.learner === this.about.learner);
    keyed(
      this.slot,
      island ? [island] : [],
      (some) => some.learner,
      (some) => {
        const entry = card(some.learner, () => {});
        attr(entry.name, "disabled", "");
        return entry;
      },
      (entry, some) => fillCard(entry, some, status.at),
    );
    const moved = until !== this.until;
    this.until = until;
    const edition = `${status.to} ${status.loading}`;
    if (moved || (edition !== this.edition && performance.now() - (this.at ?? 0) > REFRESH_MS)) {
      this.edition = edition;
      this.shownUntil = until;
      this.load();
    }
  }

  fill() {
    const pattern = this.filter.value.trim().toLowerCase();
    const some = pattern
      ? this.lines.filter((line) => `${line.subject} ${line.text}`.toLowerCase().includes(pattern))
      : this.lines;
    const { list } = this;
    const stick = this.stick || list.scrollHeight - list.scrollTop - list.clientHeight < 8;
    const seen = new Map(); // two lines may have the same time and text
    const items = some.map((line) => {
      const name = `${line.at} ${line.subject} ${line.text}`;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      return { ...line, key: `${name} ${seen.get(name)}` };
    });
    keyed(
      list,
      items,
      (line) => line.key,
      (line) => this.line(line),
      () => {},
    );
    show(this.note, some.length === 0);
    if (pattern && this.lines.length) put(this.note, `No line matches “${this.filter.value.trim()}”.`);
    if (stick) list.scrollTop = list.scrollHeight;
    if (items.length) this.stick = false;
  }

  line(line) {
    const wall = wallTime(line.at, this.wall0);
    const time = h(
      "button",
      {
        type: "button",
        class: "time",
        title: `${wall ? `${wall}; ` : ""}travel to this time`,
        on: { click: () => this.onTravel(line.at) },
      },
      runTime(line.at, true),
    );
    const about = this.subject() === line.subject ? null : h("b", {}, `${line.subject}: `);
    return h("li", {}, time, h("span", {}, about, line.text));
  }
}
