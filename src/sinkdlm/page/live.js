// Reads a finished request that the server still holds, frame by frame as needed.

import { bytesOf } from "./bytes.js";
import { get, Problem } from "./server.js";
import { effortOf, Trajectory } from "./trajectory.js";

/**
 * The source of a side's numbers: a server or a file.
 * @typedef {object} Source
 * @property {Trajectory} trajectory
 * @property {(frame: number, signal: AbortSignal) => Promise<void>} load
 * @property {(frame: number, layer: number | null, head: number | null, position: number, signal: AbortSignal) => Promise<Float32Array | null>} row null: not recorded
 * @property {(frame: number, position: number, signal: AbortSignal) => Promise<{piece: string, probability: number}[]>} candidates
 * @property {() => Promise<object>} side for a recording
 * @property {boolean} offline whether it answers without a server
 */

const SOME_FRAMES = 256; // in one answer
const MOST_VALUES = 1 << 27; // numbers of received attention that a tab holds for one text

/**
 * @param {string} id
 * @param {AbortSignal} signal
 * @returns {Promise<Source>}
 */
export async function openRequest(id, signal) {
  const base = `/v1/inspect/${encodeURIComponent(id)}`;
  const told = await get(base, signal);
  const choice = told.choices[0];
  if (choice.frames * told.n_layers * told.n_heads * (told.n_sinks + choice.length) > MOST_VALUES) {
    throw new Problem("The attention of all steps and heads of this text is too large for the page. Take fewer steps or tokens.", "refused");
  }
  const trajectory = new Trajectory({
    model: told.model, nLayers: told.n_layers, nHeads: told.n_heads, nSinks: told.n_sinks, sinkKind: told.sink_kind,
    nGiven: choice.n_given, nFrames: choice.frames, length: choice.length, effort: effortOf(choice),
  });
  for (let start = 0; start < choice.frames; start += SOME_FRAMES) {
    takeFrames(trajectory, await get(`${base}/0/frames?start=${start}&count=${SOME_FRAMES}`, signal));
  }
  return {
    trajectory,
    async load(frame, leaving) {
      if (trajectory.known[frame]) return;
      const look = await get(`${base}/0/${frame}/look`, leaving);
      trajectory.rules = look.rules;
      const { received, values, absolute, relative, top } = look;
      const bytes = { received: bytesOf(received.data), values: bytesOf(values.data) };
      trajectory.take(frame, { ...bytes, scale: received.scale, valueScale: values.scale, absolute, relative, top });
    },
    async row(frame, layer, head, position, leaving) {
      const given = new URLSearchParams({ position: String(position) });
      if (layer !== null) given.set("layer", String(layer));
      if (layer !== null && head !== null) given.set("head", String(head));
      const packed = await get(`${base}/0/${frame}/row?${given}`, leaving);
      return Float32Array.from(bytesOf(packed.data), (level) => level * packed.scale);
    },
    async candidates(frame, position, leaving) {
      return (await get(`${base}/0/${frame}/candidates?position=${position}&k=5`, leaving)).candidates;
    },
    side: () => get(`${base}/0/recording`),
    offline: false,
  };
}

/**
 * @param {Trajectory} trajectory
 * @param {any} told
 */
function takeFrames(trajectory, told) {
  for (const frame of told.frames) {
    trajectory.tokens.push(frame.tokens);
    trajectory.confidence.push(bytesOf(frame.confidence));
  }
  for (const [id, text] of Object.entries(told.pieces)) trajectory.pieces.set(Number(id), String(text));
  for (const [id, kind] of Object.entries(told.kinds)) trajectory.kinds.set(Number(id), String(kind));
}
