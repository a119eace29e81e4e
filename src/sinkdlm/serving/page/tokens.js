// Draws the text as cells, a token each, with the attention it receives as a bar beneath; the model's own sinks stand in front.
//
// Bars and tints lie on one canvas behind the cells, whose places are read once: a step changes a few texts and draws once.

import { sized } from "./colours.js";
import { Profile } from "./profile.js";
import { Trajectory } from "./trajectory.js";
import { visible } from "./visible.js";

/** @typedef {import("./colours.js").Colours} Colours */

const BAR = 16; // px, the tallest
const FULL = 0.3; // the share at which a bar is full: the same in both models, whatever they have
const BLANK = "·";

export class TokenField {
  /**
   * @param {HTMLElement} root
   * @param {string} label
   * @param {(position: number) => void} pick position; -1 - s is the model's own sink s
   */
  constructor(root, label, pick) {
    this._pick = pick;
    this._canvas = document.createElement("canvas");
    this._canvas.setAttribute("aria-hidden", "true");
    this._list = document.createElement("div");
    this._list.className = "cells";
    this._list.setAttribute("role", "listbox");
    this._list.setAttribute("aria-label", label);
    root.classList.add("field");
    const sheet = document.createElement("div");
    sheet.className = "sheet";
    sheet.append(this._canvas, this._list);
    root.replaceChildren(sheet);
    /** @type {HTMLElement[]} */
    this._cells = [];
    /** @type {(string | null)[]} */
    this._texts = [];
    this._nSinks = 0;
    this._nGiven = 0;
    this._places = new Float32Array(0);
    /** @type {(() => void) | null} */
    this._redraw = null;
    this._chosen = 0;
    this._list.addEventListener("click", (event) => this._clicked(event));
    this._list.addEventListener("keydown", (event) => this._pressed(event));
    new ResizeObserver(() => this._measure()).observe(this._list);
  }

  /**
   * Cells for so many tokens, the model's own sinks in front.
   * @param {number} nSinks
   * @param {number} length
   * @param {number} nGiven
   */
  lay(nSinks, length, nGiven) {
    this._nSinks = nSinks;
    this._nGiven = nGiven;
    this._cells = [];
    for (let place = 0; place < nSinks + length; place += 1) {
      const cell = document.createElement("span");
      const own = place < nSinks;
      cell.className = own ? "cell own" : place - nSinks < nGiven ? "cell given" : "cell";
      cell.setAttribute("role", "option");
      cell.setAttribute("aria-selected", "false");
      cell.tabIndex = -1;
      cell.dataset.place = String(place);
      if (own) cell.textContent = "sink";
      this._cells.push(cell);
    }
    this._texts = new Array(length).fill(undefined);
    this._list.replaceChildren(...this._cells);
    if (this._cells.length) this._cells[this._chosen < this._cells.length ? this._chosen : 0].tabIndex = 0;
  }

  /**
   * @param {(string | null)[]} pieces null: still a blank
   */
  write(pieces) {
    for (let token = 0; token < pieces.length; token += 1) {
      const text = pieces[token];
      if (this._texts[token] === text) continue;
      this._texts[token] = text;
      const cell = this._cells[this._nSinks + token];
      cell.textContent = text === null ? BLANK : visible(text);
      cell.classList.toggle("blank", text === null);
      if (text === null) cell.setAttribute("aria-label", "blank");
      else cell.removeAttribute("aria-label");
    }
  }

  /** Every cell keeps the width of its text as it is now, so that no step moves another token's place. */
  fix() {
    const widths = this._cells.map((cell) => cell.getBoundingClientRect().width);
    this._cells.forEach((cell, place) => {
      cell.style.width = `${widths[place]}px`;
    });
    this._list.classList.add("fixed");
    this._measure();
  }

  /** Cells of any width again, for a text that is being written. */
  loosen() {
    this._list.classList.remove("fixed");
  }

  /** @param {number | null} position null: none is chosen, and the keyboard comes back to where it was */
  choose(position) {
    const before = this._cells[this._chosen];
    before?.setAttribute("aria-selected", "false");
    const place = position === null ? this._chosen : this._nSinks + position;
    if (!this._cells[place]) return;
    if (before) before.tabIndex = -1;
    this._chosen = place;
    this._cells[place].tabIndex = 0;
    if (position !== null) this._cells[place].setAttribute("aria-selected", "true");
  }

