// Reads a recording: the same views from a file, without a server. Other files are refused with a message.

import { bytesOf, inflated } from "./bytes.js";
import { effortOf, Trajectory } from "./trajectory.js";

/** @typedef {import("./live.js").Source} Source */

/**
 * @typedef {object} Recording
 * @property {Record<string, any>} asked
 * @property {Source[]} sources
 */

const MOST_VALUES = 1 << 26; // of one array: far more than a recording has, far less than a tab can hold

/**
 * @param {string} text
 * @returns {Promise<Recording>}
 */
export async function readRecording(text) {
  let told;
  try {
    told = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON, so not a recording. Choose a recording.json.");
  }
  if (told?.format !== "sinkdlm-recording") throw new Error("This file is not a recording of sinkdlm. Choose a recording.json.");
  if (told.version !== 1) throw new Error(`This recording has version ${Number(told.version)}, but this page reads version 1. Record it again.`);
  try {
    return { asked: told.asked ?? {}, sources: await Promise.all(told.sides.map(openSide)) };
  } catch (failure) {
    throw new Error(`This recording is damaged: ${failure instanceof Error ? failure.message : "it cannot be read"}.`);
  }
}

/**
 * @param {any} packed
 * @returns {Promise<Uint8Array>}
 */
async function levels(packed) {
  const size = packed.shape.reduce((/** @type {number} */ all, /** @type {number} */ one) => all * one, 1);
  if (!(size > 0 && size <= MOST_VALUES)) throw new Error("an array is empty or too large");
  return inflated(packed.data, size);
}

/**
 * @param {any} side
 * @returns {Promise<Source>}
 */
async function openSide(side) {
  const nFrames = side.tokens.length;
  const trajectory = new Trajectory({
    model: String(side.model), nLayers: side.n_layers, nHeads: side.n_heads, nSinks: side.n_sinks, sinkKind: side.sink_kind,
    nGiven: side.n_given, nFrames, length: side.tokens[0].length, effort: effortOf(side),
  });
  trajectory.tokens = side.tokens;
  trajectory.rules = { threshold: Number(side.rules.threshold), margin: Number(side.rules.margin) };
  trajectory.confidence = side.confidence ? side.confidence.map(bytesOf) : new Array(nFrames).fill(null);
  for (const [id, text] of Object.entries(side.pieces)) trajectory.pieces.set(Number(id), String(text));
  for (const [id, kind] of Object.entries(side.kinds)) trajectory.kinds.set(Number(id), String(kind));
  const [received, values] = await Promise.all([levels(side.received), levels(side.values)]);
  const [size, width] = [received.length / nFrames, values.length / nFrames];
  if (size !== side.n_layers * side.n_heads * trajectory.nKeys) throw new Error("received attention has the wrong shape");
  for (let frame = 0; frame < nFrames; frame += 1) {
    trajectory.take(frame, {
      received: received.subarray(frame * size, (frame + 1) * size),
      scale: side.received.scales[frame],
      values: values.subarray(frame * width, (frame + 1) * width),
      valueScale: side.values.scales[frame],
      absolute: side.absolute[frame],
      relative: side.relative[frame],
      top: side.top[frame],
    });
  }
  const rows = side.rows ? await levels(side.rows) : null;
  return {
    trajectory,
    load: async () => {},
    row: async (frame, layer, head, position) => (rows ? meanRow(side, rows, frame, layer, head, position) : null),
    candidates: async (frame, position) =>
      (side.candidates?.[frame]?.[position] ?? []).map((/** @type {[number, number]} */ [token, probability]) => ({
        piece: trajectory.pieces.get(token) ?? `#${token}`,
        probability,
      })),
    side: async () => side,
    offline: true,
  };
}

/**
 * @param {any} side
 * @param {Uint8Array} rows (N, E, H, T, K)
 * @param {number} frame
 * @param {number | null} layer
 * @param {number | null} head
 * @param {number} position
 * @returns {Float32Array}
 */
function meanRow(side, rows, frame, layer, head, position) {
  const [, nLayers, nHeads, length, nKeys] = side.rows.shape;
  const found = new Float32Array(nKeys);
  let n = 0;
  for (let one = layer ?? 0; one <= (layer ?? nLayers - 1); one += 1) {
    const only = layer === null ? null : head;
    for (let other = only ?? 0; other <= (only ?? nHeads - 1); other += 1) {
      const start = (((frame * nLayers + one) * nHeads + other) * length + position) * nKeys;
      for (let key = 0; key < nKeys; key += 1) found[key] += rows[start + key];
      n += 1;
    }
  }
  for (let key = 0; key < nKeys; key += 1) found[key] *= side.rows.scales[frame] / n;
  return found;
}
