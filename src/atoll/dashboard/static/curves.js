// Curves: a chart for each selected group of series, loaded when it is visible.

import { Chart, TITLES } from "./chart.js";
import { attr, h, keyed, put, remember, settled, show } from "./dom.js";

const MAX_CHARTS = 8;
const REFRESH_MS = 5000;
const DEFAULT_CHARTS = ["loss", "throughput", "goodput", "merges"];

export class Curves {
  constructor(host, { net }) {
    this.net = net;
    this.runs = [];
    this.charts = new Map();
    this.seriesList = [];
    this.settings = { x: "time", log: false, weight: 0 };
    this.selected = new Set(
      (remember("curves") ?? DEFAULT_CHARTS.join())
        .split(",")
        .filter((name) => name in TITLES)
        .slice(0, MAX_CHARTS),
    );
    this.build(host);
    this.host = host;
    this.visible = false;
  }

  /** Observe the visibility, once there is content above: on an empty page the curves would be visible first. */
  observe() {
    if (this.observer) return;
    this.observer = new IntersectionObserver(
      (seen) => {
        this.visible = seen.at(-1).isIntersecting;
        if (this.visible) this.start();
      },
      { rootMargin: "300px" },
    );
    requestAnimationFrame(() => this.observer.observe(this.host));
  }

  build(host) {
    const segment = (x, text) =>
      h(
        "button",
        { type: "button", "aria-pressed": String(this.settings.x === x), on: { click: () => this.setX(x) } },
        text,
      );
    this.segments = { time: segment("time", "time"), tokens: segment("tokens", "tokens") };
    this.log = h("input", { type: "checkbox", on: { change: () => this.redrawAll({ log: this.log.checked }) } });
    this.level = h("output", {}, "0");
    const smooth = settled(60, () => this.redrawAll({ weight: Number(this.smooth.value) }));
    this.smooth = h("input", {
      type: "range",
      min: "0",
      max: "0.98",
      step: "0.02",
      value: "0",
      "aria-label": "Smoothing",
      on: {
        input: () => {
          put(this.level, Number(this.smooth.value).toFixed(2));
          smooth();
        },
      },
    });
    this.groups = h("div", { class: "filters", role: "group", "aria-label": "Groups of curves" });
    this.note = h("p", { class: "soft empty" }, "Loading…");
    this.grid = h("div", { class: "charts" });
    host.append(
      h("h2", { id: "curves-title" }, "Curves"),
      h(
        "div",
        { class: "tools" },
        h(
          "div",
          { class: "segments", role: "group", "aria-label": "Against" },
          this.segments.time,
          this.segments.tokens,
        ),
        h("label", {}, this.log, "log scale"),
        h("label", { class: "slide" }, "smoothing", this.smooth, this.level),
      ),
      this.groups,
      this.note,
      this.grid,
      h(
        "p",
        { class: "soft hint" },
        "Drag in a chart to zoom, double-click to reset. Click a name to hide its line.",
      ),
    );
  }

  /** Set the runs that are shown: one, or two in the same charts. */
  setRuns(runs) {
    this.runs = runs;
    this.loaded = false;
    if (this.visible) this.start();
  }

  async start() {
    if (this.loaded || this.starting || !this.runs.length) return;
    this.starting = true;
    const runs = this.runs;
    try {
      if (!globalThis.uPlot) await script("vendor/uPlot.iife.min.js");
      const lists = await Promise.all(runs.map((run) => this.net.get(`api/run/${run.index}/series`)));
      this.seriesList = lists.flatMap(({ series }, index) =>
        series.map((some) => ({
          ...some,
          run: runs[index].index,
          runName: runs.length > 1 ? runs[index].name : null,
          second: index > 0,
        })),
      );
      this.loaded = runs === this.runs;
      show(this.note, this.seriesList.length === 0);
      put(this.note, "This run has no curves yet.");
      this.arrange();
    } catch (error) {
      put(this.note, `Cannot load curves: ${error.message}`);
    } finally {
      this.starting = false;
    }
    if (!this.loaded && runs !== this.runs) this.start();
  }

