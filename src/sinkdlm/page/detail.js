// Draws the chosen token: its kind, the attention it receives, what it attends to, and what it could become.

import { number, ownName, percent } from "./words.js";
import { Profile } from "./profile.js";
import { Trajectory } from "./trajectory.js";
import { quoted, visible } from "./visible.js";

const MOST = 3; // tokens of a row that are named
const KINDS = new Map([["mask", "still blank"], ["special", "special token"], ["space", "white space"], ["punctuation", "punctuation"], ["word", "word or part of one"]]);

/**
 * @param {string} name
 * @param {string} [text]
 * @param {string} [kind]
 * @returns {HTMLElement}
 */
export function make(name, text = "", kind = "") {
  const found = document.createElement(name);
  found.textContent = text;
  if (kind) found.className = kind;
  return found;
}

/**
 * @param {HTMLElement} list
 * @param {[string, string, string][]} facts name in the data set, label, value
 */
export function fillFacts(list, facts) {
  list.replaceChildren(
    ...facts.map(([name, label, value]) => {
      const group = make("div");
      const shown = make("dd", value);
      shown.dataset.quantity = name;
      group.append(make("dt", label), shown);
      return group;
    }),
  );
}

export class Detail {
  /** @param {HTMLElement} root */
  constructor(root) {
    this._title = make("h3");
    this._facts = make("dl", "", "facts");
    this._looks = make("p", "", "looks");
    this._candidates = make("ol", "", "candidates");
    this._caption = make("p", "", "note");
    root.replaceChildren(this._title, this._facts, this._looks, this._caption, this._candidates);
    this._root = root;
    this._root.hidden = true;
  }

  hide() {
    this._root.hidden = true;
  }

  /**
   * @param {Trajectory} trajectory
   * @param {number} frame
   * @param {number} position
   * @param {Profile} profile
   */
  show(trajectory, frame, position, profile) {
    const { nSinks, sinkKind } = trajectory.facts;
    const own = position < 0;
    const key = nSinks + position;
    const piece = own ? null : trajectory.piece(frame, position);
    this._root.hidden = false;
    this._title.textContent = own ? `The ${ownName(trajectory.facts)}` : `${piece === null ? "A blank" : quoted(piece)} at ${position}`;
    const norm = trajectory.valueNorm(frame, profile.choice.layer, key);
    const received = profile.prepare(frame) ? profile.received[frame * trajectory.nKeys + key] : null;
    /** @type {[string, string, string][]} */
    const facts = [["received", "receives", percent(received)], ["value_norm", "value norm", number(norm)]];
    if (!own) {
      const kind = trajectory.kind(frame, position);
      facts.unshift(["kind", "kind", KINDS.get(kind) ?? kind]);
      facts.push(...this._origin(trajectory, frame, position));
    }
    fillFacts(this._facts, facts);
    const alone = sinkKind === "register" ? "It attends to every token, as any token does." : "It attends to nothing but itself, so it is the same for every text.";
    this._looks.textContent = own ? alone : "";
    if (own) this._candidates.replaceChildren();
    this._caption.textContent = "";
  }

  /**
   * @param {Trajectory} trajectory
   * @param {number} frame
   * @param {number} position
   * @returns {[string, string, string][]}
   */
  _origin(trajectory, frame, position) {
    if (position < trajectory.facts.nGiven) return [["origin", "comes from", "the prompt"]];
    if (trajectory.piece(frame, position) === null) return [];
    let written = frame;
    while (written > 0 && trajectory.piece(written - 1, position) !== null) written -= 1;
    const sure = trajectory.confidence[frame]?.[position] ?? 0;
    const words = sure ? `, ${percent((sure - 1) / 254)} sure` : "";
    return written ? [["origin", "written", `in step ${written}${words}`]] : [];
  }

  /**
   * @param {Trajectory} trajectory
   * @param {number} frame
   * @param {Float32Array | null} row
   */
  showRow(trajectory, frame, row) {
    if (!row) {
      this._looks.textContent = "This recording does not hold what a token attends to: a row for every token would make the file too large.";
      return;
    }
    const before = trajectory.nKeys - trajectory.facts.length - (trajectory.nKeys - row.length);
    const order = [...row.keys()].sort((one, other) => row[other] - row[one]).slice(0, MOST);
    const named = order.map((key) => {
      const piece = key < before ? `the ${ownName(trajectory.facts)}` : this._named(trajectory, frame, key - before);
      return `${percent(row[key])} on ${piece}`;
    });
    this._looks.textContent = `It attends most to: ${named.join(", ")}.`;
  }

  /**
   * @param {Trajectory} trajectory
   * @param {number} frame
   * @param {number} position
   * @returns {string}
   */
  _named(trajectory, frame, position) {
    const piece = trajectory.piece(frame, position);
    return `${piece === null ? "the blank" : quoted(piece)} at ${position}`;
  }

  /**
   * @param {{piece: string, probability: number}[]} candidates
   * @param {boolean} blank
   */
  showCandidates(candidates, blank) {
    this._caption.textContent = candidates.length ? (blank ? "Most likely tokens for this blank:" : "Tokens that the model finds most likely here:") : "";
    this._candidates.replaceChildren(
      ...candidates.map(({ piece, probability }) => {
        const line = make("li");
        const bar = make("span", "", "chance");
        bar.style.width = `${Math.max(1, 100 * probability)}%`;
        line.append(make("code", visible(piece)), make("span", percent(probability), "share"), bar);
        return line;
      }),
    );
  }
}
