// The step slider with its buttons and keys: chooses the shown frame, and plays.

const WHOLE = 5000; // ms to play a whole trajectory
const FASTEST = 60; // ms of a frame, at least

/**
 * @template {HTMLElement} Kind
 * @param {string} id
 * @param {new () => Kind} kind
 * @returns {Kind}
 */
export function part(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${id}`);
  return found;
}

export class Player {
  /** @param {(step: number) => void} show */
  constructor(show) {
    this._show = show;
    this._slider = part("step", HTMLInputElement);
    this._said = part("step-said", HTMLOutputElement);
    this._play = part("play", HTMLButtonElement);
    /** @type {ReturnType<typeof setTimeout> | null} */
    this._timer = null;
    this._slider.addEventListener("input", () => {
      this.pause();
      this._moved(Number(this._slider.value));
    });
    part("back", HTMLButtonElement).addEventListener("click", () => this.move(-1));
    part("forth", HTMLButtonElement).addEventListener("click", () => this.move(1));
    this._play.addEventListener("click", () => this.toggle());
    document.addEventListener("keydown", (event) => this._pressed(event));
  }

  get step() {
    return Number(this._slider.value);
  }

  /**
   * @param {number} nFrames
   * @param {number} step
   */
  set(nFrames, step) {
    this._slider.max = String(Math.max(0, nFrames - 1));
    this._slider.value = String(step);
    this._say();
  }

  /** @param {number} way */
  move(way) {
    this.pause();
    this._moved(Math.max(0, Math.min(Number(this._slider.max), this.step + way)));
  }

  toggle() {
    if (this._timer !== null) {
      this.pause();
      return;
    }
    if (this.step >= Number(this._slider.max)) this._moved(0);
    this._play.setAttribute("aria-label", "Pause");
    this._play.textContent = "❚❚";
    this._tick();
  }

  pause() {
    if (this._timer !== null) clearTimeout(this._timer);
    this._timer = null;
    this._play.setAttribute("aria-label", "Play");
    this._play.textContent = "▶";
  }

  _tick() {
    const last = Number(this._slider.max);
    this._timer = setTimeout(() => {
      this._moved(Math.min(last, this.step + 1));
      if (this.step < last) this._tick();
      else this.pause();
    }, Math.max(FASTEST, WHOLE / Math.max(1, last)));
  }

  /** @param {number} step */
  _moved(step) {
    this._slider.value = String(step);
    this._say();
    this._show(step);
  }

  _say() {
    const last = Number(this._slider.max);
    const words = this.step === last && last > 0 ? "finished" : `step ${this.step} of ${last}`;
    this._said.textContent = words;
    this._slider.setAttribute("aria-valuetext", words);
  }

  /** @param {KeyboardEvent} event */
  _pressed(event) {
    const at = event.target;
    const busy = at instanceof Element && at.closest("input, textarea, select, button, [role=listbox]");
    if (busy || event.ctrlKey || event.metaKey || event.altKey || this._slider.max === "0") return;
    if (event.key === "ArrowLeft") this.move(-1);
    else if (event.key === "ArrowRight") this.move(1);
    else if (event.key === " ") this.toggle();
    else return;
    event.preventDefault();
  }
}