  arrange() {
    const found = [...new Set(this.seriesList.map((some) => some.group))];
    const names = [
      ...Object.keys(TITLES).filter((name) => found.includes(name)),
      ...found.filter((name) => !(name in TITLES)).sort(),
    ];
    keyed(
      this.groups,
      names,
      (name) => name,
      (name) => h("button", { type: "button", class: "filter", on: { click: () => this.toggle(name) } }, name),
      (node, name) => {
        attr(node, "aria-pressed", String(this.selected.has(name)));
        attr(node, "disabled", !this.selected.has(name) && this.selected.size >= MAX_CHARTS ? "" : null);
      },
    );
    const open = names.filter((name) => this.selected.has(name));
    for (const [name, chart] of this.charts) {
      if (open.includes(name)) continue;
      chart.close();
      this.charts.delete(name);
    }
    for (const name of open) {
      if (!this.charts.has(name)) {
        this.charts.set(
          name,
          new Chart(name, {
            settings: this.settings,
            fetchSeries: (...args) => this.fetchSeries(...args),
            download: (...args) => this.download(...args),
          }),
        );
      }
      const chart = this.charts.get(name);
      this.grid.append(chart.node);
      chart.travel = this.travel;
      const series = this.seriesList.filter((some) => some.group === name);
      const key = series.map((some) => `${some.run} ${some.name}`).join();
      if (key !== chart.seriesKey) {
        chart.seriesKey = key;
        chart.setSeries(series);
      }
    }
  }

  toggle(name) {
    if (!this.selected.delete(name)) this.selected.add(name);
    remember("curves", [...this.selected].join());
    this.arrange();
  }

  setX(x) {
    this.settings.x = x;
    for (const [name, node] of Object.entries(this.segments)) attr(node, "aria-pressed", String(name === x));
    for (const chart of this.charts.values()) {
      chart.window = null;
      chart.stale = true;
      if (chart.visible) chart.load();
    }
  }

  redrawAll(changed) {
    Object.assign(this.settings, changed);
    for (const chart of this.charts.values()) if (chart.plot) chart.draw();
  }

  retheme() {
    for (const chart of this.charts.values()) if (chart.plot) chart.draw();
  }

  /** Handle a new status: reload visible charts every few seconds, and move the line of the shown time. */
  render(statuses, travel) {
    if (statuses.length) this.observe();
    this.travel = travel;
    for (const chart of this.charts.values()) chart.travelTo(travel);
    const key = statuses.map((status) => `${status.to} ${status.loading}`).join();
    const now = performance.now();
    if (!this.loaded || key === this.key || now - (this.at ?? -Infinity) < REFRESH_MS) return;
    this.key = key;
    this.at = now;
    for (const chart of this.charts.values()) {
      if (chart.visible && !document.hidden) chart.load();
      else chart.stale = true;
    }
    this.reloadSeries();
  }

  /** Reload the list of series: learners that joined later add series. */
  async reloadSeries() {
    if (!this.visible || this.starting || isSeriesListRecent(this)) return;
    this.loaded = false;
    await this.start();
  }

  async fetchSeries(run, names, { x, points, from, to }) {
    const query = new URLSearchParams({ names: names.join(), x, points });
    if (from !== undefined) query.set("from", from);
    if (to !== undefined) query.set("to", to);
    return { run, series: (await this.net.get(`api/run/${run}/series?${query}`)).series };
  }

  async download(run, names, x, group) {
    const blob = await this.net.file(`api/run/${run}/series.csv?${new URLSearchParams({ names: names.join(), x })}`);
    const url = URL.createObjectURL(blob);
    h("a", {
      href: url,
      download: `${(this.runs.find((some) => some.index === run)?.name ?? "run").replace(/[^\w.-]+/g, "_")}-${group}.csv`,
    }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }
}

function isSeriesListRecent(curves) {
  const now = performance.now();
  if (now - (curves.seriesListAt ?? 0) < 30000) return true;
  curves.seriesListAt = now;
  return false;
}

function script(src) {
  return new Promise((resolve, reject) => {
    const node = h("script", { src, on: { load: resolve, error: () => reject(new Error(`cannot load ${src}`)) } });
    document.head.append(node);
  });
}
