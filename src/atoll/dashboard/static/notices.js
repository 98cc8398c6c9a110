// What has to be seen first: a lost connection, old data, a place in the past, alerts.

import { attr, h, keyed, put, show } from "./dom.js";
import { duration, runTime, wallTime } from "./format.js";
import { severe } from "./states.js";

const MOST_ALERTS = 6;
const SIGNS = { bad: "✕", warn: "!", calm: "i" };

export class Notices {
  constructor(host, { onLive, onRetry, onStory }) {
    Object.assign(this, { host, onLive, onRetry, onStory });
  }

  render(columns, travel) {
    const many = columns.length > 1;
    const items = [];
    for (const column of columns) {
      const of = many ? `${column.run.name}: ` : "";
      this.connection(column, of, items);
      (column.shown?.tape_errors ?? []).slice(0, 3).forEach((sentence, place) =>
        items.push({
          key: `tape-error ${column.run.index} ${place}`,
          kind: "tape-error",
          tone: "warn",
          text: `${of}A tape cannot be read any further: ${sentence}`,
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

  connection(column, of, items) {
    const { lost, newest } = column;
    const key = column.run.index;
    if (lost) {
      const wait = Math.max((lost.retryAt - performance.now()) / 1000, 0);
      const next = wait >= 1 ? `trying again in ${Math.ceil(wait)} s` : "trying again";
      const text = newest
        ? `${of}What you see is ${duration(column.age())} old; ${next}.`
        : `${of}No answer from the server; ${next}.`;
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
      const text = `${of}What you see is ${duration(column.age())} old: the run has written nothing since then. Its syncer may be down or stuck.`;
      items.push({ key: `old ${key}`, kind: "old", tone: "warn", role: "alert", text });
    }
  }

  past(column, travel, many) {
    const picture = column.newest ?? column.shown;
    const wall = many ? null : wallTime(travel, picture?.wall0);
    const before = picture ? `, ${duration(picture.to - travel)} before the newest entry` : "";
    const age = column.shown?.sample_age_s;
    const sample = typeof age === "number" ? ` Fragments and ledger are as of ${duration(age)} earlier.` : "";
    const text = `You look into the past: ${runTime(travel, true)} into the run${wall ? ` (${wall})` : ""}${before}.${sample}`;
    return {
      key: "past",
      kind: "past",
      tone: "calm",
      text,
      act: this.onLive,
      label: picture?.live ? "Back to live" : "To the end",
    };
  }

  alerts(column, of, items) {
    const alerts = (column.shown?.alerts ?? []).toSorted((a, b) => Number(severe(b)) - Number(severe(a)));
    for (const alert of alerts.slice(0, MOST_ALERTS)) {
      const learner = /^learner (\d+)$/.exec(alert.subject ?? "");
      const fragment = /^fragment (\d+)$/.exec(alert.subject ?? "");
      const about = { run: column.run.index };
      if (learner) about.learner = Number(learner[1]);
      if (fragment) about.fragment = Number(fragment[1]);
      items.push({
        key: `alert ${column.run.index} ${alert.rule} ${alert.subject}`,
        kind: "alert",
        tone: severe(alert) ? "bad" : "warn",
        text: `${of}${alert.text} (${alert.rule}, since ${runTime(alert.since)})`,
        act: () => this.onStory(about),
        label: "Story",
      });
    }
    const rest = alerts.length - MOST_ALERTS;
    if (rest > 0)
      items.push({
        key: `rest ${column.run.index}`,
        kind: "alert",
        tone: "warn",
        text: `${of}and ${rest} more alerts`,
      });
  }
}
