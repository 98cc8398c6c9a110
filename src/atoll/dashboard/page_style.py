"""The look of pages that are sent to somebody: no script, nothing from elsewhere, light and dark."""

STATES = {
    "training": "in steps, with a link to the syncer",
    "alone": "in steps, without a link",
    "suspected": "in steps, but silent for the syncer",
    "stopped": "its process stands still (SIGSTOP)",
    "recovering": "fetches the model and a peer's inner state",
    "paused": "an operator paused the run",
    "gone": "no process, or one that is only starting",
    "left": "left for good, or done",
    "quarantined": "what it sent was refused",
}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6775; --line: #d5dbe3; --paper: #ffffff; --card: #f5f7fa;
  --good: #14713c; --bad: #b3261e; --unknown: #7a5b00; --mark: #b3261e;
  --training: #3f9d6b; --alone: #d9a520; --stopped: #8b5fbf; --gone: #d9635b;
  --suspected: #e0c04a; --recovering: #4a86c8; --paused: #8b5fbf; --left: #a7b0bb; --quarantined: #6b2f5b;
  --alive: #14713c; --asked: #2f6fb3; --merged: #b3561e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #a3adba; --line: #39424e; --paper: #14181d;
  --card: #1d232a; --good: #6cc993; --bad: #ff8a80; --unknown: #e0b94d; --mark: #ff8a80;
  --training: #2f7d54; --alone: #a87e12; --stopped: #7a52a8; --gone: #a8443d;
  --suspected: #a3862a; --recovering: #36699f; --paused: #7a52a8; --left: #55606c; --quarantined: #8a4a78;
  --alive: #6cc993; --asked: #7db4ee; --merged: #f0a06a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px 20px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); } .unknown { color: var(--unknown); }
.verdict { display: inline-block; padding: 2px 12px; border-radius: 4px; color: var(--paper); font-weight: 600; }
.verdict.good { background: var(--good); color: var(--paper); }
.verdict.bad { background: var(--bad); color: var(--paper); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(150px, 22%), 1fr)); gap: 10px;
  margin: 16px 0; }
.card { background: var(--card); border-radius: 6px; padding: 10px 12px; }
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.why { color: var(--soft); min-width: 110px; } td.what { min-width: 190px; }
svg { display: block; width: 100%; min-width: 700px; height: auto; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit; } svg text.soft { fill: var(--soft); }
svg text.mark { fill: var(--mark); font-size: 11px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin: 6px 0 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; }
footer { margin-top: 32px; color: var(--soft); font-size: 13px; }
"""
