// Draws one model: its text, where attention goes, its numbers and the chosen token. Does not know whether its source is a server or a file.

import { Detail, fillFacts, make } from "./detail.js";
import { HeadMap } from "./heads.js";
import { measure } from "./measures.js";
import { Profile } from "./profile.js";
import { Problem } from "./server.js";
import { TokenField } from "./tokens.js";
import { Trace } from "./trace.js";
import { counted, number, ownName, percent, place, sideWords, sinkDoes, stepWords } from "./words.js";

/** @typedef {import("./colours.js").Colours} Colours */
/** @typedef {import("./live.js").Source} Source */
/** @typedef {import("./measures.js").Choice} Choice */
/** @typedef {import("./measures.js").Measures} Measures */
/** @typedef {import("./server.js").Frame} Frame */

/**
 * @typedef {object} Moment
 * @property {number} step
 * @property {Choice} choice
 * @property {number | null} token
 * @property {Colours} colours
 */

const SETTLED = 120; // ms without a change before the server is asked about a token

/** @param {Choice} choice */
const nameOf = (choice) => `${choice.layer}/${choice.head}/${choice.rule}`;

/** @param {number} ms */
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

export class Side {
  /**
   * @param {string} model
   * @param {{pick: (token: number) => void, pickFrame: (frame: number, token: number) => void, pickHead: (layer: number, head: number) => void, learned: () => void, failed: (failure: unknown) => void}} told
   */
  constructor(model, told) {
    this.root = make("article", "", "side card");
    this.model = model;
    this._told = told;
    this._tag = make("p", "", "tag");
    this._words = make("ul", "", "words");
    const field = make("div");
    this._step = make("p", "", "step-words");
    const trace = make("div");
    this._facts = make("dl", "", "facts");
    const detail = make("section", "", "detail");
    const title = make("h2", model);
    this._heads = make("div");
    this.root.append(title, this._tag, field, this._step, trace, this._words, this._facts, this._heads, detail);
    this._field = new TokenField(field, `Text of ${model}`, told.pick);
    this._trace = new Trace(trace, told.pickFrame);
    this._traceRoot = trace;
    this._map = new HeadMap(this._heads, told.pickHead);
    this._heads.hidden = true;
    this._detail = new Detail(detail);
    detail.setAttribute("aria-label", `The chosen token in ${model}`);
    trace.hidden = true;
    /** @type {Source | null} */
    this.source = null;
    /** @type {Profile | null} */
    this._profile = null;
    /** @type {Measures | null} */
    this.measures = null;
    /** @type {Moment | null} */
    this._moment = null;
    this._laid = 0;
    this._leaving = new AbortController();
    this._asking = new AbortController();
    this._row = /** @type {Float32Array | null} */ (null);
    this._asked = "";
    /** @type {Colours | null} the colours in which the map of heads was drawn */
    this._mapped = null;
    this._chosen = false;
  }

  get nFrames() {
    return this.source?.trajectory.facts.nFrames ?? 0;
  }

  /** Stops all requests. */
  close() {
    this._leaving.abort();
    this._asking.abort();
  }

  /**
   * Shows a frame of a text while it is written.
   * @param {Frame} frame
   * @param {number} nSinks
   */
  stream(frame, nSinks) {
    if (this._laid !== frame.tokens.length) {
      this._laid = frame.tokens.length;
      const blank = frame.tokens.indexOf(null);
      this._field.lay(nSinks, frame.tokens.length, blank < 0 ? frame.tokens.length : blank);
      this._field.loosen();
    }
    this._field.write(frame.pieces);
    this._step.textContent = `Writing: ${frame.tokens.filter((token) => token === null).length} blanks left after step ${frame.step}.`;
  }

