// Runs before the first paint, so that the page does not flash in the default theme.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("atoll-theme");
  } catch {
    // storage may be disabled; then the system's theme is used
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
