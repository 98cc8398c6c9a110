// Now: one row of headline figures, and a card for each island.

import { attr, h, keyed, put, show } from "./dom.js";
import { compact, duration, plain, plural, rate, share, times, UNKNOWN, whole } from "./format.js";
import { SPLIT, STATES, stateOf, WORST_FIRST } from "./states.js";

const DENSE_FROM = 13; // islands: with more of them cards become tiles; a click shows the rest

/** [id, label, what it means, figure, small print], in the order in which an operator asks. */
const FIGURES = [
  ["loss", "Loss", "of the islands that train, in nats", (f) => plain(f.loss, 4), () => ""],
  [
    "tokens",
    "Tokens/s",
    "trained by all islands together",
    (f) => compact(f.tokens_per_s),
    (f) => `${compact(f.tokens)} in all`,
  ],
  [
    "goodput",
    "Goodput",
    "share of the islands' time that was spent in steps",
    (f) => share(f.goodput),
    (f) => (f.derived ? "of all time, derived" : "of all time"),
  ],
  [
    "uptime",
    "Uptime",
    "share of the time in which some island was in steps",
    (f) => share(f.uptime),
    (f) => (f.derived ? "of the run, derived" : "of the run"),
  ],
  [
    "counts",
    "Islands",
    "alive now; pulled and merged in recent rounds, on average",
    null,
    (f) => `of ${whole(f.learners)}`,
  ],
  ["bytes", "Traffic", "bytes per second from islands and to them", null, () => "all islands"],
  [
    "h",
    "Effective H",
    "steps between two merges of a fragment",
    (f) => plain(f.effective_h),
    (f) => `${whole(f.merges)} merges`,
  ],
  [
    "remaining",
    "To the end",
    "time until the budget is used up, at this speed",
    (f) => duration(f.remaining_s),
    (f, p) => `${share(p.progress)} done`,
  ],
];

export class Now {
  constructor(host, { onStory }) {
    this.onStory = onStory;
    this.filter = null;
    this.tiles = new Map();
    const row = h("dl", { class: "figures" });
    for (const [id, label, meaning, figure] of FIGURES) row.append(this.tile(id, label, meaning, figure));
    this.sub = h("p", { class: "soft under" });
    this.filters = h("div", { class: "filters", role: "group", "aria-label": "Show islands by state" });
    this.cards = h("ul", { class: "cards" });
    this.key = h(
      "p",
      { class: "soft key", hidden: true },
      "Each tile: step, speed against the median, loss; below them the goodput. A click shows the rest.",
    );
    this.none = h("p", { class: "soft empty", hidden: true });
    host.append(row, h("div", { class: "between" }, this.filters, this.sub), this.cards, this.key, this.none);
  }

  tile(id, label, meaning, figure) {
    const tile = { value: h("b"), small: h("small") };
    if (id === "counts") {
      tile.parts = ["alive", "pulled", "merged"].map((name) => ({ name, value: h("b"), label: h("i", {}, name) }));
      tile.value = h("span", { class: "three" }, ...tile.parts.map((p) => h("span", {}, p.value, p.label)));
    } else if (id === "bytes") {
      tile.parts = ["up", "down"].map((name) => ({ name, value: h("b"), label: h("i", {}, name) }));
      tile.value = h("span", { class: "three two" }, ...tile.parts.map((p) => h("span", {}, p.value, p.label)));
    } else if (id === "remaining") tile.bar = h("span", { class: "thin" }, h("i"));
    this.tiles.set(id, tile);
    return h(
      "div",
      { class: "figure", "data-figure": id, title: `${label}: ${meaning}` },
      h("dt", {}, label),
      h("dd", {}, tile.value, tile.bar, tile.small),
    );
  }

  render(picture) {
    this.renderFigures(picture);
    this.renderFilters(picture.islands);
    const dense = picture.islands.length >= DENSE_FROM;
    this.cards.classList.toggle("dense", dense);
    show(this.key, dense);
    keyed(
      this.cards,
      picture.islands,
      (island) => island.learner,
      (island) => card(island.learner, this.onStory),
      (entry, island) => {
        fillCard(entry, island, picture.at);
        show(entry.node, !this.filter || island.state === this.filter);
      },
    );
    show(this.none, !picture.islands.some((island) => !this.filter || island.state === this.filter));
    put(this.none, picture.islands.length ? `No island is ${this.filter} now.` : "No island has said hello yet.");
  }

  renderFigures(picture) {
    const figures = picture.headline ?? {};
    for (const [id, , , figure, small] of FIGURES) {
      const tile = this.tiles.get(id);
      put(tile.small, small(figures, picture));
      if (figure) put(tile.value, figure(figures));
    }
    const counts = this.tiles.get("counts").parts;
    const low = picture.live && typeof figures.alive === "number" && figures.alive < figures.learners;
    put(counts[0].value, whole(figures.alive));
    attr(counts[0].value, "data-tone", low ? "warn" : null);
    put(counts[1].value, plain(figures.pulled, 2));
    put(counts[2].value, plain(figures.merged, 2));
    const [up, down] = this.tiles.get("bytes").parts;
    put(up.value, rate(figures.bytes_up_per_s));
    put(down.value, rate(figures.bytes_down_per_s));
    this.tiles.get("remaining").bar.firstChild.style.width = `${Math.min(picture.progress ?? 0, 1) * 100}%`;
    const syncer = picture.syncer ?? {};
    const words = [
      `syncer ${syncer.state ?? "unknown"}${syncer.since !== undefined ? ` for ${duration(picture.at - syncer.since)}` : ""}`,
      `epoch ${syncer.epoch ?? UNKNOWN}`,
      `${plural(figures.rounds_in_flight, "round")} in flight`,
      `quorum ${whole(figures.quorum)}`,
      `grace margin ${plain(figures.grace_margin)}`,
    ];
    put(this.sub, words.join("  ·  "));
    attr(this.sub, "data-tone", syncer.state === "down" ? "bad" : null);
  }

