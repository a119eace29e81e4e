// Measures sinks along a trajectory, for all heads, one layer or one head.
//
// Definitions are those of `sinkdlm analyze`: quantities are per layer, a total is the mean over the layers that have it, and null
// means that there was nothing to measure. Means are over what steps saw; the finished text is no step.

import { Trajectory } from "./trajectory.js";

/**
 * @typedef {object} Choice
 * @property {number | null} layer null: all
 * @property {number | null} head null: all
 * @property {import("./trajectory.js").Rule} rule
 */

/**
 * @typedef {object} Measures
 * @property {number | null} sink_mass attention on the model's own sinks
 * @property {number | null} top_received attention on the most attended token of the text
 * @property {number | null} content_sinks content sinks of a head at a step
 * @property {number | null} sink_heads share of heads and steps with a content sink
 * @property {number | null} turnover of a head's content sinks between consecutive steps
 * @property {number | null} moved tokens between a head's top content sinks at consecutive steps
 */

/** @type {(keyof Measures)[]} */
const NAMES = ["sink_mass", "top_received", "content_sinks", "sink_heads", "turnover", "moved"];

/**
 * @param {Trajectory} trajectory
 * @param {Choice} choice
 * @returns {[number[], number[]]} layers and heads
 */
export function chosen(trajectory, choice) {
  const { nLayers, nHeads } = trajectory.facts;
  const layers = choice.layer === null ? [...Array(nLayers).keys()] : [choice.layer];
  const heads = choice.head === null || choice.layer === null ? [...Array(nHeads).keys()] : [choice.head];
  return [layers, heads];
}

/**
 * Measures the frames from first to last, both included; all must be known.
 * @param {Trajectory} trajectory
 * @param {Choice} choice
 * @param {number} first
 * @param {number} last
 * @returns {Measures}
 */
export function measure(trajectory, choice, first = 0, last = trajectory.nSteps - 1) {
  const [layers, heads] = chosen(trajectory, choice);
  const found = layers.map((layer) => measureLayer(trajectory, trajectory.isSink[choice.rule], layer, heads, first, last));
  /** @type {Measures} */
  const totals = { sink_mass: null, top_received: null, content_sinks: null, sink_heads: null, turnover: null, moved: null };
  for (const name of NAMES) totals[name] = mean(found.map((one) => one[name]));
  return totals;
}

/**
 * @param {(number | null)[]} values
 * @returns {number | null}
 */
function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((total, value) => total + value, 0) / known.length : null;
}

/**
 * @param {Trajectory} trajectory
 * @param {Uint8Array} isSink
 * @param {number} layer
 * @param {number[]} heads
 * @param {number} first
 * @param {number} last
 * @returns {Measures}
 */
function measureLayer(trajectory, isSink, layer, heads, first, last) {
  const { nLayers, nHeads, nSinks, length } = trajectory.facts;
  let [mass, strongest, members, held, distance, pairs, moved, both, n] = [0, 0, 0, 0, 0, 0, 0, 0, 0];
  for (const head of heads) {
    let [before, beforeTop, beforeSize] = [-1, -1, 0];
    for (let frame = first; frame <= last; frame += 1) {
      const place = (frame * nLayers + layer) * nHeads + head;
      const [keys, sinks, top] = [place * trajectory.nKeys, place * length, trajectory.top[place]];
      for (let key = 0; key < nSinks; key += 1) mass += trajectory.received[keys + key] * trajectory.scales[frame];
      strongest += trajectory.received[keys + nSinks + top] * trajectory.scales[frame];
      let [size, shared] = [0, 0];
      for (let token = 0; token < length; token += 1) {
        const sink = isSink[sinks + token];
        size += sink;
        if (before >= 0) shared += sink & isSink[before + token];
      }
      members += size;
      held += size > 0 ? 1 : 0;
      const union = size + beforeSize - shared;
      if (before >= 0 && union > 0) {
        distance += 1 - shared / union;
        pairs += 1;
      }
      if (before >= 0 && size > 0 && beforeSize > 0) {
        moved += Math.abs(top - beforeTop);
        both += 1;
      }
      [before, beforeTop, beforeSize] = [sinks, top, size];
      n += 1;
    }
  }
  return {
    sink_mass: mass / n,
    top_received: strongest / n,
    content_sinks: members / n,
    sink_heads: held / n,
    turnover: pairs ? distance / pairs : null,
    moved: both ? moved / both : null,
  };
}
