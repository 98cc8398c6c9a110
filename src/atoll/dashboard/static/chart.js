// One chart of a group of series, with legend, values under the cursor and download.

import { table } from "./curve_data.js";
import { attr, colour, h, put, settled, show, toast } from "./dom.js";
import { compact, plain, runTime } from "./format.js";
import { STEPS } from "./timeline_marks.js";

const HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7cd8", "#9a8f1a"];
const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3]];
const HEIGHT = 230;
const MANY = 12; // number of series from which the legend is collapsed

export const TITLES = {
  loss: "Loss",
  throughput: "Throughput",
  goodput: "Goodput",
  merges: "Merges: contributions, pulled, alive",
  bytes: "Bytes",
  norms: "Norms",
  cosine: "Cosine between learners' deltas",
  momentum: "Outer momentum",
  quantisation: "Quantization error",
  grace: "Grace used against slack",
  "effective-h": "Effective H: steps between merges",
};

/** Return whether a series describes the whole run: its line is thicker, in the text color. */
const ofAll = (some) => /^(loss\.published|goodput|throughput|goodput\.run)$/.test(some.name);

export class Chart {
  /** `series` are those of the server, each with `run` (index), `runName` and `second` (drawn dashed). */
  constructor(group, { fetchSeries, download, settings }) {
    Object.assign(this, {
      group,
      fetchSeries,
      download,
      settings,
      hidden: new Set(),
      window: null,
      data: [],
      series: [],
    });
    this.title = h("h3", {}, TITLES[group] ?? group);
    this.unit = h("span", { class: "soft" });
    this.reading = h("p", { class: "reading", "aria-hidden": "true" });
    this.csv = h(
      "button",
      { type: "button", class: "quiet small", title: "Download these series", on: { click: () => this.save() } },
      "CSV",
    );
    this.note = h("p", { class: "soft empty" }, "Loading…");
    this.host = h("div", { class: "chart", role: "img", "aria-label": `${TITLES[group] ?? group}: loading` });
    this.legend = h("div", { class: "series", role: "group", "aria-label": `Series of ${group}` });
    this.fold = h("details", { class: "fold" }, h("summary"), this.legend);
    this.node = h(
      "figure",
      { class: "panel inner", "data-group": group },
      h("figcaption", {}, this.title, this.unit, h("span", { class: "spacer" }), this.csv),
      this.reading,
      this.host,
      this.note,
      this.fold,
    );
    this.zoomed = settled(250, () => this.load());
    this.visible = false;
    new IntersectionObserver(
      (seen) => {
        const appeared = !this.visible && seen.at(-1).isIntersecting;
        this.visible = seen.at(-1).isIntersecting;
        if (appeared && this.stale) this.load();
      },
      { rootMargin: "150px" },
    ).observe(this.node);
    new ResizeObserver(() => this.resize()).observe(this.host);
  }

  setSeries(series) {
    this.series = series;
    this.stale = true;
    put(this.unit, [...new Set(series.map((some) => some.unit).filter(Boolean))].join(", "));
    this.fillLegend();
    if (this.visible) this.load();
  }

  get x() {
    return this.settings.x === "tokens" && this.series.some((some) => some.x.includes("tokens")) ? "tokens" : "time";
  }

  async load() {
    this.stale = false;
    const request = (this.request = (this.request ?? 0) + 1);
    const x = this.x;
    const requested = this.series.filter((some) => some.x.includes(x));
    const points = Math.min(
      Math.max(Math.round((this.host.clientWidth || 500) / (requested.length > 16 ? 2 : 1)), 150),
      600,
    );
    const window = x === "time" ? this.window : null;
    try {
      const replies = await Promise.all(
        [...new Set(requested.map((some) => some.run))].map((run) =>
          this.fetchSeries(
            run,
            requested.filter((some) => some.run === run).map((some) => some.name),
            { x, points, ...window },
          ),
        ),
      );
      if (request !== this.request) return;
      const found = new Map(replies.flatMap(({ run, series }) => series.map((some) => [`${run} ${some.name}`, some])));
      this.requested = requested;
      this.data = requested.map((some) => found.get(`${some.run} ${some.name}`) ?? { x: [], y: [] });
      this.draw();
    } catch (error) {
      if (request === this.request && !this.plot) put(this.note, `Cannot load curves: ${error.message}`);
      this.stale = true;
    }
  }