  renderFilters(islands) {
    const counts = new Map();
    for (const island of islands) counts.set(island.state, (counts.get(island.state) ?? 0) + 1);
    if (this.filter && !counts.has(this.filter)) counts.set(this.filter, 0); // a filter stays when its islands change
    const found = [...counts].sort((a, b) => WORST_FIRST.indexOf(a[0]) - WORST_FIRST.indexOf(b[0]));
    keyed(
      this.filters,
      found,
      ([state]) => state,
      ([state]) => this.filterButton(state),
      (entry, [state, count]) => {
        put(entry.count, count);
        attr(entry.node, "aria-pressed", String(this.filter === state));
      },
    );
  }

  filterButton(state) {
    const { letter, word, note } = stateOf(state);
    const count = h("b");
    const click = () => {
      this.filter = this.filter === state ? null : state;
      this.onFilter?.();
    };
    const node = h(
      "button",
      { type: "button", class: "filter", title: note, on: { click } },
      h("span", { class: "swatch letter", "data-state": state, "aria-hidden": "true" }, letter),
      `${word} `,
      count,
    );
    return { node, count };
  }
}

/** A card whose parts are kept, so that an update touches only what changed. */
export function card(learner, onStory) {
  const entry = { values: {}, segments: {} };
  const field = (id, label) => {
    entry.values[id] = h("dd");
    return h("div", {}, h("dt", {}, label), entry.values[id]);
  };
  entry.letter = h("span", { class: "swatch letter", "aria-hidden": "true" });
  entry.name = h(
    "button",
    { type: "button", class: "cover", "aria-label": `learner ${learner}`, on: { click: () => onStory({ learner }) } },
    h("span", { class: "long" }, "learner "),
    String(learner),
  );
  entry.word = h("span");
  entry.since = h("span", { class: "long" });
  entry.state = h("span", { class: "state" }, entry.word, entry.since);
  entry.bar = h("div", { class: "split", role: "img" });
  for (const part of Object.keys(SPLIT))
    entry.bar.append((entry.segments[part] = h("i", { class: "swatch", "data-state": part })));
  entry.share = h("span");
  entry.derived = h("span", { class: "long soft" });
  entry.goodput = h("span", { class: "goodput" }, entry.share, entry.derived);
  entry.reason = h("p", { class: "reason", hidden: true });
  entry.words = h("pre", {
    class: "words",
    tabindex: "0",
    hidden: true,
    "aria-label": `last words of learner ${learner}`,
  });
  entry.node = h(
    "li",
    { class: "card" },
    h("h3", {}, entry.letter, entry.name, entry.state),
    h(
      "dl",
      {},
      field("step", "step"),
      field("speed", "speed"),
      field("loss", "loss"),
      field("link", "link"),
      field("stale", "stale"),
      field("weight", "weight"),
    ),
    h("div", { class: "splitrow" }, entry.bar, entry.goodput),
    entry.reason,
    entry.words,
  );
  return entry;
}

export function fillCard(entry, island, at) {
  const { letter, word, tone, note } = stateOf(island.state);
  attr(entry.node, "data-island", island.state);
  attr(entry.node, "data-tone", tone);
  attr(entry.letter, "data-state", island.state);
  put(entry.letter, letter);
  put(entry.word, word);
  put(entry.since, ` ${duration(at - island.since)}`);
  attr(entry.state, "title", `${note}; for ${duration(at - island.since)}; incarnation ${island.incarnation}`);
  const v = entry.values;
  put(v.step, whole(island.step));
  put(v.speed, times(island.speed));
  attr(v.speed, "data-tone", island.speed !== null && island.speed < 0.75 ? "warn" : null);
  attr(
    v.speed,
    "title",
    `against the median of all; ${compact(island.tokens_per_s)} tokens/s, ${duration(island.step_s)} a step`,
  );
  put(v.loss, plain(island.loss, 3));
  put(v.link, island.link ?? UNKNOWN);
  attr(
    v.link,
    "data-tone",
    island.link && island.link !== "up" && STATES[island.state]?.tone !== "calm" ? "warn" : null,
  );
  put(v.stale, duration(island.staleness_s));
  attr(v.stale, "title", "since the last merge that has a contribution of it");
  put(v.weight, share(island.weight));
  fillSplit(entry, island);
  const reason = island.reason === word ? "" : (island.reason ?? "");
  show(entry.reason, reason !== "");
  put(entry.reason, reason);
  show(entry.words, Boolean(island.log_tail));
  put(entry.words, island.log_tail ?? "");
}

function fillSplit(entry, island) {
  const split = island.time_split ?? {};
  const all = Object.values(split).reduce((sum, part) => sum + (part ?? 0), 0);
  const told = [];
  for (const [part, meaning] of Object.entries(SPLIT)) {
    const some = split[part] ?? 0;
    entry.segments[part].style.flexGrow = all ? some / all : 0;
    if (all && some / all >= 0.0005) told.push(`${meaning} ${share(some / all)}`);
  }
  put(entry.share, share(island.goodput));
  put(entry.derived, island.derived && told.length ? " derived" : "");
  const how = island.derived ? ", derived from what it told the syncer" : "";
  const text = told.length ? `Goodput ${share(island.goodput)}${how}: ${told.join(", ")}` : "Goodput is not known yet";
  attr(entry.bar, "aria-label", text);
  attr(entry.bar, "title", text);
}
