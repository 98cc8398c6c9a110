// States of an island: name, letter, meaning and severity. Colors are in theme.css.

export const STATES = {
  training: { letter: "T", word: "training", note: "in steps, connected to the syncer", tone: "good" },
  alone: { letter: "D", word: "disconnected", note: "in steps, without a connection to the syncer", tone: "warn" },
  suspected: { letter: "S", word: "suspected", note: "no message for longer than expected", tone: "warn" },
  recovering: { letter: "J", word: "joining", note: "downloads the model and a peer's optimizer state", tone: "calm" },
  paused: { letter: "P", word: "paused", note: "paused by an operator", tone: "calm" },
  gone: { letter: "X", word: "lost", note: "no process; the other learners continue training", tone: "bad" },
  left: { letter: "L", word: "left", note: "left for good", tone: "calm" },
  quarantined: { letter: "Q", word: "quarantined", note: "refused after invalid messages", tone: "bad" },
};
const UNKNOWN_STATE = { letter: "?", word: "unknown", note: "a state that this page does not know", tone: "warn" };

export function stateOf(name) {
  return STATES[name] ?? { ...UNKNOWN_STATE, word: String(name ?? "unknown") };
}

export const SPLIT = {
  stepping: "in steps that counted",
  copying: "copying for Atoll",
  waiting: "waiting for data",
  recovering: "joining",
  paused: "paused",
  gone: "lost",
};

export const UNAVAILABLE = { letter: "×", note: "its shard is unavailable; the other fragments continue" };

export const PHASES = {
  idle: { letter: "·", note: "no round is open" },
  pulling: { letter: "↑", note: "contributions are requested" },
  grace: { letter: "◔", note: "the quorum is reached; waiting for more contributions within the grace window" },
  merging: { letter: "∑", note: "contributions are being merged" },
  published: { letter: "↓", note: "the new version is being downloaded by learners" },
};

// Marks of the timeline. timeline_marks.js draws their shapes.
export const MARKS = {
  killed: { word: "killed", tone: "bad", shape: "cross" },
  failed: { word: "failed", tone: "bad", shape: "cross" },
  quarantined: { word: "quarantined", tone: "bad", shape: "square" },
  cut: { word: "disconnected", tone: "warn", shape: "slash" },
  suspected: { word: "suspected", tone: "warn", shape: "question" },
  restarted: { word: "restarted", tone: "good", shape: "triangle" },
  "syncer-restarted": { word: "syncer restarted", tone: "good", shape: "triangle" },
  joined: { word: "joined", tone: "good", shape: "dot" },
  left: { word: "left", tone: "calm", shape: "ring" },
  control: { word: "control", tone: "calm", shape: "diamond" },
  alert: { word: "alert", tone: "warn", shape: "exclamation" },
};

/** States from the most to the least severe. */
export const WORST_FIRST = ["quarantined", "gone", "suspected", "alone", "recovering", "paused", "left", "training"];

export const severe = (alert) => ["critical", "error", "page"].includes(alert.severity);
