// One run: its status, its connection and its sections on the page.

import { h, put, show } from "./dom.js";
import { duration, plural, share } from "./format.js";
import { Fragments } from "./fragments.js";
import { Ledger } from "./ledger.js";
import { Now } from "./now.js";
import { severe } from "./states.js";
import { Timeline } from "./timeline.js";

const OLD_S = 15; // age of the data of a live run from which it counts as stale

export class Column {
  constructor(run, letter, { net, onStory, onTravel, changed }) {
    Object.assign(this, { run, letter, net, changed, newest: null, shown: null, lost: null, receivedAt: null });
    const section = (id, title, extra = "") => {
      const node = h(
        "section",
        {
          id: `${id}-${run.index}`,
          class: `panel ${extra}`,
          "aria-labelledby": `${id}-title-${run.index}`,
          tabindex: "-1",
        },
        h("h2", { id: `${id}-title-${run.index}` }, title),
      );
      this.node.append(node);
      return node;
    };
    this.name = h("p", { class: "runname", hidden: true });
    this.node = h("div", { class: "column" }, this.name);
    const story = (about) => onStory({ run: run.index, ...about });
    const load = (from, to, width) => {
      const query = new URLSearchParams({ width });
      if (from !== null) query.set("from", from);
      if (to !== null) query.set("to", to);
      return net.get(`api/run/${run.index}/timeline?${query}`);
    };
    this.parts = {
      now: new Now(section("now", "Now"), { onStory: story }),
      timeline: new Timeline(section("timeline", "Timeline"), { load, onStory: story, onTravel }),
      fragments: new Fragments(section("fragments", "Fragments", "half"), { onStory: story }),
      ledger: new Ledger(section("ledger", "Ledger", "half")),
    };
    this.parts.now.onFilter = changed;
  }

  watch() {
    this.watcher = this.net.watch(this.run.index, {
      onStatus: (status) => this.receive(status),
      onConnection: (connection) => this.setConnection(connection),
    });
  }

  receive(status) {
    this.newest = status;
    this.run.controls = status.controls ?? this.run.controls; // its syncer may start after the page
    this.receivedAt = performance.now();
    if (this.travel === null || this.travel === undefined) this.shown = status;
    this.changed();
  }

  setConnection(connection) {
    const isBack = this.lost && !connection.lost;
    this.lost = connection.lost ? { since: this.lost?.since ?? performance.now(), ...connection } : null;
    if (isBack) {
      this.parts.timeline.refresh(true);
      this.onBack?.();
    }
    if (connection.lost) this.onLost?.(connection.error);
    this.changed();
  }

  /** Show the status at a time, or the newest one for null. One request at a time; the latest request wins. */
  async travelTo(at) {
    this.travel = at;
    if (at === null) {
      this.shown = this.newest;
      return this.changed();
    }
    if (this.travelling) return undefined;
    this.travelling = true;
    try {
      for (let done = null; this.travel !== null && done !== this.travel;) {
        const requested = this.travel;
        const status = await this.net.get(`api/run/${this.run.index}/view?at=${requested}`);
        if (this.travel !== null) this.shown = { ...status, now: false };
        done = requested;
        this.changed();
      }
    } catch (error) {
      this.setConnection({ lost: true, error, retryAt: performance.now() });
      this.watcher?.retry();
    } finally {
      this.travelling = false;
    }
    return undefined;
  }

  /** Return the seconds since the newest tape entry, as far as the page knows. */
  age() {
    if (!this.newest || this.receivedAt === null) return null;
    const since = (performance.now() - this.receivedAt) / 1000;
    return this.newest.live || this.lost ? (this.newest.age_s ?? 0) + since : null;
  }

  get old() {
    return Boolean(this.newest?.live && !this.newest.paused && this.newest.loading === null && this.age() > OLD_S);
  }

  verdict() {
    const p = this.shown;
    if (this.lost)
      return {
        tone: "bad",
        word: "Not connected",
        text: this.newest ? `the data is ${duration(this.age())} old` : "connecting to the server",
      };
    if (!p) return { tone: "calm", word: "Connecting", text: "" };
    const { alive, learners } = p.headline ?? {};
    const counts =
      typeof alive === "number" ? `${alive} of ${learners ?? "?"} islands alive` : "no islands yet";
    const alerts = p.alerts ?? [];
    if (p.loading !== null && p.loading !== undefined)
      return { tone: "calm", word: "Reading", text: `${share(p.loading, 0)} of the tapes` };
    if (!p.now) return { tone: "warn", word: "Time travel", text: counts };
    if (alerts.some(severe)) return { tone: "bad", word: "Critical", text: plural(alerts.length, "alert") };
    if (this.old) return { tone: "warn", word: "No data", text: `no new entry for ${duration(this.age())}` };
    if (alerts.length) return { tone: "warn", word: "Warning", text: `${plural(alerts.length, "alert")}, ${counts}` };
    if (p.paused) return { tone: "calm", word: "Paused", text: counts };
    if (!p.live || p.stage === "finished")
      return {
        tone: "calm",
        word: p.stage === "finished" ? "Finished" : "Ended",
        text: `after ${duration(p.to - p.from)}`,
      };
    return { tone: "good", word: "Healthy", text: `${counts}, no alerts` };
  }

  render(many) {
    show(this.name, many);
    if (many) {
      const { word, text } = this.verdict();
      put(this.name, `${this.letter} · ${this.run.name} · ${word}${text ? `: ${text}` : ""}`);
    }
    if (!this.shown) return;
    this.parts.now.render(this.shown);
    this.parts.timeline.render(this.shown, this.newest);
    this.parts.fragments.render(this.shown);
    this.parts.ledger.render(this.shown);
  }
}
