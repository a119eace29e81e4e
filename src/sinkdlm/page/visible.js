// Makes text of models and users visible: control and format characters get signs. Never makes HTML.

const MARKS = new Map([[" ", "␣"], ["\n", "↵"], ["\t", "⇥"], ["\r", "␍"], ["\u007f", "␡"]]);
// Invisible characters, and those that reverse what follows: they could hide text.
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
 * A token's text for a sentence: in quotes, cut to 24 characters.
 * @param {string} text
 * @returns {string}
 */
export function quoted(text) {
  const shown = Array.from(visible(text));
  return `“${shown.length > 24 ? `${shown.slice(0, 23).join("")}…` : shown.join("")}”`;
}
