// Reads the page's colours for canvases from the style sheet, so that light and dark are set in one place.

/**
 * @typedef {object} Colours
 * @property {string} bar
 * @property {string} sink
 * @property {string} own
 * @property {string} row
 * @property {string} line
 * @property {string} ink
 * @property {string} given
 */

/** @returns {Colours} */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return { bar: of("bar"), sink: of("sink"), own: of("own"), row: of("row"), line: of("line"), ink: of("soft"), given: of("given") };
}

/**
 * @param {string} colour as #rrggbb
 * @returns {[number, number, number]}
 */
export function channels(colour) {
  const value = Number.parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/**
 * Sizes a canvas to the screen's resolution.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 * @returns {CanvasRenderingContext2D}
 */
export function sized(canvas, width, height) {
  const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
  const [wide, high] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser cannot draw a canvas; use another browser");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
