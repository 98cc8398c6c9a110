// Story: a panel that tells of the run, an island or a fragment in sentences, newest last.

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
    this.list = h("ol", { class: "lines", tabindex: "0", "aria-label": "Lines of the story" });
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
    document.body.classList.add("telling");
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
    document.body.classList.remove("telling");
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
    const words = new URLSearchParams({ limit: this.limit });
    for (const key of ["learner", "fragment"]) if (about[key] !== undefined) words.set(key, about[key]);
    if (this.until !== null && this.until !== undefined) words.set("until", this.until);
    const requested = words.toString();
    try {
      const told = await this.net.get(`api/run/${about.run}/story?${words}`);
      if (this.about !== about) return;
      this.lines = told.lines;
      this.requested = requested;
      show(this.older, told.has_more);
      put(this.note, "Nothing has happened yet.");
      this.fill();
    } catch (error) {
      if (this.about === about && !this.lines.length) put(this.note, `No story: ${error.message}`);
    } finally {
      if (this.busy === about) this.busy = null;
    }
    if (this.about === about && this.until !== this.shownUntil) this.render(this.picture);
  }

  render(picture) {
    if (!this.open || !picture) return;
    this.picture = picture;
    this.wall0 = picture.wall0;
    const until = picture.now ? null : picture.at;
    put(
      this.when,
      until === null ? "Click a time to travel there." : `Until ${runTime(until, true)}, where you are in time.`,
    );
    const island = picture.islands.find((some) => some.learner === this.about.learner);
    keyed(
      this.slot,
      island ? [island] : [],
      (some) => some.learner,
      (some) => {
        const entry = card(some.learner, () => {});
        attr(entry.name, "disabled", "");
        return entry;
      },
      (entry, some) => fillCard(entry, some, picture.at),
    );
    const moved = until !== this.until;
    this.until = until;
    const edition = `${picture.to} ${picture.loading}`;
    if (moved || (edition !== this.edition && performance.now() - (this.at ?? 0) > REFRESH_MS)) {
      this.edition = edition;
      this.shownUntil = until;
      this.load();
    }
  }

  fill() {
    const words = this.filter.value.trim().toLowerCase();
    const some = words
      ? this.lines.filter((line) => `${line.subject} ${line.text}`.toLowerCase().includes(words))
      : this.lines;
    const { list } = this;
    const stick = this.stick || list.scrollHeight - list.scrollTop - list.clientHeight < 8;
    const seen = new Map(); // two equal sentences at one time are two lines
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
    if (words && this.lines.length) put(this.note, `No line has “${this.filter.value.trim()}”.`);
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
        title: `${wall ? `${wall}; ` : ""}travel there`,
        on: { click: () => this.onTravel(line.at) },
      },
      runTime(line.at, true),
    );
    const about = this.subject() === line.subject ? null : h("b", {}, `${line.subject}: `);
    return h("li", {}, time, h("span", {}, about, line.text));
  }
}
