// Sets light or dark colours: the system's, or the user's choice.

const NAMES = ["auto", "light", "dark"];
const KEPT = "sinkdlm-theme";

/** @returns {string} */
function kept() {
  try {
    return localStorage.getItem(KEPT) ?? "auto";
  } catch {
    return "auto";
  }
}

/**
 * @param {HTMLButtonElement} button
 * @param {() => void} changed
 */
export function startTheme(button, changed) {
  const use = (/** @type {string} */ name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    changed();
  };
  let now = NAMES.includes(kept()) ? kept() : "auto";
  use(now);
  button.addEventListener("click", () => {
    now = NAMES[(NAMES.indexOf(now) + 1) % NAMES.length];
    try {
      localStorage.setItem(KEPT, now);
    } catch {
      // Without storage the choice lasts until the page is closed.
    }
    use(now);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
