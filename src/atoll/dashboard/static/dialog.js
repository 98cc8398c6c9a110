// The dialog: confirmations, the token, keyboard shortcuts.

import { h } from "./dom.js";

export const SHORTCUTS = [
  ["?", "this list"],
  ["1 … 6", "go to Now, Timeline, Fragments, Ledger, Curves, Controls"],
  ["s", "story of the whole run"],
  ["/", "filter the story"],
  ["[ and ]", "move in time by 1 %; with Shift by 0.1 %"],
  ["l", "back to live"],
  ["v", "show the other run, or both"],
  ["d", "theme: light, dark, or automatic"],
  ["r", "reconnect now"],
  ["Esc", "close the panel or dialog"],
];
export const ON_TIMELINE = [
  ["← →", "move"],
  ["+ −", "zoom"],
  ["0", "the whole run"],
  ["f", "follow the newest entries"],
  ["n and p", "next and previous event"],
  ["↑ ↓", "select an island"],
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

  /** Ask for a confirmation. Resolve to true or false; Escape means false. */
  confirm(text, { title, yes, no }) {
    return new Promise((resolve) => {
      const accept = h("button", { type: "button", class: "danger", on: { click: () => this.node.close("yes") } }, yes);
      const reject = h("button", { type: "button", autofocus: true, on: { click: () => this.node.close("no") } }, no);
      this.node.returnValue = "";
      this.show(title, h("p", { class: "question" }, text), h("div", { class: "answers" }, reject, accept));
      this.node.addEventListener("close", () => resolve(this.node.returnValue === "yes"), { once: true });
    });
  }

  askToken(isRetry) {
    return new Promise((resolve) => {
      const input = h("input", { type: "password", autocomplete: "off", autofocus: true, "aria-label": "Token" });
      const form = h(
        "form",
        {
          method: "dialog",
          on: {
            submit: (event) => {
              event.preventDefault();
              this.node.close("token");
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
          isRetry
            ? "The token is not valid."
            : "Enter the token of the run to see this page. It is stored for this tab only.",
        ),
        form,
      );
      this.node.addEventListener(
        "close",
        () => resolve(this.node.returnValue === "token" ? input.value.trim() : null),
        { once: true },
      );
    });
  }

  help() {
    const rows = (some) =>
      some.map(([keys, text]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, keys)), h("td", {}, text)));
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
