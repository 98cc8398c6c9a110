// Timeline: a band for each island over time. Zoom by wheel, drag, pinch or keys; hover or tap for details.

import { TimelineCanvas } from "./timeline_canvas.js";
import { announce, attr, h, keyed, perFrame, put, settled, show } from "./dom.js";
import { compact, duration, plain, plural, runTime, wallTime } from "./format.js";
import { MARKS, stateOf, WORST_FIRST } from "./states.js";

const REFRESH_MS = 2000;
const MIN_SPAN_S = 0.5; // narrowest view
const GLYPHS = {
  cross: "✕",
  triangle: "▲",
  dot: "●",
  ring: "○",
  slash: "//",
  question: "?",
  square: "■",
  diamond: "◆",
  exclamation: "!",
};

const bandLabel = (state) => (state === "up" || state === "down" ? state : stateOf(state).word);

export class Timeline {
  constructor(host, { load, onStory, onTravel }) {
    Object.assign(this, {
      load,
      onStory,
      onTravel,
      zoom: null,
      cursor: null,
      whole: { from: 0, to: 1 },
      wall0: null,
      travel: null,
    });
    this.overview = null;
    this.detail = null;
    this.loadedAt = -Infinity;
    this.visible = false;
    this.build(host);
    this.canvas = new TimelineCanvas(this.lower, this.upper);
    this.redraw = perFrame(() => this.drawNow());
    this.redrawOver = perFrame(() => this.drawOverNow());
    this.wantDetail = settled(160, () => this.loadDetail());
    this.listen();
  }

  build(host) {
    const button = (text, label, click) =>
      h("button", { type: "button", class: "quiet small", "aria-label": label, title: label, on: { click } }, text);
    this.range = h("span", { class: "soft range" });
    this.followButton = button("follow", "Keep the newest entries in view", () => this.follow());
    const tools = h(
      "div",
      { class: "tools" },
      this.range,
      h("span", { class: "spacer" }),
      h(
        "span",
        { class: "group" },
        button("−", "Zoom out", () => this.zoomBy(2)),
        button("+", "Zoom in", () => this.zoomBy(0.5)),
        this.followButton,
        button("all", "Show the whole run", () => this.showWhole()),
      ),
    );
    this.lower = h("canvas", { "aria-hidden": "true" });
    this.upper = h("canvas", { class: "over", "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot = h(
      "div",
      { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "timeline" },
      this.lower,
      this.upper,
      this.tip,
    );
    this.legend = h("ul", { class: "legend" });
    this.events = h("ol", { class: "events" });
    this.list = h(
      "details",
      { class: "aslist", on: { toggle: () => this.fillEvents() } },
      h("summary", {}, "Events as text"),
      this.events,
    );
    this.hint = h(
      "p",
      { class: "soft hint" },
      "Drag to zoom, or use Ctrl and the wheel; after a click, the wheel alone. Click a band to open its story.",
    );
    host.append(tools, this.plot, this.legend, this.hint, this.list);
  }

  listen() {
    const { plot } = this;
    new ResizeObserver(() => this.redraw()).observe(plot);
    new IntersectionObserver(
      (seen) => {
        this.visible = seen.at(-1).isIntersecting;
        if (this.visible) this.refresh();
      },
      { rootMargin: "200px" },
    ).observe(plot);
    plot.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    plot.addEventListener("pointermove", (event) => this.onMove(event));
    plot.addEventListener("pointerdown", (event) => this.onDown(event));
    plot.addEventListener("pointerup", (event) => this.onUp(event));
    plot.addEventListener("pointercancel", () => this.letGo());
    plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !this.drag && this.point(null));
    plot.addEventListener("keydown", (event) => this.onKey(event));
    plot.addEventListener("blur", () => this.point(null));
    this.pointers = new Map();
  }

  // ---- data

  render(status, newest) {
    const before = this.whole.to;
    const end = newest ?? status;
    this.whole = { from: end.from, to: Math.max(end.to, end.from + MIN_SPAN_S) };
    this.edition = `${end.to} ${end.loading}`; // reading more of a tape adds data for the same time
    this.wall0 = status.wall0;
    this.travel = status.now ? null : status.at;
    if (this.zoom?.follow && this.whole.to > before) this.shift(this.whole.to - before, true);
    this.refresh();
    this.describe(status);
    const drawn = `${this.edition} ${this.travel}`;
    if (drawn !== this.drawn) this.redraw();
    this.drawn = drawn;
  }

