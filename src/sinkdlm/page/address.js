// Keeps the view in the part of the address after #, so that it can be shared and survives a reload.

/**
 * The view. null: not chosen, or all.
 * @typedef {object} Shown
 * @property {string | null} prompt
 * @property {string} left
 * @property {string} right
 * @property {string} policy
 * @property {number | null} steps
 * @property {number | null} length
 * @property {number} temperature
 * @property {string} speculate canvases of a forward, or auto
 * @property {string} seed as text: seeds have 64 bits, and numbers here have 53
 * @property {number | null} step
 * @property {number | null} layer
 * @property {number | null} head
 * @property {import("./trajectory.js").Rule} rule
 * @property {number | null} token
 */

/** @returns {Shown} */
export function nothingShown() {
  return {
    prompt: null, left: "", right: "", policy: "llada", steps: null, length: null, temperature: 0, speculate: "", seed: "0",
    step: null, layer: null, head: null, rule: "absolute", token: null,
  };
}

/**
 * @param {string | null} text
 * @param {number} least
 * @returns {number | null}
 */
function whole(text, least) {
  if (text === null || !/^-?\d{1,9}$/.test(text)) return null;
  const value = Number(text);
  return value >= least ? value : null;
}

/**
 * Reads a view from an address; a value that is not valid gets its default.
 * @param {string} hash
 * @returns {Shown}
 */
export function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const shown = nothingShown();
  shown.prompt = given.get("prompt");
  [shown.left, shown.right] = [given.get("model") ?? "", given.get("beside") ?? ""];
  shown.policy = given.get("policy") ?? shown.policy;
  [shown.steps, shown.length] = [whole(given.get("steps"), 1), whole(given.get("length"), 1)];
  const temperature = Number(given.get("temperature") ?? "0");
  shown.temperature = temperature >= 0 && temperature <= 2 ? temperature : 0;
  const speculate = given.get("speculate") ?? "";
  if (/^(2|4|8|auto)$/.test(speculate)) shown.speculate = speculate;
  const seed = given.get("seed") ?? "";
  if (/^-?\d{1,19}$/.test(seed)) shown.seed = seed;
  [shown.step, shown.layer, shown.head] = [whole(given.get("step"), 0), whole(given.get("layer"), 0), whole(given.get("head"), 0)];
  if (given.get("rule") === "relative") shown.rule = "relative";
  shown.token = whole(given.get("token"), -1);
  return shown;
}

/**
 * @param {Shown} shown
 * @returns {string}
 */
export function writeAddress(shown) {
  const given = new URLSearchParams();
  /** @type {[string, string | number | null][]} */
  const parts = [
    ["prompt", shown.prompt], ["model", shown.left || null], ["beside", shown.right || null], ["policy", shown.policy || null],
    ["steps", shown.steps], ["length", shown.length], ["temperature", shown.temperature || null],
    ["speculate", shown.speculate || null], ["seed", shown.seed || null],
    ["step", shown.step], ["layer", shown.layer], ["head", shown.head],
    ["rule", shown.rule === "absolute" ? null : shown.rule], ["token", shown.token],
  ];
  for (const [name, value] of parts) if (value !== null) given.set(name, String(value));
  return `#${given}`;
}
