// What an island can be, in one place: a word, a letter, a sentence, and how much it matters. Colours are in theme.css.

export const STATES = {
  training: { letter: "T", word: "training", note: "in steps, with a link to the syncer", tone: "good" },
  alone: { letter: "A", word: "alone", note: "in steps, without a link to the syncer", tone: "warn" },
  suspected: { letter: "S", word: "suspected", note: "silent for longer than it should be", tone: "warn" },
  recovering: { letter: "R", word: "recovering", note: "fetches the model and a peer's inner state", tone: "calm" },
  paused: { letter: "P", word: "paused", note: "waits because somebody asked it to", tone: "calm" },
  gone: { letter: "G", word: "gone", note: "no process; the others train on", tone: "bad" },
  left: { letter: "L", word: "left", note: "left for good, in order", tone: "calm" },
  quarantined: { letter: "Q", word: "quarantined", note: "shut out after bad messages", tone: "bad" },
};
const STRANGE = { letter: "?", word: "unknown", note: "a state that this page does not know", tone: "warn" };

export function stateOf(name) {
  return STATES[name] ?? { ...STRANGE, word: String(name ?? "unknown") };
}

export const SPLIT = {
  stepping: "in steps that counted",
  copying: "copying for Atoll",
  waiting: "waiting for data",
  recovering: "recovering",
  paused: "paused",
  gone: "gone",
};

export const UNAVAILABLE = { letter: "×", note: "the process that holds it cannot be reached; the other fragments go on" };

export const PHASES = {
  idle: { letter: "·", note: "no round is open" },
  pulling: { letter: "↑", note: "contributions are asked for" },
  grace: { letter: "◔", note: "the quorum is there; a little more is waited for the others" },
  merging: { letter: "∑", note: "contributions are being merged" },
  published: { letter: "↓", note: "the new version is on its way to learners" },
};

// Marks of the timeline: the shape is drawn by timeline_marks.js.
export const MARKS = {
  killed: { word: "killed", tone: "bad", shape: "cross" },
  failed: { word: "failed", tone: "bad", shape: "cross" },
  quarantined: { word: "quarantined", tone: "bad", shape: "square" },
  cut: { word: "link cut", tone: "warn", shape: "slash" },
  suspected: { word: "suspected", tone: "warn", shape: "question" },
  restarted: { word: "restarted", tone: "good", shape: "triangle" },
  "syncer-restarted": { word: "syncer restarted", tone: "good", shape: "triangle" },
  joined: { word: "joined", tone: "good", shape: "dot" },
  left: { word: "left", tone: "calm", shape: "ring" },
  control: { word: "control", tone: "calm", shape: "diamond" },
  alert: { word: "alert", tone: "warn", shape: "exclamation" },
};

/** Who comes first where trouble is to be seen first. */
export const WORST_FIRST = ["quarantined", "gone", "suspected", "alone", "recovering", "paused", "left", "training"];

export const severe = (alert) => ["critical", "error", "page"].includes(alert.severity);
