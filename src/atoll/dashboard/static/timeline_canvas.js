// Drawing of the timeline and lookup of what is at a point. Independent of the DOM around it.
//
// Two canvases overlap. The lower one has bands, rounds and marks. It is redrawn when data or the view change. The
// upper one has the cursor, so that a hover redraws one line and not 64 bands. Bands and rounds are rectangles on whole
// pixels: without a GPU, filling a path of a thousand rectangles takes ten times as long.

import { runTime, wallTime } from "./format.js";
import { WORST_FIRST } from "./states.js";
import { drawMarks, makeInk, ticks } from "./timeline_marks.js";

const EVENTS = 18;
const ROUNDS = 46;
const AXIS = 24;
const GAP = 8;
const ORDER = ["unknown", ...WORST_FIRST.toReversed()]; // the most severe states are drawn last, on top

export class TimelineCanvas {
  constructor(lower, upper) {
    this.lower = lower;
    this.upper = upper;
    this.c = lower.getContext("2d");
    this.o = upper.getContext("2d");
    this.draws = 0;
    this.setData({ from: 0, to: 1, islands: [], syncer: [], marks: [], rounds: [] });
  }

  retheme() {
    this.ink = null;
  }

  setData(data) {
    this.data = data;
    this.rows = data.islands.map((island) => island.bands);
    this.learners = data.islands.map((island) => island.learner);
    this.rowOf = new Map(this.learners.map((learner, row) => [learner, row]));
    this.groups = new Map(ORDER.map((state) => [state, []]));
    this.rows.forEach((bands, row) => {
      for (const [a, b, state] of bands) (this.groups.get(state) ?? this.groups.get("unknown")).push(row, a, b);
    });
    this.maxCount = data.rounds.reduce(
      (max, round) => Math.max(max, round.pulled ?? 0, round.alive ?? 0, round.contributions),
      1,
    );
    this.marks = data.marks.map((mark) => ({ ...mark, row: this.rowOfMark(mark.subject) })).sort((a, b) => a.at - b.at);
  }

  /** Return the row of a mark: -2 is the lane of events at the top, -1 the syncer, and from 0 the islands. */
  rowOfMark(subject) {
    const learner = /^learner (\d+)$/.exec(subject ?? "");
    if (learner) return this.rowOf.get(Number(learner[1])) ?? -2;
    return subject === "syncer" ? -1 : -2;
  }