  refresh(force = false) {
    if ((!this.visible && this.overview) || this.busy) return;
    const due = this.loadedAt + REFRESH_MS - performance.now();
    if (!force && this.overview && this.loadedEdition === this.edition) return;
    if (!force && due > 0) {
      this.later ??= setTimeout(() => {
        this.later = undefined;
        this.refresh();
      }, due);
      return;
    }
    this.loadNow();
  }

  async loadNow() {
    this.busy = true;
    this.loadedAt = performance.now();
    const { edition } = this;
    try {
      this.overview = await this.load(null, null, this.pixels());
      this.loadedEdition = edition;
      if (this.zoom) await this.loadDetail();
      this.use();
    } catch {
      // the notice reports it; the next status retries
    } finally {
      this.busy = false;
    }
  }

  async loadDetail() {
    const zoom = this.zoom;
    if (!zoom) return;
    const span = zoom.to - zoom.from;
    const from = Math.max(zoom.from - span / 2, this.whole.from);
    const to = Math.min(zoom.to + span / 2, this.whole.to);
    try {
      const detail = await this.load(from, to, this.pixels() * 2);
      if (this.zoom) this.detail = detail;
      this.use();
    } catch {
      // the overview stays
    }
  }

  pixels() {
    return Math.max(Math.round(this.plot.clientWidth || 800), 200);
  }

  /** Use the most detailed data that covers the view. */
  use() {
    const view = this.view();
    const hasDetail =
      this.detail &&
      this.zoom &&
      this.detail.from <= view.from + 1e-6 &&
      this.detail.to >= Math.min(view.to, this.whole.to) - (view.to - view.from) * 0.02;
    const data = hasDetail ? this.detail : this.overview;
    if (data && data !== this.using) {
      this.using = data;
      this.canvas.setData(data);
      this.fillLegend(data);
      this.fillEvents();
    }
    this.redraw();
  }

  view() {
    return this.zoom ?? this.whole;
  }

  // ---- drawing

  drawNow() {
    const width = this.plot.clientWidth;
    if (!width || !this.overview) return;
    this.canvas.layout(width, devicePixelRatio || 1);
    this.canvas.draw(this.view(), { at: this.travel, wall0: this.wall0, end: this.whole.to });
    this.drawOverNow();
    const view = this.view();
    put(this.range, `${this.clock(view.from)} to ${this.clock(view.to)}, ${duration(view.to - view.from)}`);
    attr(this.followButton, "aria-pressed", String(Boolean(this.zoom?.follow)));
  }

  drawOverNow() {
    if (!this.overview || !this.canvas.dpr) return;
    this.canvas.drawOver(this.view(), this.cursor);
    this.fillTip();
  }

  retheme() {
    this.canvas.retheme();
    this.redraw();
  }

  clock(at) {
    return (
      wallTime(at, this.wall0, { day: this.whole.to - this.whole.from > 43200 }) ??
      runTime(at, this.view().to - this.view().from < 20)
    );
  }

  describe(status) {
    const counts = new Map();
    for (const island of status.islands) counts.set(island.state, (counts.get(island.state) ?? 0) + 1);
    const present = WORST_FIRST.filter((state) => counts.has(state));
    const counted = present.map((state) => `${counts.get(state)} ${stateOf(state).word}`);
    attr(
      this.plot,
      "aria-label",
      `Timeline of ${plural(status.islands.length, "island")} and the syncer: ${counted.join(", ") || "none yet"}. ` +
        "Arrow keys move, plus and minus zoom, 0 shows all, n and p select an event, t travels to it, Enter opens the story.",
    );
  }

  fillLegend(data) {
    const states = new Set(data.islands.flatMap((island) => island.bands.map((band) => band[2])));
    const kinds = new Set(data.marks.map((mark) => mark.kind));
    const items = [
      ...WORST_FIRST.toReversed()
        .filter((state) => states.has(state))
        .map((state) => ({ key: `s ${state}`, state })),
      ...Object.keys(MARKS)
        .filter((kind) => kinds.has(kind))
        .map((kind) => ({ key: `m ${kind}`, kind })),
    ];
    keyed(
      this.legend,
      items,
      (item) => item.key,
      ({ state, kind }) =>
        state
          ? h(
              "li",
              { title: stateOf(state).note },
              h("span", { class: "swatch band", "data-state": state, "aria-hidden": "true" }),
              stateOf(state).word,
            )
          : h(
              "li",
              {},
              h(
                "span",
                { class: "glyph", "data-tone": MARKS[kind].tone, "aria-hidden": "true" },
                GLYPHS[MARKS[kind].shape],
              ),
              MARKS[kind].word,
            ),
      () => {},
    );
  }