  /**
   * Shows a finished text, and loads its attention frame by frame, starting with the shown one.
   * @param {Source} source
   */
  open(source) {
    this.source = source;
    const { trajectory } = source;
    const { facts } = trajectory;
    const last = facts.nFrames - 1;
    this._tag.textContent = facts.nSinks ? `with ${facts.nSinks > 1 ? facts.nSinks : "a"} ${ownName(facts)}` : "without a sink token";
    this._tag.classList.toggle("has-sink", facts.nSinks > 0);
    this._field.lay(facts.nSinks, facts.length, facts.nGiven);
    this._field.write(Array.from({ length: facts.length }, (_, position) => trajectory.piece(last, position)));
    this._field.fix();
    this._traceRoot.hidden = false;
    this._traceRoot.style.setProperty("--steps", String(facts.nFrames));
    if (trajectory.nKnown < facts.nFrames) void this._loadAll(source);
  }

  /** @param {Source} source */
  async _loadAll(source) {
    const { trajectory } = source;
    const { signal } = this._leaving;
    while (trajectory.nKnown < trajectory.facts.nFrames && !signal.aborted) {
      const frame = this._nextUnknown();
      try {
        await source.load(frame, signal);
      } catch (failure) {
        if (signal.aborted) return;
        if (failure instanceof Problem && failure.kind === "full") {
          await wait(1000 * failure.seconds);
          continue;
        }
        this._told.failed(failure);
        return;
      }
      if (!signal.aborted) this._learned();
    }
  }

  _learned() {
    if (this._moment) this.show(this._moment);
    this._told.learned();
  }

  /** The frame nearest to the shown one that is not loaded. */
  _nextUnknown() {
    const known = this.source?.trajectory.known ?? new Uint8Array(0);
    const shown = this._frame();
    let best = 0;
    let least = Infinity;
    for (let frame = 0; frame < known.length; frame += 1) {
      const distance = Math.abs(frame - shown);
      if (!known[frame] && distance < least) [best, least] = [frame, distance];
    }
    return best;
  }

  _frame() {
    return Math.min(this._moment?.step ?? 0, this.nFrames - 1);
  }

  /** @param {Moment} moment */
  show(moment) {
    this._moment = moment;
    if (!this.source) return;
    const { trajectory } = this.source;
    const { nLayers, nHeads } = trajectory.facts;
    const there = (moment.choice.layer ?? 0) < nLayers && (moment.choice.head ?? 0) < nHeads;
    const choice = there ? moment.choice : { ...moment.choice, layer: null, head: null };
    const same = this._profile?.trajectory === trajectory && nameOf(this._profile.choice) === nameOf(choice);
    if (!same) [this._profile, this.measures] = [new Profile(trajectory, choice), null];
    const measured = this.measures !== null;
    if (!measured && trajectory.whole) this.measures = measure(trajectory, choice);
    if (!measured) this._say(there);
    if (this.measures && (!measured || moment.colours !== this._mapped)) {
      this._heads.hidden = false;
      this._map.draw(trajectory, choice, moment.colours);
      this._mapped = moment.colours;
    }
    this._draw(moment, choice);
  }

  /**
   * @param {Moment} moment
   * @param {Choice} choice
   */
  _draw(moment, choice) {
    const [profile, source] = [this._profile, this.source];
    if (!profile || !source) return;
    const { trajectory } = source;
    const frame = this._frame();
    this._field.write(this._pieces(frame));
    const token = this._token(moment.token);
    const asked = [token, frame, nameOf(choice), trajectory.known[frame]].join();
    if (asked !== this._asked && (token !== null || this._chosen)) this._choose(token, frame);
    this._asked = asked;
    this._field.draw(trajectory, frame, profile, this._row, moment.colours);
    this._trace.draw(profile, frame, token, moment.colours, `Attention received by each position of the text of ${this.model}, a row for each step.`);
    this._sayStep(frame);
  }

  /** @param {number} frame */
  _pieces(frame) {
    const { trajectory } = /** @type {Source} */ (this.source);
    return trajectory.tokens[frame].map((token) => (token === null ? null : (trajectory.pieces.get(token) ?? `#${token}`)));
  }

  /** @param {number | null} token */
  _token(token) {
    if (token === null || !this.source) return null;
    const { nSinks, length } = this.source.trajectory.facts;
    return token < -nSinks || token >= length ? null : token;
  }

