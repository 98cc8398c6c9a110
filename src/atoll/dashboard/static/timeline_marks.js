// Shapes and patterns of the timeline canvas: states and marks are distinguishable without color.

import { colour } from "./dom.js";
import { MARKS, STATES } from "./states.js";

const TILE = 8;

/** Functions that draw the pattern of a state on a tile that already has its color. */
const COVER = {
  alone: (c) =>
    lines(
      c,
      [
        [0, 8, 8, 0],
        [-2, 2, 2, -2],
        [6, 10, 10, 6],
      ],
      "rgba(255,255,255,.6)",
      1.6,
    ),
  suspected: (c) =>
    dots(
      c,
      [
        [2, 2],
        [6, 6],
      ],
      "rgba(0,0,0,.65)",
    ),
  recovering: (c) =>
    lines(
      c,
      [
        [0, 0, 8, 8],
        [-2, 6, 2, 10],
        [6, -2, 10, 2],
      ],
      "rgba(255,255,255,.6)",
      1.6,
    ),
  paused: (c) =>
    lines(
      c,
      [
        [2, 0, 2, 8],
        [6, 0, 6, 8],
      ],
      "rgba(255,255,255,.65)",
      1.4,
    ),
  gone: (c) =>
    lines(
      c,
      [
        [0, 8, 8, 0],
        [0, 0, 8, 8],
      ],
      "rgba(0,0,0,.4)",
      1.1,
    ),
  down: (c) =>
    lines(
      c,
      [
        [0, 8, 8, 0],
        [0, 0, 8, 8],
      ],
      "rgba(0,0,0,.4)",
      1.1,
    ),
  left: (c) =>
    lines(
      c,
      [
        [0, 2, 8, 2],
        [0, 6, 8, 6],
      ],
      "rgba(128,140,150,.55)",
      1.2,
    ),
  quarantined: (c) =>
    lines(
      c,
      [
        [0, 4, 8, 4],
        [4, 0, 4, 8],
      ],
      "rgba(255,255,255,.55)",
      1.2,
    ),
};

function lines(c, some, stroke, width) {
  c.strokeStyle = stroke;
  c.lineWidth = width;
  c.beginPath();
  for (const [x0, y0, x1, y1] of some) {
    c.moveTo(x0, y0);
    c.lineTo(x1, y1);
  }
  c.stroke();
}

function dots(c, some, fill) {
  c.fillStyle = fill;
  for (const [x, y] of some) {
    c.beginPath();
    c.arc(x, y, 1.15, 0, 7);
    c.fill();
  }
}

/** Create the fill styles and colors of one theme, once for all frames. */
export function makeInk(dpr) {
  const ink = { fill: {}, tone: {} };
  const scratch = document.createElement("canvas").getContext("2d");
  for (const state of [...Object.keys(STATES), "up", "down", "unknown"]) {
    const base = colour(state === "down" ? "s-gone" : `s-${state}`);
    if (!COVER[state]) {
      ink.fill[state] = base;
      continue;
    }
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.round(TILE * dpr);
    const c = tile.getContext("2d");
    c.scale(tile.width / TILE, tile.height / TILE);
    c.fillStyle = base;
    c.fillRect(0, 0, TILE, TILE);
    COVER[state](c);
    const pattern = scratch.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(TILE / tile.width));
    ink.fill[state] = pattern;
  }
  for (const tone of ["good", "warn", "bad"]) ink.tone[tone] = colour(tone);
  ink.tone.calm = colour("accent");
  for (const name of ["ink", "soft", "line", "strong-line", "card", "well", "accent", "dim"]) ink[name] = colour(name);
  return ink;
}

const SHAPES = {
  cross: (c, x, y, r) =>
    segments(c, [
      [x - r, y - r, x + r, y + r],
      [x - r, y + r, x + r, y - r],
    ]),
  slash: (c, x, y, r) =>
    segments(c, [
      [x - r, y + r, x, y - r],
      [x, y + r, x + r, y - r],
    ]),
  triangle: (c, x, y, r) =>
    polygon(c, [
      [x, y - r],
      [x + r, y + r],
      [x - r, y + r],
    ]),
  diamond: (c, x, y, r) =>
    polygon(c, [
      [x, y - r],
      [x + r, y],
      [x, y + r],
      [x - r, y],
    ]),
  square: (c, x, y, r) =>
    polygon(c, [
      [x - r, y - r],
      [x + r, y - r],
      [x + r, y + r],
      [x - r, y + r],
    ]),
  dot: (c, x, y, r) => circle(c, x, y, r * 0.62),
  ring: (c, x, y, r) => circle(c, x, y, r * 0.9),
  exclamation: (c, x, y, r) =>
    segments(c, [
      [x, y - r, x, y + r * 0.2],
      [x, y + r * 0.8, x, y + r],
    ]),
  question: (c, x, y, r) => {
    c.moveTo(x - r * 0.6, y - r * 0.4);
    c.arc(x, y - r * 0.4, r * 0.6, Math.PI, Math.PI * 2.5);
    segments(c, [
      [x, y + r * 0.2, x, y + r * 0.4],
      [x, y + r * 0.9, x, y + r],
    ]);
  },
};
const FILLED = new Set(["triangle", "diamond", "square", "dot"]);

function segments(c, some) {
  for (const [x0, y0, x1, y1] of some) {
    c.moveTo(x0, y0);
    c.lineTo(x1, y1);
  }
}

function polygon(c, [first, ...others]) {
  c.moveTo(...first);
  for (const point of others) c.lineTo(...point);
  c.closePath();
}

function circle(c, x, y, r) {
  c.moveTo(x + r, y);
  c.arc(x, y, r, 0, 7);
}

/** Draw all marks of one kind in one path. `points` is a flat list of x, y. A halo keeps them readable on any band. */
export function drawMarks(c, ink, kind, points, r) {
  const mark = MARKS[kind] ?? { tone: "calm", shape: "diamond" };
  const path = SHAPES[mark.shape];
  c.lineCap = "round";
  c.lineJoin = "round";
  c.beginPath();
  for (let i = 0; i < points.length; i += 2) path(c, points[i], points[i + 1], r);
  c.strokeStyle = ink.card;
  c.lineWidth = FILLED.has(mark.shape) ? 3 : 5;
  c.stroke();
  c.strokeStyle = c.fillStyle = ink.tone[mark.tone];
  c.lineWidth = 2;
  if (FILLED.has(mark.shape)) c.fill();
  else c.stroke();
}

export const STEPS = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
  604800, 1209600,
];

/** Return round times from `from` to `to`, about one every `pixels`. `offset` is midnight on the run's clock. */
export function ticks(from, to, width, pixels, offset = 0) {
  const minStep = ((to - from) * pixels) / Math.max(width, 1);
  const step = STEPS.find((some) => some >= minStep) ?? STEPS.at(-1);
  const found = [];
  for (let at = Math.ceil((from + offset) / step) * step - offset; at <= to && found.length < 200; at += step)
    found.push(at);
  return { step, found };
}