  fillEvents() {
    if (!this.list.open || !this.using) return;
    const marks = this.using.marks.slice(-100).toReversed();
    keyed(
      this.events,
      marks,
      (mark) => `${mark.at} ${mark.subject} ${mark.kind}`,
      (mark) =>
        h(
          "li",
          {},
          h("time", {}, this.clock(mark.at)),
          ` ${mark.subject}: ${MARKS[mark.kind]?.word ?? mark.kind}. ${mark.text ?? ""}`,
        ),
      () => {},
    );
  }

  // ---- view

  setView(from, to) {
    const all = this.whole.to - this.whole.from;
    const span = Math.min(Math.max(to - from, MIN_SPAN_S), all);
    if (span >= all * 0.999) return this.showWhole();
    const begin = Math.min(Math.max(from, this.whole.from), this.whole.to - span);
    this.zoom = { from: begin, to: begin + span, follow: begin + span >= this.whole.to - span * 0.001 };
    this.use();
    this.wantDetail();
  }

  showWhole() {
    this.zoom = null;
    this.detail = null;
    this.use();
  }

  follow() {
    const view = this.view();
    const all = this.whole.to - this.whole.from;
    const span = this.zoom ? view.to - view.from : Math.min(Math.max(all / 6, 30), all);
    this.setView(this.whole.to - span, this.whole.to);
  }

