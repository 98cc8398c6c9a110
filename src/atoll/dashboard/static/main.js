// The page: connects its parts, decides what is shown, and renders at most once per frame.

import { Column } from "./column.js";
import { Controls } from "./controls.js";
import { Curves } from "./curves.js";
import { Dialog } from "./dialog.js";
import { attr, h, keyed, perFrame, put, remember, show } from "./dom.js";
import { share } from "./format.js";
import { Net, takeToken } from "./net.js";
import { Notices } from "./notices.js";
import { Story } from "./story.js";
import { Travel } from "./travel.js";

const SECTIONS = [
  ["now", "Now"],
  ["timeline", "Timeline"],
  ["fragments", "Fragments"],
  ["ledger", "Ledger"],
  ["curves", "Curves"],
  ["controls", "Controls"],
];
const THEMES = { auto: "◐ auto", light: "○ light", dark: "● dark" };
const at = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.net = new Net(takeToken());
    this.columns = [];
    this.view = "A";
    this.travel = null;
    this.renders = 0;
    this.dialog = new Dialog(at("dialog"));
    this.story = new Story(at("story"), { net: this.net, onTravel: (time) => this.travelTo(time) });
    this.notices = new Notices(at("notices"), {
      onLive: () => this.travelTo(null),
      onRetry: () => this.retry(),
      onStory: (about) => this.openStory(about),
    });
    this.travelBar = new Travel(at("travel"), { onTravel: (time) => this.travelTo(time) });
    this.curves = new Curves(at("curves"), { net: this.net });
    this.controls = new Controls(at("controls"), { net: this.net, dialog: this.dialog });
    this.changed = perFrame(() => this.render());
    this.makeNav();
    this.makeTheme();
    at("help").addEventListener("click", () => this.dialog.help());
    document.addEventListener("keydown", (event) => this.onKey(event));
    setInterval(() => !document.hidden && this.changed(), 1000); // ages grow without new data too
    this.begin();
  }

  async begin() {
    for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
      try {
        return this.setRuns((await this.net.get("api/runs")).runs);
      } catch (error) {
        if (error.status === 401) {
          await this.getToken();
          wait = 250;
          continue;
        }
        this.showVerdict({ tone: "bad", word: "Not connected", text: "connecting to the server" });
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async getToken() {
    if (this.isAskingToken) return;
    this.isAskingToken = true;
    const token = await this.dialog.askToken(Boolean(this.net.token));
    this.isAskingToken = false;
    if (token) this.net.setToken(token);
  }

  setRuns(runs) {
    this.runs = runs;
    const options = {
      net: this.net,
      onStory: (about) => this.openStory(about),
      onTravel: (time) => this.travelTo(time),
      changed: () => this.changed(),
    };
    this.columns = runs.map((run, index) => new Column(run, "AB"[index] ?? String(index + 1), options));
    at("columns").replaceChildren(...this.columns.map((column) => column.node));
    for (const column of this.columns) {
      column.onLost = (error) => error?.status === 401 && this.getToken().then(() => this.retry());
      column.onBack = () => this.refreshRuns();
      column.watch();
    }
    const host = at("switch");
    show(host, runs.length > 1);
    if (runs.length > 1) {
      for (const [view, name] of [
        ...this.columns.map((column) => [column.letter, column.run.name]),
        ["both", "both"],
      ]) {
        host.append(
          h(
            "button",
            { type: "button", "data-view": view, title: name, on: { click: () => this.setView(view) } },
            view === "both" ? "both" : h("span", {}, h("b", {}, view), h("span", { class: "wide-only" }, ` ${name}`)),
          ),
        );
      }
    }
    this.setView(this.columns[0]?.letter ?? "A");
  }

  /** Reload the list of runs after a reconnect: the server may have restarted with other permissions. */
  async refreshRuns() {
    try {
      const { runs } = await this.net.get("api/runs");
      if (runs.length !== this.runs.length) return location.reload();
      runs.forEach((run, index) => Object.assign(this.columns[index].run, run));
      this.curves.loaded = false;
      if (this.curves.visible) this.curves.start();
      this.changed();
    } catch {
      // the stream reports the next disconnect
    }
    return undefined;
  }

  get visible() {
    return this.columns.filter((column) => this.view === "both" || column.letter === this.view);
  }

  setView(view) {
    this.view = view;
    for (const column of this.columns) show(column.node, this.visible.includes(column));
    for (const button of at("switch").children) attr(button, "aria-pressed", String(button.dataset.view === view));
    document.body.classList.toggle("both", this.visible.length > 1);
    this.curves.setRuns(this.visible.map((column) => column.run));
    if (this.travel !== null) for (const column of this.visible) column.travelTo(this.travel);
    this.changed();
  }

  travelTo(time) {
    this.travel = time;
    document.body.classList.toggle("travelling", time !== null);
    for (const column of this.columns) {
      if (time === null || this.visible.includes(column)) column.travelTo(time);
      else column.travel = time;
    }
    this.changed();
  }

  openStory(about) {
    const column = this.columns.find((some) => some.run.index === about.run) ?? this.visible[0];
    if (!column) return;
    this.story.show({ ...about, run: column.run.index, runName: this.columns.length > 1 ? column.run.name : null });
    this.changed();
  }

  retry() {
    for (const column of this.columns) column.watcher?.retry();
  }

  // ---- rendering

  render() {
    this.renders += 1;
    const columns = this.visible;
    if (!columns.length) return;
    for (const column of columns) column.render(columns.length > 1);
    this.notices.render(columns, this.travel);
    this.travelBar.render(columns, this.travel);
    this.curves.render(columns.map((column) => column.newest).filter(Boolean), this.travel);
    const controlled = columns.find((column) => column.run.controls) ?? columns[0];
    this.controls.render(controlled.run, controlled.newest, this.travel !== null, this.columns.length > 1);
    const column = this.columns.find((some) => some.run.index === this.story.about?.run);
    this.story.render(column?.shown);
    this.renderTop(columns);
  }

  renderTop(columns) {
    const names = columns.map((column) => column.run.name).join(" and ");
    put(at("title"), names);
    attr(at("title"), "title", names);
    const verdicts = columns.map((column) => column.verdict());
    const worst = ["bad", "warn", "good", "calm"]
      .map((tone) => verdicts.find((verdict) => verdict.tone === tone))
      .find(Boolean);
    this.showVerdict(worst);
    document.title = `${{ bad: "✕ ", warn: "! " }[worst.tone] ?? ""}${names} · ${worst.word} · Atoll`;
    const reading = columns.map((column) => column.newest?.loading).find((some) => some !== null && some !== undefined);
    show(at("loading"), reading !== undefined);
    if (reading !== undefined) {
      at("loading").firstChild.value = reading;
      put(at("loading").lastChild, `Reading tapes: ${share(reading, 0)}. Values are incomplete.`);
    }
    const link = at("nav").querySelector("[data-to=controls]");
    show(link, !at("controls").hidden);
  }

  showVerdict({ tone, word, text }) {
    const node = at("verdict");
    attr(node, "data-tone", tone);
    put(node.firstElementChild, `${{ good: "✓", warn: "!", bad: "✕", calm: "·" }[tone]} ${word}`);
    put(node.lastElementChild, text);
  }

  // ---- navigation, theme, keyboard

  makeNav() {
    keyed(
      at("nav"),
      SECTIONS,
      ([id]) => id,
      ([id, name]) =>
        h(
          "a",
          {
            href: `#${id}`,
            "data-to": id,
            on: {
              click: (event) => {
                event.preventDefault();
                this.go(id);
              },
            },
          },
          name,
        ),
      () => {},
    );
  }

  go(id) {
    const node = at(id) ?? at(`${id}-${this.visible[0]?.run.index ?? 0}`);
    if (!node || node.hidden) return;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    node.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
    attr(node, "tabindex", "-1");
    (node.querySelector(".plot") ?? node).focus({ preventScroll: true });
  }

  makeTheme() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const use = () => {
      const chosen = document.documentElement.dataset.theme ?? "auto";
      put(at("theme"), THEMES[chosen]);
      attr(at("theme"), "aria-label", `Theme: ${chosen}. Change it.`);
      document.documentElement.dataset.themeNow = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
      for (const column of this.columns) column.parts.timeline.retheme();
      this.curves.retheme();
    };
    at("theme").addEventListener("click", () => {
      const order = Object.keys(THEMES);
      const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % order.length];
      if (next === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = next;
      remember("theme", next === "auto" ? null : next);
      use();
    });
    system.addEventListener("change", use);
    use();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || this.dialog.open) return;
    if (
      event.target.closest?.("input:not([type=range]):not([type=checkbox]), select, textarea") &&
      event.key !== "Escape"
    )
      return;
    const views = [...this.columns.map((column) => column.letter), ...(this.columns.length > 1 ? ["both"] : [])];
    const acts = {
      "?": () => this.dialog.help(),
      s: () => this.openStory({}),
      "/": () => this.story.open && this.story.filter.focus(),
      l: () => this.travelTo(null),
      "[": () => this.travelBar.step(-0.01, this.travel),
      "]": () => this.travelBar.step(0.01, this.travel),
      "{": () => this.travelBar.step(-0.001, this.travel),
      "}": () => this.travelBar.step(0.001, this.travel),
      v: () => this.setView(views[(views.indexOf(this.view) + 1) % views.length]),
      d: () => at("theme").click(),
      r: () => this.retry(),
      Escape: () => this.story.close(),
    };
    SECTIONS.forEach(([id], index) => (acts[String(index + 1)] = () => this.go(id)));
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

// Tests and benchmarks read it; nothing on the page does.
globalThis.atollPage = new Page();