  /** Compute the sizes for a width. Return whether they changed. */
  layout(width, dpr) {
    const count = Math.max(this.rows.length, 1);
    const rowHeight = count <= 6 ? 28 : count <= 16 ? 21 : count <= 32 ? 15 : 12;
    const gutter = width < 560 ? 46 : 82;
    const height = EVENTS + rowHeight * (count + 1) + GAP * 2 + ROUNDS + AXIS;
    const key = [width, height, dpr, gutter, count].join();
    if (key === this.key) return false;
    this.key = key;
    Object.assign(this, { width, height, dpr, gutter, rowHeight, plot: Math.max(width - gutter - 10, 10) });
    this.bandsTop = EVENTS;
    this.roundsTop = EVENTS + rowHeight * (count + 1) + GAP * 2;
    for (const canvas of [this.lower, this.upper]) {
      canvas.width = Math.round(width * dpr);
      canvas.height = Math.round(height * dpr);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.ink = null;
    return true;
  }

  x(at, view) {
    return this.gutter + ((at - view.from) / Math.max(view.to - view.from, 1e-9)) * this.plot;
  }

  time(x, view) {
    return view.from + ((x - this.gutter) / this.plot) * (view.to - view.from);
  }

  /** Return the top of a row. Row -1 is the syncer, with a gap below it. */
  y(row) {
    return this.bandsTop + (row + 1) * this.rowHeight + (row >= 0 ? GAP : 0);
  }

  draw(view, { at = null, wall0 = null, end = null } = {}) {
    this.draws += 1;
    this.ink ??= makeInk(this.dpr);
    const { c } = this;
    c.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    this.drawAxis(view, wall0);
    c.save();
    c.beginPath();
    c.rect(this.gutter - 6, 0, this.plot + 12, this.height - AXIS); // do not clip marks at the ends
    c.clip();
    this.drawBands(view);
    this.drawRounds(view);
    this.drawMarks(view);
    if (at !== null) this.drawTravel(view, at);
    else if (end !== null && end < view.to) this.edge(this.x(end, view));
    c.restore();
    this.drawLabels();
  }

  drawBands(view) {
    const { c } = this;
    const inset = this.rowHeight > 16 ? 3 : this.rowHeight > 12 ? 2 : 1;
    const high = this.rowHeight - inset * 2;
    const right = this.gutter + this.plot;
    const band = (row, a, b, last) => {
      if (b < view.from || a > view.to) return last;
      // A band shorter than a pixel is drawn as one pixel, but not twice in the same pixel.
      let x0 = Math.max(Math.round(this.x(a, view)), this.gutter);
      const x1 = Math.max(Math.min(Math.round(this.x(b, view)), right), x0 + 1);
      if (x0 < last) x0 = last;
      if (x1 > x0) c.fillRect(x0, this.y(row) + inset, x1 - x0, high);
      return Math.max(x1, last);
    };
    c.fillStyle = this.ink.fill.up;
    for (const [a, b, state] of this.data.syncer) if (state !== "down") band(-1, a, b, -1);
    for (const [state, flat] of this.groups) {
      if (!flat.length) continue;
      c.fillStyle = this.ink.fill[state];
      let row = -9;
      let last = -1;
      for (let i = 0; i < flat.length; i += 3) {
        if (flat[i] !== row) last = -1;
        row = flat[i];
        last = band(row, flat[i + 1], flat[i + 2], last);
      }
    }
    c.fillStyle = this.ink.fill.down;
    for (const [a, b, state] of this.data.syncer) if (state === "down") band(-1, a, b, -1);
  }

  drawRounds(view) {
    const { c } = this;
    const { rounds } = this.data;
    const base = this.roundsTop + ROUNDS;
    const per = (ROUNDS - 4) / this.maxCount;
    const seen = rounds.filter((round) => round.at >= view.from && round.at <= view.to);
    const wide = Math.round(Math.max(Math.min((this.plot / Math.max(seen.length, 1)) * 0.6, 5), 1));
    for (const [key, style] of [
      ["pulled", this.ink.line],
      ["contributions", this.ink.accent],
    ]) {
      c.fillStyle = style;
      for (const round of seen) {
        const high = Math.max(Math.round((round[key] ?? 0) * per), 1);
        c.fillRect(Math.round(this.x(round.at, view) - wide / 2), base - high, wide, high);
      }
    }
    c.fillStyle = this.ink["strong-line"];
    c.fillRect(this.gutter, base, this.plot, 1);
  }

  drawMarks(view) {
    const r = Math.max(Math.min(this.rowHeight / 4, 5.5), 3.2);
    const places = new Map();
    const lastAt = new Map();
    for (const mark of this.marks) {
      if (mark.at < view.from || mark.at > view.to) continue;
      const x = this.x(mark.at, view);
      const key = `${mark.kind} ${mark.row}`;
      if (x - (lastAt.get(key) ?? -99) < 3) continue; // overlapping marks are indistinguishable
      lastAt.set(key, x);
      if (!places.has(mark.kind)) places.set(mark.kind, []);
      places.get(mark.kind).push(x, this.markY(mark));
    }
    for (const [kind, flat] of places) drawMarks(this.c, this.ink, kind, flat, r);
  }

  markY(mark) {
    return mark.row === -2 ? EVENTS / 2 + 1 : this.y(mark.row) + this.rowHeight / 2;
  }

  drawTravel(view, at) {
    const x = this.x(at, view);
    this.c.fillStyle = this.ink.dim;
    if (x < this.gutter + this.plot) this.c.fillRect(Math.max(x, this.gutter), 0, this.plot, this.height);
    this.c.fillStyle = this.ink.tone.warn;
    this.c.fillRect(Math.round(x) - 1, 0, 2, this.height);
  }

  edge(x) {
    this.c.fillStyle = this.ink["strong-line"];
    this.c.fillRect(Math.round(x), EVENTS, 1, this.roundsTop + ROUNDS - EVENTS);
  }

  drawAxis(view, wall0) {
    const { c } = this;
    const offset = wall0 === null ? 0 : wall0 - new Date(wall0 * 1000).getTimezoneOffset() * 60;
    const { step, found } = ticks(view.from, view.to, this.plot, 92, offset);
    const base = this.roundsTop + ROUNDS;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "top";
    c.textAlign = "center";
    let last = this.gutter - 40;
    for (const at of found) {
      const x = Math.round(this.x(at, view));
      c.fillStyle = this.ink.line;
      c.fillRect(x, EVENTS, 1, base - EVENTS + 4);
      const day = step >= 43200;
      const text = wall0 === null ? runTime(at, step < 1) : wallTime(at, wall0, { day, seconds: step < 60 });
      const half = c.measureText(text).width / 2;
      if (x - half < last + 8 || x + half > this.width) continue;
      c.fillStyle = this.ink.soft;
      c.fillText(text, x, base + 8);
      last = x + half;
    }
  }

  drawLabels() {
    const { c } = this;
    const wide = this.gutter > 60;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.font = `${this.rowHeight > 13 ? 11 : 9}px system-ui, sans-serif`;
    c.fillStyle = this.ink.soft;
    const x = this.gutter - 8;
    c.fillText("syncer", x, this.y(-1) + this.rowHeight / 2);
    this.learners.forEach((learner, row) =>
      c.fillText(wide ? `learner ${learner}` : String(learner), x, this.y(row) + this.rowHeight / 2 + 0.5),
    );
    c.font = "11px system-ui, sans-serif";
    c.fillText("rounds", x, this.roundsTop + ROUNDS / 2);
    c.font = "9px system-ui, sans-serif";
    c.fillText(String(Math.round(this.maxCount)), x, this.roundsTop + 6);
    c.fillText("0", x, this.roundsTop + ROUNDS - 3);
  }

  /** Draw the upper canvas: the cursor, the selected row and the selection in progress. */
  drawOver(view, cursor) {
    const { o } = this;
    this.ink ??= makeInk(this.dpr);
    o.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    o.clearRect(0, 0, this.width, this.height);
    if (!cursor) return;
    if (cursor.select) {
      const [a, b] = cursor.select.map((at) => this.x(at, view)).sort((p, q) => p - q);
      o.globalAlpha = 0.22;
      o.fillStyle = this.ink.accent;
      o.fillRect(a, 0, b - a, this.height - AXIS);
      o.globalAlpha = 1;
    }
    const x = Math.round(this.x(cursor.at, view));
    if (x < this.gutter || x > this.gutter + this.plot) return;
    o.fillStyle = this.ink.ink;
    o.fillRect(x, 0, 1, this.roundsTop + ROUNDS);
    if (cursor.row !== null && cursor.row >= -1) {
      o.strokeStyle = this.ink.ink;
      o.lineWidth = 1.25;
      o.strokeRect(this.gutter + 0.5, this.y(cursor.row) + 0.5, this.plot - 1, this.rowHeight - 1);
    }
  }

  rowAt(y) {
    if (y >= this.bandsTop && y < this.bandsTop + this.rowHeight) return -1;
    const row = Math.floor((y - this.bandsTop - this.rowHeight - GAP) / this.rowHeight);
    return row >= 0 && row < this.rows.length ? row : null;
  }

  /** Return what is at a time in a row: its band, the marks within some pixels, the nearest round. */
  at(at, row, view) {
    const near = ((view.to - view.from) / this.plot) * 6;
    const bands = row === -1 ? this.data.syncer : row === null ? [] : (this.rows[row] ?? []);
    const band = bands.find(([a, b]) => at >= a && at < b) ?? null;
    const marks = this.marks.filter(
      (mark) => Math.abs(mark.at - at) <= near && (row === null || mark.row === row || mark.row === -2),
    );
    let round = null;
    for (const some of this.data.rounds)
      if (round === null || Math.abs(some.at - at) < Math.abs(round.at - at)) round = some;
    return { band, marks: marks.slice(0, 5), round: round && Math.abs(round.at - at) <= near * 2 ? round : null };
  }
}
