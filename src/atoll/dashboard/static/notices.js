// Notices at the top: a lost connection, old data, time travel, alerts.

import { attr, h, keyed, put, show } from "./dom.js";
import { duration, runTime, wallTime } from "./format.js";
import { severe } from "./states.js";

const MAX_ALERTS = 6;
const SIGNS = { bad: "✕", warn: "!", calm: "i" };

export class Notices {
  constructor(host, { onLive, onRetry, onStory }) {
    Object.assign(this, { host, onLive, onRetry, onStory });
  }

  render(columns, travel) {
    const many = columns.length > 1;
    const items = [];
    for (const column of columns) {
      const prefix = many ? `${column.run.name}: ` : "";
      this.connection(column, prefix, items);
      (column.shown?.tape_errors ?? []).slice(0, 3).forEach((sentence, index) =>
        items.push({
          key: `tape-error ${column.run.index} ${index}`,
          kind: "tape-error",
          tone: "warn",
          text: `${prefix}Cannot read the rest of a tape: ${sentence}`,
        }),
      );
    }
    if (travel !== null) items.push(this.past(columns[0], travel, many));
    for (const column of columns) this.alerts(column, many ? `${column.run.name}: ` : "", items);
    keyed(
      this.host,
      items,
      (item) => item.key,
      (item) => this.make(item),
      (entry, item) => {
        put(entry.text, item.text);
        put(entry.sign, SIGNS[item.tone]);
        attr(entry.node, "data-tone", item.tone);
        show(entry.button, Boolean(item.act));
        if (item.act) put(entry.button, item.label);
        entry.act = item.act;
      },
    );
  }

  make(item) {
    const entry = { text: h("span"), sign: h("b", { class: "sign", "aria-hidden": "true" }) };
    entry.button = h("button", { type: "button", class: "small", on: { click: () => entry.act?.() } });
    entry.node = h(
      "div",
      { class: "notice", "data-kind": item.kind, role: item.role ?? null },
      entry.sign,
      entry.text,
      entry.button,
    );
    return entry;
  }

  connection(column, prefix, items) {
    const { lost, newest } = column;
    const key = column.run.index;
    if (lost) {
      const wait = Math.max((lost.retryAt - performance.now()) / 1000, 0);
      const next = wait >= 1 ? `retrying in ${Math.ceil(wait)} s` : "retrying";
      const text = newest
        ? `${prefix}The data is ${duration(column.age())} old; ${next}.`
        : `${prefix}No reply from the server; ${next}.`;
      items.push({
        key: `lost ${key}`,
        kind: "lost",
        tone: "bad",
        role: "alert",
        text,
        act: this.onRetry,
        label: "Now",
      });
    } else if (column.old) {
      const text = `${prefix}The data is ${duration(column.age())} old: the run has written nothing since then. Its syncer may be down or stalled.`;
      items.push({ key: `old ${key}`, kind: "old", tone: "warn", role: "alert", text });
    }
  }

  past(column, travel, many) {
    const status = column.newest ?? column.shown;
    const wall = many ? null : wallTime(travel, status?.wall0);
    const before = status ? `, ${duration(status.to - travel)} before the newest entry` : "";
    const age = column.shown?.sample_age_s;
    const sample = typeof age === "number" ? ` Fragments and ledger are from ${duration(age)} earlier.` : "";
    const text = `Time travel: ${runTime(travel, true)} into the run${wall ? ` (${wall})` : ""}${before}.${sample}`;
    return {
      key: "past",
      kind: "past",
      tone: "calm",
      text,
      act: this.onLive,
      label: status?.live ? "Back to live" : "To the end",
    };
  }

  alerts(column, prefix, items) {
    const alerts = (column.shown?.alerts ?? []).toSorted((a, b) => Number(severe(b)) - Number(severe(a)));
    for (const alert of alerts.slice(0, MAX_ALERTS)) {
      const learner = /^learner (\d+)$/.exec(alert.subject ?? "");
      const fragment = /^fragment (\d+)$/.exec(alert.subject ?? "");
      const about = { run: column.run.index };
      if (learner) about.learner = Number(learner[1]);
      if (fragment) about.fragment = Number(fragment[1]);
      items.push({
        key: `alert ${column.run.index} ${alert.rule} ${alert.subject}`,
        kind: "alert",
        tone: severe(alert) ? "bad" : "warn",
        text: `${prefix}${alert.text} (${alert.rule}, since ${runTime(alert.since)})`,
        act: () => this.onStory(about),
        label: "Story",
      });
    }
    const rest = alerts.length - MAX_ALERTS;
    if (rest > 0)
      items.push({
        key: `rest ${column.run.index}`,
        kind: "alert",
        tone: "warn",
        text: `${prefix}and ${rest} more alerts`,
      });
  }
}
