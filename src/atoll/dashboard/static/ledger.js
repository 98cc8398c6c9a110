// Ledger: what happened to every trained token.

import { attr, h, keyed, put, show } from "./dom.js";
import { share, whole } from "./format.js";

export class Ledger {
  constructor(host) {
    this.bar = h("div", { class: "split tall", role: "img" });
    this.balance = h("p", { class: "balance" });
    this.rows = h("tbody");
    this.table = h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "Tokens"),
          h("th", { scope: "col", class: "number" }, "count"),
          h("th", { scope: "col", class: "number" }, "share"),
        ),
      ),
      this.rows,
    );
    this.none = h("p", { class: "soft empty" }, "Nothing has been trained yet.");
    host.append(this.bar, this.balance, h("div", { class: "wide" }, this.table), this.none);
  }

  render(status) {
    const ledger = status.ledger;
    const known = Boolean(ledger) && ledger.trained !== null;
    show(this.none, !known);
    show(this.table, known);
    show(this.bar, known);
    show(this.balance, known);
    if (!known) return;
    const dropped = Object.entries(ledger.dropped ?? {}).sort((a, b) => b[1] - a[1]);
    const rows = [
      { key: "merged", state: "merged", name: "merged into the model", count: ledger.merged },
      { key: "pending", state: "pending", name: "pending: not merged yet", count: ledger.pending },
      ...dropped.map(([reason, count]) => ({
        key: `d ${reason}`,
        state: "dropped",
        name: `dropped: ${reason}`,
        count,
      })),
    ];
    const all = Math.max(ledger.trained, 1);
    keyed(
      this.bar,
      rows,
      (row) => row.key,
      (row) => h("i", { class: "swatch", "data-state": row.state }),
      (node, row) => (node.style.flexGrow = row.count / all),
    );
    attr(this.bar, "aria-label", rows.map((row) => `${row.name} ${share(row.count / all)}`).join(", "));
    keyed(
      this.rows,
      [{ key: "trained", name: "trained", count: ledger.trained }, ...rows],
      (row) => row.key,
      make,
      (entry, row) => {
        put(entry.name, row.name);
        put(entry.count, whole(row.count));
        put(entry.share, share((row.count ?? 0) / all, 2));
      },
    );
    const sum = (ledger.merged ?? 0) + (ledger.pending ?? 0) + dropped.reduce((total, [, count]) => total + count, 0);
    attr(this.balance, "data-tone", ledger.balanced === null ? "calm" : ledger.balanced ? "good" : "bad");
    put(
      this.balance,
      ledger.balanced === null
        ? "The balance is not known yet."
        : ledger.balanced
          ? "✓ Balanced: every trained token is accounted for."
          : `✕ Out of balance: merged, pending and dropped are ${whole(sum)}, trained are ${whole(ledger.trained)}.`,
    );
  }
}

function make(row) {
  const entry = { name: h("span"), count: h("td", { class: "number" }), share: h("td", { class: "number soft" }) };
  const swatch = row.state ? h("span", { class: "swatch dot", "data-state": row.state, "aria-hidden": "true" }) : null;
  entry.node = h("tr", {}, h("th", { scope: "row" }, swatch, entry.name), entry.count, entry.share);
  return entry;
}
