// Draws a map of all heads over the whole trajectory: how often each has a content sink, and its attention on the model's own sink.

import { sized } from "./colours.js";
import { Trajectory } from "./trajectory.js";
import { ownName, percent } from "./words.js";

/** @typedef {import("./colours.js").Colours} Colours */
/** @typedef {import("./measures.js").Choice} Choice */

const HIGH = 11; // px of a head
const LEFT = 30;
const BELOW = 18;

/**
 * For every head (E, H): the share of steps with a content sink, and the mean attention on the model's own sinks.
 * @param {Trajectory} trajectory
 * @param {Choice["rule"]} rule
 * @returns {{held: Float32Array, own: Float32Array}}
 */
export function measureHeads(trajectory, rule) {
  const { nLayers, nHeads, nSinks, length } = trajectory.facts;
  const [n, isSink] = [nLayers * nHeads, trajectory.isSink[rule]];
  const [held, own] = [new Float32Array(n), new Float32Array(n)];
  for (let frame = 0; frame < trajectory.nSteps; frame += 1) {
    for (let head = 0; head < n; head += 1) {
      const place = frame * n + head;
      const sinks = isSink.subarray(place * length, (place + 1) * length);
      held[head] += sinks.includes(1) ? 1 : 0;
      for (let key = 0; key < nSinks; key += 1) own[head] += trajectory.received[place * trajectory.nKeys + key] * trajectory.scales[frame];
    }
  }
  return { held: held.map((count) => count / trajectory.nSteps), own: own.map((sum) => sum / trajectory.nSteps) };
}

export class HeadMap {
  /**
   * @param {HTMLElement} root
   * @param {(layer: number, head: number) => void} pick
   */
  constructor(root, pick) {
    this._canvas = document.createElement("canvas");
    this._canvas.setAttribute("role", "img");
    this._words = document.createElement("p");
    this._words.className = "note";
    root.classList.add("heads");
    root.replaceChildren(this._canvas, this._words);
    /** @type {(() => void) | null} */
    this._redraw = null;
    this._shape = [1, 1];
    new ResizeObserver(() => this._redraw?.()).observe(root);
    this._canvas.addEventListener("click", (event) => {
      const box = this._canvas.getBoundingClientRect();
      const [nLayers, nHeads] = this._shape;
      const layer = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * nLayers);
      const head = Math.floor((event.clientY - box.top) / HIGH);
      if (layer >= 0 && layer < nLayers && head >= 0 && head < nHeads) pick(layer, head);
    });
  }

  /**
   * @param {Trajectory} trajectory
   * @param {Choice} choice
   * @param {Colours} colours
   */
  draw(trajectory, choice, colours) {
    const { nLayers, nHeads, nSinks } = trajectory.facts;
    const found = measureHeads(trajectory, choice.rule);
    this._shape = [nLayers, nHeads];
    this._canvas.style.height = `${nHeads * HIGH + BELOW}px`;
    this._words.textContent = this._say(found, trajectory);
    this._canvas.setAttribute("aria-label", `All heads. ${this._words.textContent}`);
    this._redraw = () => {
      const [width, height] = [this._canvas.clientWidth, nHeads * HIGH + BELOW];
      if (width <= LEFT) return;
      const context = sized(this._canvas, width, height);
      const across = (width - LEFT) / nLayers;
      context.clearRect(0, 0, width, height);
      for (let at = 0; at < nLayers * nHeads; at += 1) {
        const [x, y] = [LEFT + Math.floor(at / nHeads) * across, (at % nHeads) * HIGH];
        const half = nSinks ? (across - 1) / 2 : across - 1;
        fill(context, colours.bar, 0.18, x, y, across - 1);
        fill(context, colours.sink, Math.sqrt(found.held[at]), x, y, half);
        if (nSinks) fill(context, colours.own, Math.sqrt(Math.min(1, found.own[at])), x + half, y, half);
      }
      context.globalAlpha = 1;
      context.strokeStyle = context.fillStyle = colours.ink;
      context.lineWidth = 1.5;
      if (choice.layer !== null) {
        const [top, high] = choice.head === null ? [0, nHeads * HIGH] : [choice.head * HIGH, HIGH];
        context.strokeRect(LEFT + choice.layer * across - 1, top, across + 1, high - 1);
      }
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText("head ↓   layer →", LEFT, height - 4);
      context.textAlign = "right";
      context.fillText(String(nLayers - 1), width, height - 4);
    };
    this._redraw();
  }

  /**
   * @param {{held: Float32Array, own: Float32Array}} found
   * @param {Trajectory} trajectory
   * @returns {string}
   */
  _say(found, trajectory) {
    const { nHeads, nSinks } = trajectory.facts;
    const most = (/** @type {Float32Array} */ of) => of.indexOf(Math.max(...of));
    const named = (/** @type {number} */ at) => `layer ${Math.floor(at / nHeads)}, head ${at % nHeads}`;
    const [held, own] = [most(found.held), most(found.own)];
    const lines = [found.held[held] > 0 ? `Content sinks are most frequent in ${named(held)}: ${percent(found.held[held])} of steps.` : "No head has a content sink."];
    if (nSinks) lines.push(`Most attention on the ${ownName(trajectory.facts)} in ${named(own)}: ${percent(found.own[own])}.`);
    return lines.join(" ");
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} colour
 * @param {number} alpha
 * @param {number} x
 * @param {number} y
 * @param {number} width
 */
function fill(context, colour, alpha, x, y, width) {
  context.globalAlpha = alpha;
  context.fillStyle = colour;
  context.fillRect(x, y, width, HIGH - 1);
}
