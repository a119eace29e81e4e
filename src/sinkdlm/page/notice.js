// Shows one line about progress or a failure, with a button to try again.

import { part } from "./player.js";

export class Notice {
  constructor() {
    this._root = part("notice", HTMLDivElement);
    const [words, again] = [this._root.querySelector("p"), this._root.querySelector("button")];
    if (!words || !again) throw new Error("the page has no place for notices");
    this._words = words;
    this._again = again;
    /** @type {(() => void) | null} */
    this._retry = null;
    this._again.addEventListener("click", () => this._retry?.());
  }

  /**
   * @param {string} words
   * @param {{bad?: boolean, retry?: (() => void) | null}} [options]
   */
  say(words, { bad = false, retry = null } = {}) {
    this._root.hidden = false;
    this._root.classList.toggle("bad", bad);
    this._root.setAttribute("role", bad ? "alert" : "status");
    this._words.textContent = words;
    this._retry = retry;
    this._again.hidden = retry === null;
    if (bad) this._root.scrollIntoView({ block: "nearest" });
  }

  clear() {
    this._root.hidden = true;
    this._retry = null;
  }
}