  /** Draw the loaded data with the current smoothing and scale. */
  draw() {
    const { log, weight } = this.settings;
    const any = this.data.some((some) => some.x.length);
    show(this.note, !any);
    show(this.host, any);
    if (!any) put(this.note, "No data yet.");
    const rows = table(this.data, { weight, log, gaps: this.x === "time" }, globalThis.uPlot.join);
    const shape = [
      this.x,
      log,
      document.documentElement.dataset.themeNow,
      ...this.requested.map((some) => `${some.run}${some.name}`),
    ].join();
    if (this.plot && shape === this.shape) {
      if (this.window) (this.plot.setData(rows, false), this.plot.redraw());
      else this.plot.setData(rows);
    } else {
      this.shape = shape;
      this.make(rows);
    }
    this.describe();
  }

  make(rows) {
    this.plot?.destroy();
    const ink = { soft: colour("soft"), line: colour("line"), ink: colour("ink"), warn: colour("warn") };
    const axis = {
      stroke: ink.soft,
      font: "11px system-ui, sans-serif",
      grid: { stroke: ink.line, width: 1 },
      ticks: { stroke: ink.line, width: 1, size: 4 },
    };
    const time = this.x === "time";
    const many = this.requested.length > MANY;
    const options = {
      width: Math.max(this.host.clientWidth, 200),
      height: HEIGHT,
      legend: { show: false },
      focus: { alpha: many ? 0.25 : 0.4 },
      cursor: { focus: { prox: 24 }, points: { size: 6 }, drag: { x: true, y: false }, y: false },
      scales: { x: { time: false }, y: { distr: this.settings.log ? 3 : 1 } },
      axes: [
        {
          ...axis,
          size: 30,
          space: 80,
          ...(time ? { incrs: STEPS } : {}),
          values: (_, splits) => splits.map((v) => (time ? runTime(v, splits[1] - splits[0] < 1) : compact(v))),
        },
        {
          ...axis,
          size: 54,
          values: (_, splits) => splits.map((v) => (v === null ? "" : Math.abs(v) >= 10000 ? compact(v) : plain(v, 4))),
        },
      ],
      series: [{}, ...this.requested.map((some, index) => this.style(some, index, ink, many))],
      hooks: {
        setCursor: [(plot) => this.read(plot)],
        setSeries: [
          (plot, index, options) => {
            if (options && "focus" in options) this.focused = index;
          },
        ],
        setSelect: [(plot) => this.zoomTo(plot)],
        draw: [(plot) => this.drawTravel(plot, ink.warn)],
      },
    };
    this.plot = new globalThis.uPlot(options, rows, this.host);
    this.plot.over.addEventListener("dblclick", () => {
      this.window = null;
      this.load();
    });
  }

  key(some) {
    return `${some.run} ${some.name}`;
  }

  style(some, index, ink, many) {
    const [hue, dash] = this.lineStyle(some);
    const first = hue === "ink";
    return {
      label: some.label,
      stroke: first ? ink.ink : hue,
      width: first ? 2.25 : many ? 1 : 1.5,
      dash: some.second ? [5, 4] : dash,
      spanGaps: false,
      show: !this.hidden.has(this.key(some)),
      points: { show: false },
    };
  }

  /** Return color and dash of a series. The same series of two runs has the same color. */
  lineStyle(some) {
    if (ofAll(some)) return ["ink", []];
    const names = [...new Set(this.series.filter((other) => !ofAll(other)).map((other) => other.name))];
    const index = names.indexOf(some.name);
    return [HUES[index % HUES.length], DASHES[Math.floor(index / HUES.length) % DASHES.length]];
  }

