// Now: a row of headline metrics, and a card for each island.

import { attr, h, keyed, put, show } from "./dom.js";
import { compact, duration, plain, plural, rate, share, times, UNKNOWN, whole } from "./format.js";
import { SPLIT, STATES, stateOf, WORST_FIRST } from "./states.js";

const DENSE_FROM = 13; // number of islands from which cards become tiles

/** [id, label, meaning, value, details], in the order in which an operator needs them. */
const FIGURES = [
  ["loss", "Loss", "mean over the training islands, in nats", (f) => plain(f.loss, 4), () => ""],
  [
    "tokens",
    "Tokens/s",
    "sum over all islands",
    (f) => compact(f.tokens_per_s),
    (f) => `${compact(f.tokens)} in total`,
  ],
  [
    "goodput",
    "Goodput",
    "share of the islands' time spent in steps",
    (f) => share(f.goodput),
    (f) => (f.derived ? "of all time, derived" : "of all time"),
  ],
  [
    "uptime",
    "Uptime",
    "share of time in which at least one island trained",
    (f) => share(f.uptime),
    (f) => (f.derived ? "of the run, derived" : "of the run"),
  ],
  [
    "counts",
    "Islands",
    "alive now; mean of pulled and merged in recent rounds",
    null,
    (f) => `of ${whole(f.learners)}`,
  ],
  ["bytes", "Traffic", "bytes per second from and to the islands", null, () => "all islands"],
  [
    "h",
    "Effective H",
    "steps between two merges of a fragment",
    (f) => plain(f.effective_h),
    (f) => `${whole(f.merges)} merges`,
  ],
  [
    "remaining",
    "Remaining",
    "time until the token budget is used up, at the current throughput",
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
      "Each tile: step, speed relative to the median, loss; below: goodput. Click a tile for details.",
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

  render(status) {
    this.renderFigures(status);
    this.renderFilters(status.islands);
    const dense = status.islands.length >= DENSE_FROM;
    this.cards.classList.toggle("dense", dense);
    show(this.key, dense);
    keyed(
      this.cards,
      status.islands,
      (island) => island.learner,
      (island) => card(island.learner, this.onStory),
      (entry, island) => {
        fillCard(entry, island, status.at);
        show(entry.node, !this.filter || island.state === this.filter);
      },
    );
    show(this.none, !status.islands.some((island) => !this.filter || island.state === this.filter));
    const none = status.islands.length ? `No island is ${stateOf(this.filter).word} now.` : "No island has joined yet.";
    put(this.none, none);
  }

  renderFigures(status) {
    const figures = status.headline ?? {};
    for (const [id, , , figure, small] of FIGURES) {
      const tile = this.tiles.get(id);
      put(tile.small, small(figures, status));
      if (figure) put(tile.value, figure(figures));
    }
    const counts = this.tiles.get("counts").parts;
    const low = status.live && typeof figures.alive === "number" && figures.alive < figures.learners;
    put(counts[0].value, whole(figures.alive));
    attr(counts[0].value, "data-tone", low ? "warn" : null);
    put(counts[1].value, plain(figures.pulled, 2));
    put(counts[2].value, plain(figures.merged, 2));
    const [up, down] = this.tiles.get("bytes").parts;
    put(up.value, rate(figures.bytes_up_per_s));
    put(down.value, rate(figures.bytes_down_per_s));
    this.tiles.get("remaining").bar.firstChild.style.width = `${Math.min(status.progress ?? 0, 1) * 100}%`;
    const syncer = status.syncer ?? {};
    const parts = [
      `syncer ${syncer.state ?? "unknown"}${syncer.since !== undefined ? ` for ${duration(status.at - syncer.since)}` : ""}`,
      `epoch ${syncer.epoch ?? UNKNOWN}`,
      `${plural(figures.rounds_in_flight, "round")} in flight`,
      `quorum ${whole(figures.quorum)}`,
      `grace margin ${plain(figures.grace_margin)}`,
    ];
    put(this.sub, parts.join("  ·  "));
    attr(this.sub, "data-tone", syncer.state === "down" ? "bad" : null);
  }

  renderFilters(islands) {
    const counts = new Map();
    for (const island of islands) counts.set(island.state, (counts.get(island.state) ?? 0) + 1);
    if (this.filter && !counts.has(this.filter)) counts.set(this.filter, 0); // keep an active filter
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

/** Create a card. Its nodes are stored, so that an update changes only what differs. */
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
    "aria-label": `end of the log of learner ${learner}`,
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
    `relative to the median of all islands; ${compact(island.tokens_per_s)} tokens/s, ${duration(island.step_s)} a step`,
  );
  put(v.loss, plain(island.loss, 3));
  put(v.link, island.link ?? UNKNOWN);
  attr(
    v.link,
    "data-tone",
    island.link && island.link !== "up" && STATES[island.state]?.tone !== "calm" ? "warn" : null,
  );
  put(v.stale, duration(island.staleness_s));
  attr(v.stale, "title", "time since the last merge with a contribution of this learner");
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
  const parts = [];
  for (const [part, meaning] of Object.entries(SPLIT)) {
    const some = split[part] ?? 0;
    entry.segments[part].style.flexGrow = all ? some / all : 0;
    if (all && some / all >= 0.0005) parts.push(`${meaning} ${share(some / all)}`);
  }
  put(entry.share, share(island.goodput));
  put(entry.derived, island.derived && parts.length ? " derived" : "");
  const source = island.derived ? ", derived from its reports to the syncer" : "";
  const text = parts.length
    ? `Goodput ${share(island.goodput)}${source}: ${parts.join(", ")}`
    : "Goodput is not known yet";
  attr(entry.bar, "aria-label", text);
  attr(entry.bar, "title", text);
}
