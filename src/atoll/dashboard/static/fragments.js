// Fragments: a grid of all fragments, each with its version and what its next round waits for.

import { attr, h, keyed, put, show } from "./dom.js";
import { duration, learnerList } from "./format.js";
import { PHASES, UNAVAILABLE } from "./states.js";

const COMPACT_FROM = 33; // number of fragments from which the reason is shown in the story only

export class Fragments {
  constructor(host, { onStory }) {
    this.onStory = onStory;
    this.grid = h("ul", { class: "fragments" });
    this.none = h("p", { class: "soft empty" }, "No fragment has a version yet.");
    host.append(this.grid, this.none);
  }

  render(status) {
    const fragments = status.fragments ?? [];
    this.grid.classList.toggle("compact", fragments.length >= COMPACT_FROM);
    keyed(
      this.grid,
      fragments,
      (fragment) => fragment.fragment,
      (fragment) => this.cell(fragment.fragment),
      (entry, fragment) => fill(entry, fragment, status.islands.length),
    );
    show(this.none, fragments.length === 0);
  }

  cell(number) {
    const entry = {
      name: h(
        "button",
        { type: "button", class: "cover", on: { click: () => this.onStory({ fragment: number }) } },
        String(number),
      ),
    };
    attr(entry.name, "aria-label", `fragment ${number}`);
    entry.version = h("span", { class: "version" });
    entry.phase = h("span", { class: "phase" });
    entry.age = h("span", { class: "age soft" });
    entry.bar = h("span", { class: "thin", role: "img" }, h("i"));
    entry.reason = h("p", { class: "reason" });
    entry.node = h(
      "li",
      { class: "fragment" },
      h("div", { class: "row" }, entry.name, entry.version),
      h("div", { class: "row" }, entry.phase, entry.age),
      entry.bar,
      entry.reason,
    );
    return entry;
  }
}

function fill(entry, fragment, islands) {
  const name = fragment.unavailable ? "unavailable" : fragment.phase;
  const phase = fragment.unavailable ? UNAVAILABLE : (PHASES[fragment.phase] ?? { letter: "?", note: "" });
  const merged = fragment.contributors?.length ?? 0;
  const open = !fragment.unavailable && fragment.phase !== "idle";
  attr(entry.node, "data-phase", name);
  put(entry.version, fragment.version === null ? "no version" : `v${fragment.version}`);
  put(
    entry.phase,
    `${phase.letter} ${name}${open && fragment.pulled ? ` ${fragment.contributions ?? 0}/${fragment.pulled}` : ""}`,
  );
  attr(entry.phase, "title", fragment.unavailable ? `${phase.note}: ${fragment.reason}` : phase.note);
  put(entry.age, duration(fragment.age_s));
  attr(entry.age, "title", "since its last merge");
  entry.bar.firstChild.style.width = `${islands ? (Math.min(merged / islands, 1) * 100).toFixed(1) : 0}%`;
  const last = fragment.version ? `${merged} of ${islands} islands contributed to its last merge` : "not merged yet";
  attr(entry.bar, "aria-label", last);
  attr(entry.bar, "title", merged ? `${last}: ${learnerList(fragment.contributors, 12)}` : last);
  const waits = fragment.waiting_for?.length ? `waiting for ${learnerList(fragment.waiting_for, 3)}: ` : "";
  const text = `${open ? waits : ""}${fragment.reason ?? ""}`;
  put(entry.reason, text);
  attr(entry.reason, "title", text);
}