  fillLegend() {
    this.legend.replaceChildren(
      ...this.series.map((some) => {
        const [hue, dash] = this.lineStyle(some);
        const mark = h("span", {
          class: "line",
          "aria-hidden": "true",
          style: {
            "border-top-color": hue === "ink" ? "var(--ink)" : hue,
            "border-top-style":
              some.second || dash.length ? (dash.length === 2 && dash[0] === 2 ? "dotted" : "dashed") : "solid",
          },
        });
        const click = (event) => {
          const key = this.key(some);
          if (!this.hidden.delete(key)) this.hidden.add(key);
          attr(event.currentTarget, "aria-pressed", String(!this.hidden.has(key)));
          const index = this.requested?.indexOf(some) ?? -1;
          if (this.plot && index >= 0) this.plot.setSeries(index + 1, { show: !this.hidden.has(key) });
        };
        const label = some.runName ? `${some.runName}: ${some.label}` : some.label;
        return h(
          "button",
          { type: "button", "aria-pressed": String(!this.hidden.has(this.key(some))), on: { click } },
          mark,
          label,
        );
      }),
    );
    this.fold.open = this.series.length <= MANY;
    this.fold.classList.toggle("few", this.series.length <= MANY);
    put(this.fold.firstChild, `${this.series.length} series`);
  }

  zoomTo(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    this.window = { from: plot.posToVal(left, "x"), to: plot.posToVal(left + width, "x") };
    if (this.x === "time") this.zoomed();
  }

  read(plot) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined) return put(this.reading, "");
    const at = plot.data[0][index];
    const parts = [this.x === "time" ? runTime(at, true) : `${compact(at)} tokens`];
    const shown = this.focused
      ? [this.focused]
      : this.requested
          .map((_, i) => i + 1)
          .filter((i) => plot.series[i].show)
          .slice(0, 4);
    for (const one of shown) {
      const column = plot.data[one];
      let i = index;
      while (i > 0 && column[i] === undefined && index - i < 60) i -= 1;
      if (column[i] !== null && column[i] !== undefined)
        parts.push(`${this.name(this.requested[one - 1])} ${plain(column[i], 4)}`);
    }
    return put(this.reading, parts.join("  ·  "));
  }

  name(some) {
    return some.runName ? `${some.runName}: ${some.label}` : some.label;
  }

  describe() {
    const last = this.data
      .map((some, i) => [this.name(this.requested[i]), some.y.findLast((y) => y !== null)])
      .filter(([, y]) => y !== undefined);
    const parts = last.slice(0, 6).map(([name, y]) => `${name} ${plain(y, 4)}`);
    attr(
      this.host,
      "aria-label",
      `${TITLES[this.group] ?? this.group} against ${this.x}, ${last.length} series. Newest values: ${parts.join(", ")}${last.length > 6 ? " and others" : ""}`,
    );
  }

  travelTo(at) {
    if (this.travel === at) return;
    this.travel = at;
    if (this.visible) this.plot?.redraw(false);
  }

  drawTravel(plot, stroke) {
    if (this.travel === null || this.travel === undefined || this.x !== "time") return;
    const x = plot.valToPos(this.travel, "x", true);
    if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) return;
    plot.ctx.fillStyle = stroke;
    plot.ctx.fillRect(x - 1, plot.bbox.top, 2, plot.bbox.height);
  }

  resize() {
    const width = this.host.clientWidth;
    if (this.plot && width && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: HEIGHT });
  }

  async save() {
    try {
      for (const run of new Set(this.series.map((some) => some.run))) {
        await this.download(
          run,
          this.series.filter((some) => some.run === run && some.x.includes(this.x)).map((some) => some.name),
          this.x,
          this.group,
        );
      }
    } catch (error) {
      toast(`Cannot download: ${error.message}`, "bad");
    }
  }

  close() {
    this.plot?.destroy();
    this.node.remove();
  }
}
