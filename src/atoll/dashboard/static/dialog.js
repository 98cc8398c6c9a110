// One dialog for questions, the token and the list of shortcuts.

import { h } from "./dom.js";

export const SHORTCUTS = [
  ["?", "this list"],
  ["1 … 6", "go to Now, Timeline, Fragments, Ledger, Curves, Controls"],
  ["s", "story of the whole run"],
  ["/", "filter the story"],
  ["[ and ]", "back and forth in time by a hundredth; with Shift by a thousandth"],
  ["l", "back to live"],
  ["v", "the other run, or both, where there are two"],
  ["d", "dark, light, or as the system says"],
  ["r", "try again now, when the connection is lost"],
  ["Esc", "close what is open"],
];
export const ON_TIMELINE = [
  ["← →", "move"],
  ["+ −", "zoom"],
  ["0", "the whole run"],
  ["f", "follow the newest"],
  ["n and p", "next and previous event"],
  ["↑ ↓", "choose an island"],
  ["t", "travel to the cursor"],
  ["Enter", "story of the island"],
];

export class Dialog {
  constructor(node) {
    this.node = node;
  }

  get open() {
    return this.node.open;
  }

  show(title, ...parts) {
    if (this.node.open) this.node.close();
    this.node.replaceChildren(h("h2", { id: "dialog-title" }, title), ...parts);
    this.node.showModal();
  }

  /** Resolves to true or false; Escape is no. */
  confirm(text, { title, yes, no }) {
    return new Promise((resolve) => {
      const sure = h("button", { type: "button", class: "danger", on: { click: () => this.node.close("yes") } }, yes);
      const not = h("button", { type: "button", autofocus: true, on: { click: () => this.node.close("no") } }, no);
      this.node.returnValue = "";
      this.show(title, h("p", { class: "question" }, text), h("div", { class: "answers" }, not, sure));
      this.node.addEventListener("close", () => resolve(this.node.returnValue === "yes"), { once: true });
    });
  }

  askToken(wrong) {
    return new Promise((resolve) => {
      const input = h("input", { type: "password", autocomplete: "off", autofocus: true, "aria-label": "Token" });
      const form = h(
        "form",
        {
          method: "dialog",
          on: {
            submit: (event) => {
              event.preventDefault();
              this.node.close("given");
            },
          },
        },
        input,
        h("button", { type: "submit" }, "Open"),
      );
      this.node.returnValue = "";
      this.show(
        "The run's token",
        h(
          "p",
          {},
          wrong
            ? "That token is not the right one."
            : "This page is shown to those who know the run's token. It is kept in this tab only.",
        ),
        form,
      );
      this.node.addEventListener(
        "close",
        () => resolve(this.node.returnValue === "given" ? input.value.trim() : null),
        { once: true },
      );
    });
  }

  help() {
    const rows = (some) =>
      some.map(([keys, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, keys)), h("td", {}, what)));
    this.show(
      "Keyboard",
      h("table", { class: "keys" }, h("tbody", {}, ...rows(SHORTCUTS))),
      h("h3", {}, "On the timeline"),
      h("table", { class: "keys" }, h("tbody", {}, ...rows(ON_TIMELINE))),
      h(
        "div",
        { class: "answers" },
        h("button", { type: "button", autofocus: true, on: { click: () => this.node.close() } }, "Close"),
      ),
    );
  }
}
