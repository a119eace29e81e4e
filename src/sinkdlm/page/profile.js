// Prepares received attention of the chosen heads for drawing: one number for each frame and key, computed once a choice.

import { chosen } from "./measures.js";
import { Trajectory } from "./trajectory.js";

/** @typedef {import("./measures.js").Choice} Choice */

export class Profile {
  /**
   * @param {Trajectory} trajectory
   * @param {Choice} choice
   */
  constructor(trajectory, choice) {
    const { nFrames, length } = trajectory.facts;
    this.trajectory = trajectory;
    this.choice = choice;
    const [layers, heads] = chosen(trajectory, choice);
    this._layers = layers;
    this._heads = heads;
    this.nHeads = this._layers.length * this._heads.length;
    this.received = new Float32Array(nFrames * trajectory.nKeys);
    this.nSinkHeads = new Uint16Array(nFrames * length); // number of heads in which a token is a content sink
    this.ready = new Uint8Array(nFrames);
  }

  /**
   * @param {number} frame
   * @returns {boolean} whether there is something to draw
   */
  prepare(frame) {
    if (this.ready[frame]) return true;
    const { trajectory, nHeads } = this;
    if (!trajectory.known[frame]) return false;
    const { nLayers, nHeads: width, length } = trajectory.facts;
    const [nKeys, isSink] = [trajectory.nKeys, trajectory.isSink[this.choice.rule]];
    const sums = this.received.subarray(frame * nKeys, (frame + 1) * nKeys);
    const counts = this.nSinkHeads.subarray(frame * length, (frame + 1) * length);
    for (const layer of this._layers) {
      for (const head of this._heads) {
        const place = (frame * nLayers + layer) * width + head;
        const [keys, sinks] = [place * nKeys, place * length];
        for (let key = 0; key < nKeys; key += 1) sums[key] += trajectory.received[keys + key];
        for (let token = 0; token < length; token += 1) counts[token] += isSink[sinks + token];
      }
    }
    const scale = trajectory.scales[frame] / nHeads;
    for (let key = 0; key < nKeys; key += 1) sums[key] *= scale;
    this.ready[frame] = 1;
    return true;
  }
}
