// Text of models and users as something to see: control and format characters get a sign of their own. Never makes HTML.

const MARKS = new Map([[" ", "␣"], ["\n", "↵"], ["\t", "⇥"], ["\r", "␍"], ["\u007f", "␡"]]);
// Characters that show nothing, or turn what follows around: they could hide what was written.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\u2028\u2029\u115f\u1160\u3164\uffa0]/u;

/**
 * @param {string} letter
 * @returns {string}
 */
function mark(letter) {
  const known = MARKS.get(letter);
  if (known !== undefined && letter !== " ") return known;
  const code = letter.codePointAt(0) ?? 0;
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return UNSEEN.test(letter) ? `\\u{${code.toString(16)}}` : letter;
}

/**
 * A token's text for its cell. A space within words stays a space; a token of spaces alone shows them.
 * @param {string} text
 * @returns {string}
 */
export function visible(text) {
  if (text === "") return "∅";
  const letters = Array.from(text);
  if (letters.every((letter) => letter === " ")) return letters.map(() => "␣").join("");
  return letters.map(mark).join("");
}

/**
 * The same in a sentence, cut where it is long.
 * @param {string} text
 * @returns {string}
 */
export function quoted(text) {
  const shown = Array.from(visible(text));
  return `“${shown.length > 24 ? `${shown.slice(0, 23).join("")}…` : shown.join("")}”`;
}
