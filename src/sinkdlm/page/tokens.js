// Draws the text as one cell a token, with the attention it receives as a bar beneath; the model's own sinks stand in front.
//
// Bars and tints lie on one canvas behind the cells, whose places are read once, so a step changes a few texts and draws once.

import { sized } from "./colours.js";
import { Profile } from "./profile.js";
import { Trajectory } from "./trajectory.js";
import { visible } from "./visible.js";

/** @typedef {import("./colours.js").Colours} Colours */

const BAR = 16; // px, the tallest
const FULL = 0.3; // the share at which a bar is full, the same in both models
const SETTLED = 150; // ms
const MARGIN = 60; // px above and below what is in sight
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
    this._root = root;
    root.classList.add("field");
    this._scrolled = 0; // kept here, as reading it would force a layout in the middle of a step
    const scrolled = () => {
      this._scrolled = root.scrollTop;
      this._writeRest();
    };
    root.addEventListener("scroll", scrolled, { passive: true });
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
    this._width = 0;
    this._height = 0;
    this._seen = 0;
    /** @type {(string | null)[]} */
    this._wanted = [];
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._describing = undefined;
    this._places = new Float32Array(0);
    /** @type {(() => void) | null} */
    this._redraw = null;
    this._chosen = 0;
    this._list.addEventListener("click", (event) => this._clicked(event));
    this._list.addEventListener("keydown", (event) => this._pressed(event));
    new ResizeObserver(() => this._measure()).observe(this._list);
  }

  /**
   * Makes the cells, the model's own sinks in front.
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
    this._wanted = [];
    this._list.replaceChildren(...this._cells);
    if (this._cells.length) this._cells[this._chosen < this._cells.length ? this._chosen : 0].tabIndex = 0;
  }

  /**
   * @param {(string | null)[]} pieces null: still a blank
   */
  write(pieces) {
    this._wanted = pieces;
    const [first, last] = this._inSight();
    for (let token = 0; token < pieces.length; token += 1) {
      const top = this._places[4 * (this._nSinks + token) + 1];
      if (!(top < first || top > last)) this._put(token, pieces[token]);
    }
  }

  /** Writes the texts of cells out of sight: when nothing has moved for a while, or when they come into sight. */
  _writeRest() {
    this._wanted.forEach((text, token) => this._put(token, text));
  }

  /** @returns {[number, number]} the visible range, or everything while the cells' places are not known */
  _inSight() {
    if (!this._list.classList.contains("fixed")) return [-Infinity, Infinity];
    return [this._scrolled - MARGIN, this._scrolled + this._seen + MARGIN];
  }

  /**
   * @param {number} token
   * @param {string | null} text
   */
  _put(token, text) {
    if (this._texts[token] === text) return;
    this._texts[token] = text;
    const cell = this._cells[this._nSinks + token];
    const shown = text === null ? BLANK : visible(text);
    if (cell.firstChild) cell.firstChild.nodeValue = shown;
    else cell.append(shown);
    cell.classList.toggle("blank", text === null);
  }

  /** Fixes every cell's width to that of its present text, so that no step moves other tokens. */
  fix() {
    const widths = this._cells.map((cell) => cell.getBoundingClientRect().width);
    this._cells.forEach((cell, place) => {
      cell.style.width = `${widths[place]}px`;
    });
    this._list.classList.add("fixed");
    this._measure();
  }

  /** Frees the cells' widths again, for a text that is being written. */
  loosen() {
    this._list.classList.remove("fixed");
  }

  /** @param {number | null} position null: no token; the keyboard returns to the last one */
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
   * @param {Float32Array | null} row attention of the chosen token, sinks first and tokens last
   * @param {Colours} colours
   */
  draw(trajectory, frame, profile, row, colours) {
    this._redraw = () => this.draw(trajectory, frame, profile, row, colours);
    const context = sized(this._canvas, this._width, this._height);
    context.clearRect(0, 0, this._width, this._height);
    this._fill(context, colours.given, this._nSinks, this._nSinks + this._nGiven);
    if (row) this._tint(context, row, colours);
    if (!profile.prepare(frame) || this._places.length < 4 * trajectory.nKeys) return;
    const { nSinks, length } = trajectory.facts;
    const [received, counts] = [frame * trajectory.nKeys, frame * length - nSinks];
    /** @type {number[][]} the model's own sinks, content sinks, other tokens */
    const groups = [[], [], []];
    for (let key = 0; key < trajectory.nKeys; key += 1) groups[key < nSinks ? 0 : profile.nSinkHeads[counts + key] > 0 ? 1 : 2].push(key);
    [colours.own, colours.sink, colours.bar].forEach((colour, group) => {
      context.fillStyle = colour;
      context.beginPath();
      for (const key of groups[group]) this._bar(context, key, profile.received[received + key]);
      context.fill();
    });
    this._outline(context, groups[1], colours.sink);
    this._describe(groups[1]);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} key
   * @param {number} share
   */
  _bar(context, key, share) {
    const [at, high] = [4 * key, Math.max(1, BAR * Math.min(1, Math.sqrt(share / FULL)))];
    const places = this._places;
    context.rect(places[at] + 1, places[at + 1] + places[at + 3] - high, places[at + 2] - 2, high);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number[]} keys
   * @param {string} colour
   */
  _outline(context, keys, colour) {
    const places = this._places;
    [context.strokeStyle, context.lineWidth] = [colour, 1.5];
    context.beginPath();
    for (const key of keys) context.rect(places[4 * key] + 1, places[4 * key + 1] + 1, places[4 * key + 2] - 2, places[4 * key + 3] - 2);
    context.stroke();
  }

  /**
   * Fills the ground behind texts, from one cell up to another.
   * @param {CanvasRenderingContext2D} context
   * @param {string} colour
   * @param {number} from
   * @param {number} to
   */
  _fill(context, colour, from, to) {
    const places = this._places;
    context.fillStyle = colour;
    context.beginPath();
    for (let place = from; place < to; place += 1) context.rect(places[4 * place], places[4 * place + 1], places[4 * place + 2], places[4 * place + 3] - BAR - 4);
    context.fill();
  }

  /**
   * Describes content sinks to screen readers, once nothing has moved for a while.
   * @param {number[]} sinks places of cells
   */
  _describe(sinks) {
    clearTimeout(this._describing);
    this._describing = setTimeout(() => {
      this._writeRest();
      const now = new Set(sinks);
      this._cells.forEach((cell, place) => {
        if (now.has(place)) cell.setAttribute("aria-description", "content sink");
        else cell.removeAttribute("aria-description");
        if (cell.classList.contains("blank")) cell.setAttribute("aria-label", "blank");
        else cell.removeAttribute("aria-label");
      });
    }, SETTLED);
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
    this._width = ground.width;
    this._height = ground.height;
    this._seen = this._root.clientHeight;
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