  /** @param {boolean} there */
  _say(there) {
    const source = this.source;
    if (!source || !this._profile) return;
    const { trajectory } = source;
    const { facts } = trajectory;
    if (!this.measures) {
      this._words.replaceChildren(make("li", `Loading attention: ${trajectory.nKnown} of ${facts.nFrames} frames.`));
      this._facts.replaceChildren();
      return;
    }
    const found = this.measures;
    const { choice } = this._profile;
    const lines = sideWords(found, facts, sinkDoes(choice.rule, trajectory.rules), counted(choice));
    if (!there) lines.unshift("This model has no such layer or head, so all layers and heads are shown.");
    this._words.replaceChildren(...lines.map((line) => make("li", line)));
    /** @type {[string, string, string][]} */
    const rows = [
      ["sink_mass", `attention on the ${ownName(facts)}`, percent(found.sink_mass)],
      ["top_received", "on the most attended token", percent(found.top_received)],
      ["content_sinks", "content sinks of a head", number(found.content_sinks)],
      ["sink_heads", `${counted(choice)} with a content sink`, percent(found.sink_heads)],
      ["turnover", "turnover of content sinks", percent(found.turnover)],
      ["moved", "tokens moved a step", number(found.moved)],
    ];
    fillFacts(this._facts, rows.slice(facts.nSinks ? 0 : 1));
    this._facts.setAttribute("aria-label", `Means over steps, ${place(this._profile.choice)}`);
  }

  /** @param {number} frame */
  _sayStep(frame) {
    const [profile, source] = [this._profile, this.source];
    if (!profile || !source) return;
    const { trajectory } = source;
    const { facts } = trajectory;
    if (!trajectory.known[frame]) {
      this._step.textContent = "Loading the attention of this step…";
      return;
    }
    const one = profile.choice.layer !== null && profile.choice.head !== null ? [profile.choice.layer, profile.choice.head] : null;
    const now = measure(trajectory, profile.choice, frame, frame);
    const topOf = (/** @type {number} */ at) => {
      if (!one || at < 0 || !trajectory.known[at]) return null;
      const position = trajectory.top[(at * facts.nLayers + one[0]) * facts.nHeads + one[1]];
      const share = profile.prepare(at) ? profile.received[at * trajectory.nKeys + facts.nSinks + position] : 0;
      return { position, piece: trajectory.piece(at, position), share, sink: profile.nSinkHeads[at * facts.length + position] > 0 };
    };
    this._step.textContent = stepWords(now, topOf(frame), topOf(frame - 1), facts);
  }

  /**
   * @param {number | null} token
   * @param {number} frame
   */
  _choose(token, frame) {
    this._asking.abort();
    this._row = null;
    this._chosen = token !== null;
    if (token === null || !this.source || !this._profile) {
      this._field.choose(null);
      this._detail.hide();
      return;
    }
    this._field.choose(token);
    this._detail.show(this.source.trajectory, frame, token, this._profile);
    if (token < 0) return;
    this._asking = new AbortController();
    void this._ask(token, frame, this.source, this._profile, this._asking.signal);
  }

  /**
   * @param {number} token
   * @param {number} frame
   * @param {Source} source
   * @param {Profile} profile
   * @param {AbortSignal} signal
   */
  async _ask(token, frame, source, profile, signal) {
    const { trajectory } = source;
    const { layer, head } = profile.choice;
    try {
      if (!source.offline) await wait(SETTLED);
      if (signal.aborted) return;
      const row = await source.row(frame, layer, head, token, signal);
      const candidates = await source.candidates(frame, token, signal);
      if (signal.aborted || !this._moment) return;
      this._row = row;
      this._detail.showRow(trajectory, frame, row);
      this._detail.showCandidates(candidates, trajectory.piece(frame, token) === null);
      this._field.draw(trajectory, frame, profile, row, this._moment.colours);
    } catch (failure) {
      if (!signal.aborted) this._told.failed(failure);
    }
  }
}
