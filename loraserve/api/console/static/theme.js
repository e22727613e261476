// Before the first paint: the theme that was chosen, or else the system's.
(function () {
  "use strict";
  try {
    const chosen = localStorage.getItem("loraserve.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing has the system's theme.
  }
})();