  zoomBy(factor, around = null) {
    const view = this.view();
    const centre = around ?? (this.zoom?.follow ? view.to : (view.from + view.to) / 2);
    this.setView(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
  }

  shift(by, following = false) {
    const view = this.view();
    if (!this.zoom) return;
    this.setView(view.from + by, view.to + by);
    if (following && this.zoom) this.zoom.follow = true;
  }

  // ---- pointer

  position(event) {
    const box = this.upper.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  onWheel(event) {
    if (!this.canvas.dpr) return;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // The wheel scrolls the page until the timeline has the focus: otherwise a user could not scroll past it.
    if (!event.ctrlKey && !event.metaKey && !sideways && document.activeElement !== this.plot) return;
    if (sideways && !this.zoom) return;
    event.preventDefault();
    const view = this.view();
    if (sideways) this.shift((event.deltaX / this.canvas.plot) * (view.to - view.from));
    else
      this.zoomBy(
        Math.exp(Math.max(Math.min(event.deltaY, 120), -120) * 0.004),
        this.canvas.time(this.position(event).x, view),
      );
  }

  onMove(event) {
    if (!this.canvas.dpr) return;
    const { x, y } = this.position(event);
    const view = this.view();
    if (this.pointers.has(event.pointerId)) this.pointers.set(event.pointerId, x);
    if (this.pointers.size === 2 && this.pinch) return this.onPinch();
    const { drag } = this;
    if (drag) {
      if (Math.abs(x - drag.x) > 4) drag.moved = true;
      if (drag.pan && drag.moved && this.zoom) {
        const span = drag.view.to - drag.view.from;
        const by = ((drag.x - x) / this.canvas.plot) * span;
        return this.setView(drag.view.from + by, drag.view.from + by + span);
      }
    }
    const at = Math.min(Math.max(this.canvas.time(x, view), view.from), view.to);
    this.point({ at, row: this.canvas.rowAt(y), y, select: drag && !drag.pan && drag.moved ? [drag.at, at] : null });
  }

  onDown(event) {
    if (!this.canvas.dpr || event.button > 1) return;
    const { x } = this.position(event);
    this.plot.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, x);
    const touch = event.pointerType !== "mouse";
    this.drag = {
      x,
      at: this.canvas.time(x, this.view()),
      view: { ...this.view() },
      pan: touch || event.shiftKey || event.button === 1,
      moved: false,
    };
    if (this.pointers.size === 2) this.pinch = { view: { ...this.view() }, xs: [...this.pointers.values()] };
  }

  onPinch() {
    const [a, b] = [...this.pointers.values()];
    const { view, xs } = this.pinch;
    const factor = Math.abs(xs[0] - xs[1]) / Math.max(Math.abs(a - b), 8);
    const centre = this.canvas.time((xs[0] + xs[1]) / 2, view);
    this.setView(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
  }

  onUp(event) {
    const { drag } = this;
    const { x, y } = this.position(event);
    const row = this.canvas.rowAt(y);
    const view = this.view();
    this.letGo();
    if (!drag || !this.canvas.dpr) return;
    if (drag.moved && !drag.pan) {
      const [a, b] = [drag.at, this.canvas.time(x, view)].sort((p, q) => p - q);
      if (Math.abs(x - drag.x) > 6) this.setView(a, b);
    } else if (!drag.moved && event.pointerType === "mouse" && event.button === 0 && row !== null) this.openStory(row);
    else if (!drag.moved) this.point({ at: this.canvas.time(x, view), row, y });
  }

  letGo() {
    this.drag = this.pinch = null;
    this.pointers.clear();
    if (this.cursor) this.cursor.select = null;
  }

  openStory(row) {
    this.onStory(row === null || row < 0 ? {} : { learner: this.canvas.learners[row] });
  }

  point(cursor) {
    this.cursor = cursor;
    this.redrawOver();
  }

  // ---- keys

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const view = this.view();
    const span = view.to - view.from;
    const acts = {
      ArrowLeft: () => this.shift(-span * 0.2),
      ArrowRight: () => this.shift(span * 0.2),
      ArrowUp: () => this.moveRow(-1),
      ArrowDown: () => this.moveRow(1),
      "+": () => this.zoomBy(0.5, this.cursor?.at),
      "=": () => this.zoomBy(0.5, this.cursor?.at),
      "-": () => this.zoomBy(2, this.cursor?.at),
      0: () => this.showWhole(),
      f: () => this.follow(),
      n: () => this.moveMark(1),
      p: () => this.moveMark(-1),
      t: () => this.cursor && this.onTravel(this.cursor.at),
      Enter: () => this.openStory(this.cursor?.row ?? null),
      Escape: () => this.point(null),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  moveRow(by) {
    const row = Math.min(Math.max((this.cursor?.row ?? -2) + by, -1), this.canvas.rows.length - 1);
    const at = this.cursor?.at ?? Math.min(this.travel ?? this.whole.to, this.view().to) - 1e-6;
    this.point({ at, row, y: this.canvas.y(row) });
    announce(this.describeCursor(this.cursor).join(". "));
  }

  moveMark(by) {
    const { marks } = this.canvas;
    if (!marks.length) return;
    let index;
    if (this.mark !== undefined && marks[this.mark]?.at === this.cursor?.at) index = this.mark + by;
    else {
      const at = this.cursor?.at ?? this.view().from;
      index = by > 0 ? marks.findIndex((mark) => mark.at > at) : marks.findLastIndex((mark) => mark.at < at);
    }
    if (index < 0 || index >= marks.length) return;
    this.mark = index;
    const mark = marks[index];
    const view = this.view();
    if (this.zoom && (mark.at < view.from || mark.at > view.to))
      this.setView(mark.at - (view.to - view.from) / 2, mark.at + (view.to - view.from) / 2);
    this.point({ at: mark.at, row: mark.row === -2 ? null : mark.row, y: this.canvas.markY(mark) });
    announce(this.describeCursor(this.cursor).join(". "));
  }

  // ---- content under the cursor

  describeCursor(cursor) {
    const { band, marks, round } = this.canvas.at(cursor.at, cursor.row, this.view());
    const learner = this.canvas.learners[cursor.row];
    const subject = cursor.row === -1 ? "syncer" : learner === undefined ? null : `learner ${learner}`;
    const wall = wallTime(cursor.at, this.wall0, { day: this.whole.to > 43200 });
    const found = [`${wall ? `${wall}, ` : ""}${runTime(cursor.at, true)} into the run`];
    if (subject && band) found.push(`${subject}: ${bandLabel(band[2])} for ${duration(band[1] - band[0])}`);
    else if (subject) found.push(`${subject}: no data`);
    for (const mark of marks)
      found.push(
        `${GLYPHS[MARKS[mark.kind]?.shape] ?? "◆"} ${mark.subject} ${MARKS[mark.kind]?.word ?? mark.kind}: ${mark.text ?? ""}`,
      );
    if (round?.count > 1)
      found.push(
        `${compact(round.count)} rounds: on average ${plain(round.contributions, 2)} of ${plain(round.pulled, 2)} pulled learners contributed`,
      );
    else if (round)
      found.push(
        `round of fragment ${round.fragment}: ${round.contributions} of ${round.pulled} pulled, ${round.alive} alive`,
      );
    return found;
  }

  fillTip() {
    const { cursor, tip } = this;
    show(tip, Boolean(cursor) && !cursor?.select);
    if (!cursor || cursor.select) return;
    const lines = this.describeCursor(cursor);
    keyed(
      tip,
      lines.map((text, index) => ({ text, index })),
      (line) => line.index,
      () => h("div"),
      (node, line) => put(node, line.text),
    );
    const x = this.canvas.x(cursor.at, this.view());
    const right = x > this.canvas.width / 2;
    const y = Math.min(Math.max((cursor.y ?? 20) + 14, 4), this.canvas.height - 30);
    tip.style.transform = `translate(${Math.round(x + (right ? -12 : 12))}px, ${Math.round(y)}px) ${right ? "translateX(-100%)" : ""}`;
  }
}
