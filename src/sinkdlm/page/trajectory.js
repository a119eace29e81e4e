// One model's trajectory from blanks to text, in typed arrays: tokens and attention of every frame.
//
// N frames (frame i is what step i saw, the last one the finished text), E layers, H heads, T tokens, S sinks, K = S + T keys.

/**
 * @typedef {object} Facts
 * @property {string} model
 * @property {number} nLayers
 * @property {number} nHeads
 * @property {number} nSinks
 * @property {string | null} sinkKind
 * @property {number} nGiven tokens of the prompt
 * @property {number} nFrames
 * @property {number} length
 * @property {Effort | null} [effort]
 */

/**
 * What writing a text took.
 * @typedef {object} Effort
 * @property {number} forwards
 * @property {number} accepted tokens beyond those of one step per forward
 * @property {number} tokensPerForward
 */

/**
 * @param {any} told a request of the server, or a side of a recording: older ones do not have it
 * @returns {Effort | null}
 */
export function effortOf(told) {
  const { forwards, accepted, tokens_per_forward: tokensPerForward } = told;
  return [forwards, accepted, tokensPerForward].every(Number.isFinite) ? { forwards, accepted, tokensPerForward } : null;
}

/**
 * Statistics of one forward.
 * @typedef {object} Look
 * @property {Uint8Array} received (E, H, K)
 * @property {number} scale
 * @property {Uint8Array} values (E, S or 0 + T)
 * @property {number} valueScale
 * @property {ArrayLike<number>} absolute content sinks by the absolute rule, as indices into (E, H, T)
 * @property {ArrayLike<number>} relative
 * @property {ArrayLike<number>} top (E, H)
 */

/** @typedef {"absolute" | "relative"} Rule the rule for content sinks */

/** @type {Rule[]} */
export const RULES = ["absolute", "relative"];

export class Trajectory {
  /** @param {Facts} facts */
  constructor(facts) {
    const { nFrames, nLayers, nHeads, nSinks, length } = facts;
    this.facts = facts;
    this.rules = { threshold: 0.3, margin: 3 };
    this.nKeys = nSinks + length;
    /** @type {(number | null)[][]} */
    this.tokens = [];
    /** @type {(Uint8Array | null)[]} 0: not written by the model, else (byte - 1) / 254 */
    this.confidence = [];
    /** @type {Map<number, string>} */
    this.pieces = new Map();
    /** @type {Map<number, string>} */
    this.kinds = new Map();
    const nHeadsInAll = nFrames * nLayers * nHeads;
    this.received = new Uint8Array(nHeadsInAll * this.nKeys);
    /** (N, E, H, T) each */
    this.isSink = { absolute: new Uint8Array(nHeadsInAll * length), relative: new Uint8Array(nHeadsInAll * length) };
    this.top = new Int32Array(nHeadsInAll);
    this.scales = new Float64Array(nFrames);
    /** @type {(Uint8Array | null)[]} */
    this.values = new Array(nFrames).fill(null);
    this.valueScales = new Float64Array(nFrames);
    this.known = new Uint8Array(nFrames);
    this.nKnown = 0;
  }

  /** The number of frames that a step saw, without the finished text. */
  get nSteps() {
    return Math.max(1, this.facts.nFrames - 1);
  }

  /** Whether all frames that steps saw are loaded. */
  get whole() {
    for (let frame = 0; frame < this.nSteps; frame += 1) if (!this.known[frame]) return false;
    return true;
  }

  /**
   * @param {number} frame
   * @param {Look} look
   */
  take(frame, look) {
    const { nLayers, nHeads, length } = this.facts;
    const nHeadsInFrame = nLayers * nHeads;
    this.received.set(look.received, frame * nHeadsInFrame * this.nKeys);
    this.scales[frame] = look.scale;
    this.values[frame] = look.values;
    this.valueScales[frame] = look.valueScale;
    for (const rule of RULES) {
      const [sinks, places, start] = [this.isSink[rule], look[rule], frame * nHeadsInFrame * length];
      for (let at = 0; at < places.length; at += 1) sinks[start + places[at]] = 1;
    }
    this.top.set(look.top, frame * nHeadsInFrame);
    this.nKnown += 1 - this.known[frame];
    this.known[frame] = 1;
  }

  /**
   * The text of a token in a frame; null for a blank.
   * @param {number} frame
   * @param {number} position
   * @returns {string | null}
   */
  piece(frame, position) {
    const token = this.tokens[frame]?.[position] ?? null;
    return token === null ? null : (this.pieces.get(token) ?? `#${token}`);
  }

  /**
   * @param {number} frame
   * @param {number} position
   * @returns {string}
   */
  kind(frame, position) {
    const token = this.tokens[frame][position];
    return token === null ? "mask" : (this.kinds.get(token) ?? "word");
  }

  /**
   * The value norm of a key (sinks first), mean over layers if none is given; null for a sink logit, which has no value.
   * @param {number} frame
   * @param {number | null} layer
   * @param {number} key
   * @returns {number | null}
   */
  valueNorm(frame, layer, key) {
    const values = this.values[frame];
    if (!values) return null;
    const { nLayers } = this.facts;
    const width = values.length / nLayers;
    const column = key - (this.nKeys - width);
    if (column < 0) return null;
    const layers = layer === null ? [...Array(nLayers).keys()] : [layer];
    const sum = layers.reduce((total, one) => total + values[one * width + column], 0);
    return (sum / layers.length) * this.valueScales[frame];
  }
}