  /**
   * @param {Trajectory} trajectory
   * @param {number} frame
   * @param {Profile} profile
   * @param {Float32Array | null} row what the chosen token attends to, its own keys last
   * @param {Colours} colours
   */
  draw(trajectory, frame, profile, row, colours) {
    this._redraw = () => this.draw(trajectory, frame, profile, row, colours);
    const places = this._places;
    const context = sized(this._canvas, this._canvas.clientWidth, this._canvas.clientHeight);
    context.clearRect(0, 0, this._canvas.clientWidth, this._canvas.clientHeight);
    context.fillStyle = colours.given;
    for (let place = this._nSinks; place < this._nSinks + this._nGiven; place += 1) {
      const [left, top, width, height] = places.subarray(4 * place, 4 * place + 4);
      context.fillRect(left, top, width, height - BAR - 4);
    }
    if (row) this._tint(context, row, colours);
    if (!profile.prepare(frame) || places.length < 4 * trajectory.nKeys) return;
    const { nSinks, length } = trajectory.facts;
    const [received, sinks] = [frame * trajectory.nKeys, frame * length - nSinks];
    for (let key = 0; key < trajectory.nKeys; key += 1) {
      const [left, top, width, height] = places.subarray(4 * key, 4 * key + 4);
      const share = profile.received[received + key];
      const isSink = key >= nSinks && profile.nSinkHeads[sinks + key] > 0;
      context.fillStyle = key < nSinks ? colours.own : isSink ? colours.sink : colours.bar;
      const high = Math.max(1, BAR * Math.min(1, Math.sqrt(share / FULL)));
      context.fillRect(left + 1, top + height - high, width - 2, high);
      if (isSink) {
        context.strokeStyle = colours.sink;
        context.lineWidth = 1.5;
        context.strokeRect(left + 1, top + 1, width - 2, height - 2);
      }
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Float32Array} row
   * @param {Colours} colours
   */
  _tint(context, row, colours) {
    const skipped = this._cells.length - row.length; // a sink logit has no column in rows
    let most = 0;
    for (const share of row) most = Math.max(most, share);
    context.fillStyle = colours.row;
    for (let key = 0; key < row.length && most > 0; key += 1) {
      const [left, top, width, height] = this._places.subarray(4 * (key + skipped), 4 * (key + skipped) + 4);
      context.globalAlpha = 0.55 * Math.sqrt(row[key] / most);
      context.fillRect(left, top, width, height - BAR - 4);
    }
    context.globalAlpha = 1;
  }

  _measure() {
    const ground = this._list.getBoundingClientRect();
    this._places = new Float32Array(4 * this._cells.length);
    this._cells.forEach((cell, place) => {
      const box = cell.getBoundingClientRect();
      this._places.set([box.left - ground.left, box.top - ground.top, box.width, box.height], 4 * place);
    });
    this._redraw?.();
  }

  /** @param {Event} event */
  _clicked(event) {
    const cell = event.target instanceof Element ? event.target.closest(".cell") : null;
    if (cell instanceof HTMLElement) this._go(Number(cell.dataset.place));
  }

  /** @param {KeyboardEvent} event */
  _pressed(event) {
    const across = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (across !== undefined) this._go(Math.max(0, Math.min(this._cells.length - 1, this._chosen + across)), true);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this._go(this._beside(event.key === "ArrowUp" ? -1 : 1), true);
    else if (event.key === "Enter" || event.key === " ") this._go(this._chosen, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /**
   * The cell above or below the chosen one.
   * @param {number} way
   * @returns {number}
   */
  _beside(way) {
    const at = (/** @type {number} */ place) => this._places.subarray(4 * place, 4 * place + 4);
    const [left, top] = at(this._chosen);
    let [best, least] = [this._chosen, Infinity];
    for (let place = 0; place < this._cells.length; place += 1) {
      const [x, y, , height] = at(place);
      const lines = Math.round((y - top) / height);
      if (lines !== way) continue;
      if (Math.abs(x - left) < least) [best, least] = [place, Math.abs(x - left)];
    }
    return best;
  }

  /**
   * @param {number} place
   * @param {boolean} [focus]
   */
  _go(place, focus = false) {
    this._pick(place - this._nSinks);
    if (focus) this._cells[place]?.focus();
  }
}
