// Time slider over the whole run.

import { attr, h, put } from "./dom.js";
import { duration, runTime, wallTime } from "./format.js";

export class Travel {
  constructor(host, { onTravel }) {
    this.onTravel = onTravel;
    this.range = { from: 0, to: 1 };
    this.live = h(
      "button",
      { type: "button", class: "live", "aria-keyshortcuts": "l", on: { click: () => onTravel(null) } },
      "● live",
    );
    this.slider = h("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "any",
      value: "1",
      "aria-label": "Time in the run",
      on: { input: () => this.moved() },
    });
    this.label = h("span", { class: "when" });
    host.append(this.live, this.slider, this.label);
    this.host = host;
  }

  moved() {
    const at = Number(this.slider.value);
    this.onTravel(at >= this.range.to - (this.range.to - this.range.from) * 0.0005 ? null : at);
  }

  /** Move by a share of the whole run. */
  step(by, at) {
    const { from, to } = this.range;
    const next = (at ?? to) + by * (to - from);
    this.onTravel(next >= to ? null : Math.max(next, from));
  }

  render(columns, travel) {
    const newest = columns.map((column) => column.newest).filter(Boolean);
    if (!newest.length) return;
    this.range = { from: Math.min(...newest.map((p) => p.from)), to: Math.max(...newest.map((p) => p.to)) };
    attr(this.slider, "min", this.range.from);
    attr(this.slider, "max", this.range.to);
    const at = travel ?? this.range.to;
    if (Number(this.slider.value) !== at) this.slider.value = at;
    const live = newest.some((p) => p.live);
    const wall = newest.length > 1 ? null : wallTime(at, newest[0].wall0, { day: this.range.to > 43200 });
    put(this.live, live ? "● live" : "■ end");
    attr(this.live, "aria-pressed", String(travel === null));
    attr(this.live, "title", live ? "Show the run as it is now" : "Show the end of the run");
    const ago = travel === null ? "" : `, ${duration(this.range.to - at)} before the ${live ? "newest" : "end"}`;
    const text = `${runTime(at, travel !== null)}${wall ? `  ${wall}` : ""}`;
    put(this.label, text);
    attr(this.slider, "aria-valuetext", `${runTime(at)} into the run${ago}`);
    this.host.classList.toggle("past", travel !== null);
  }
}
