// Draws where attention went over all steps: a column for each position, a row for each step, content sinks in their own colour.
//
// The picture is made off the screen, one dot a token, once for each frame; a step only moves the cursor.

import { channels, sized } from "./colours.js";
import { Profile } from "./profile.js";

/** @typedef {import("./colours.js").Colours} Colours */

const GAP = 1; // columns between the model's own sinks and the text
const FULL = 0.3; // the share that gets the full colour
const LEFT = 30;
const BELOW = 18;
const FONT = "11px system-ui, sans-serif";

export class Trace {
  /**
   * @param {HTMLElement} root
   * @param {(frame: number, position: number) => void} pick
   */
  constructor(root, pick) {
    this._pick = pick;
    this._canvas = document.createElement("canvas");
    this._canvas.setAttribute("role", "img");
    root.classList.add("trace");
    this._cursor = document.createElement("canvas");
    this._cursor.setAttribute("aria-hidden", "true");
    this._cursor.className = "cursor";
    root.replaceChildren(this._canvas, this._cursor);
    this._stale = true;
    this._picture = document.createElement("canvas");
    this._drawn = new Uint8Array(0);
    /** @type {Profile | null} */
    this._profile = null;
    /** @type {Colours | null} */
    this._colours = null;
    this._frame = 0;
    this._position = /** @type {number | null} */ (null);
    this._canvas.addEventListener("click", (event) => this._clicked(event));
    this._width = 0;
    this._height = 0;
    new ResizeObserver(() => this._measure()).observe(root);
  }

  /**
   * @param {Profile} profile
   * @param {number} frame
   * @param {number | null} position
   * @param {Colours} colours
   * @param {string} label
   */
  draw(profile, frame, position, colours, label) {
    if (profile !== this._profile || colours !== this._colours) this._begin(profile, colours);
    for (let one = 0; one < this._drawn.length; one += 1) if (!this._drawn[one]) this._add(one);
    [this._frame, this._position] = [frame, position];
    if (this._canvas.getAttribute("aria-label") !== label) this._canvas.setAttribute("aria-label", label);
    this._paint();
  }

  /**
   * @param {Profile} profile
   * @param {Colours} colours
   */
  _begin(profile, colours) {
    const { nFrames, nSinks } = profile.trajectory.facts;
    [this._profile, this._colours, this._stale] = [profile, colours, true];
    this._drawn = new Uint8Array(nFrames);
    [this._picture.width, this._picture.height] = [profile.trajectory.nKeys + (nSinks ? GAP : 0), nFrames];
  }

  /** @param {number} frame */
  _add(frame) {
    const [profile, colours] = [this._profile, this._colours];
    const context = this._picture.getContext("2d");
    if (!profile || !colours || !context || !profile.prepare(frame)) return;
    const { nSinks, length } = profile.trajectory.facts;
    const nKeys = profile.trajectory.nKeys;
    const dots = context.createImageData(this._picture.width, 1);
    const [bar, sink, own] = [colours.bar, colours.sink, colours.own].map(channels);
    for (let key = 0; key < nKeys; key += 1) {
      const isOwn = key < nSinks;
      const heads = isOwn ? 0 : profile.nSinkHeads[frame * length + key - nSinks];
      const shade = Math.sqrt(profile.received[frame * nKeys + key] / FULL);
      const at = 4 * (isOwn ? key : key + this._picture.width - nKeys);
      dots.data.set(isOwn ? own : heads ? sink : bar, at);
      dots.data[at + 3] = heads ? 110 + 145 * Math.sqrt(heads / profile.nHeads) : Math.min(255, 20 + 235 * shade);
    }
    context.putImageData(dots, 0, frame);
    this._drawn[frame] = 1;
    this._stale = true;
  }

  _measure() {
    [this._width, this._height] = [this._canvas.clientWidth, this._canvas.clientHeight];
    this._stale = true;
    this._paint();
  }

  _paint() {
    if (!this._profile || this._width <= LEFT || this._height <= BELOW) return;
    if (this._stale) this._paintPicture();
    this._paintCursor();
  }

  /** Paints what does not depend on the step: once for each choice and size. */
  _paintPicture() {
    const [profile, colours, width, height] = [this._profile, this._colours, this._width, this._height];
    if (!profile || !colours) return;
    const context = sized(this._canvas, width, height);
    context.clearRect(0, 0, width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this._picture, LEFT, 0, width - LEFT, height - BELOW);
    context.strokeStyle = colours.line;
    context.strokeRect(LEFT + 0.5, 0.5, width - LEFT - 1, height - BELOW - 1);
    context.fillStyle = colours.ink;
    context.font = FONT;
    context.fillText("step ↓   position in the text →", LEFT, height - 4);
    context.textAlign = "right";
    context.fillText(String(profile.trajectory.facts.length - 1), width, height - 4);
    context.textAlign = "left";
    this._stale = false;
  }

  _paintCursor() {
    const [profile, colours, width, height] = [this._profile, this._colours, this._width, this._height];
    if (!profile || !colours) return;
    const { nFrames, length } = profile.trajectory.facts;
    const [wide, high] = [width - LEFT, height - BELOW];
    const [across, down] = [wide / this._picture.width, high / nFrames];
    const context = sized(this._cursor, width, height);
    context.clearRect(0, 0, width, height);
    context.strokeStyle = context.fillStyle = colours.ink;
    context.lineWidth = 1;
    if (this._position !== null && this._position >= 0) {
      const x = LEFT + (this._position + this._picture.width - length) * across;
      context.strokeRect(x - 0.5, 0.5, Math.max(2, across) + 1, high - 1);
    }
    context.lineWidth = 1.5;
    context.strokeRect(LEFT - 3, this._frame * down - 0.5, wide + 2, Math.max(2, down) + 1);
    context.font = FONT;
    context.textAlign = "right";
    context.fillText(String(this._frame), LEFT - 6, Math.min(high, Math.max(9, this._frame * down + down / 2 + 4)));
  }

  /** @param {MouseEvent} event */
  _clicked(event) {
    if (!this._profile) return;
    const { nFrames, length } = this._profile.trajectory.facts;
    const box = this._canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * this._picture.width);
    const frame = Math.floor(((event.clientY - box.top) / (box.height - BELOW)) * nFrames);
    const position = column - (this._picture.width - length);
    if (frame >= 0 && frame < nFrames && position < length && position >= 0) this._pick(frame, position);
  }
}
