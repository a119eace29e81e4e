// The page's sentences. Each follows from numbers of the shown trajectory; one that they do not support is left out.

import { quoted, visible } from "./visible.js";

/** @typedef {import("./measures.js").Measures} Measures */
/** @typedef {import("./measures.js").Choice} Choice */
/** @typedef {import("./trajectory.js").Facts} Facts */

const CLEARLY = 0.01; // a difference of shares that is worth a sentence

/**
 * @param {number | null} share
 * @returns {string}
 */
export function percent(share) {
  if (share === null) return "n/a";
  const value = share * 100;
  if (value > 0 && value < 0.05) return "<0.1\u00a0%";
  return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)}\u00a0%`;
}

/**
 * @param {number | null} value
 * @returns {string}
 */
export function number(value) {
  if (value === null) return "n/a";
  return value >= 99.5 ? value.toFixed(0) : value.toPrecision(value === 0 ? 1 : 3);
}

/**
 * @param {number} n
 * @returns {string}
 */
function tokens(n) {
  return n === 1 ? "1 token" : `${n} tokens`;
}

/**
 * @param {Choice} choice
 * @returns {string}
 */
export function place(choice) {
  if (choice.layer === null) return "over all layers and heads";
  return choice.head === null ? `in layer ${choice.layer}` : `in layer ${choice.layer}, head ${choice.head}`;
}

/**
 * The unit that shares of content sinks are counted in.
 * @param {Choice} choice
 * @returns {string}
 */
export function counted(choice) {
  return choice.layer !== null && choice.head !== null ? "steps" : "heads and steps";
}

/**
 * The settings of a recording.
 * @param {Record<string, any>} asked
 * @returns {string}
 */
export function askedWords(asked) {
  const given = Object.entries(asked).filter(([name, value]) => name !== "prompt" && value !== null && value !== undefined);
  return [`Recorded from ${asked.prompt ? quoted(String(asked.prompt)) : "blanks alone"}`, ...given.map(([name, value]) => `${name} ${value}`)].join(", ");
}

/**
 * The condition for a content sink, as the end of a sentence.
 * @param {Choice["rule"]} rule
 * @param {{threshold: number, margin: number}} rules
 * @returns {string}
 */
export function sinkDoes(rule, rules) {
  if (rule === "absolute") return `receives more than ${percent(rules.threshold)} of a head’s attention`;
  return `receives the attention of ${rules.margin} tokens more than the other tokens do on average`;
}

/**
 * The name of the model's own sink.
 * @param {Facts} facts
 * @returns {string}
 */
export function ownName(facts) {
  if (facts.sinkKind === "logit") return "sink logit";
  if (facts.sinkKind === "register") return facts.nSinks > 1 ? "register tokens" : "register token";
  return facts.nSinks > 1 ? "sink tokens" : "sink token";
}

/**
 * Sentences about one model, over the whole trajectory.
 * @param {Measures} found
 * @param {Facts} facts
 * @param {string} does the condition for a content sink
 * @param {string} of the unit of shares
 * @returns {string[]}
 */
export function sideWords(found, facts, does, of) {
  const lines = facts.effort ? [effortWords(facts.effort)] : [];
  if (facts.nSinks > 0 && found.sink_mass !== null) {
    const even = facts.nSinks / (facts.nSinks + facts.length);
    lines.push(
      found.sink_mass > even
        ? `The ${ownName(facts)} receives ${percent(found.sink_mass)} of all attention; an even share would be ${percent(even)}.`
        : `The ${ownName(facts)} receives ${percent(found.sink_mass)} of all attention, no more than an even share (${percent(even)}).`,
    );
  }
  if (found.top_received !== null) lines.push(`The most attended token of the text receives ${percent(found.top_received)} of a head’s attention, on average.`);
  if (found.sink_heads === 0) lines.push(`No token of the text ever ${does}: there are no content sinks.`);
  else if (found.sink_heads !== null) lines.push(`${percent(found.sink_heads)} of ${of} have a content sink, a token of the text that ${does}.`);
  if (found.turnover !== null && found.turnover > 0) lines.push(`The turnover of content sinks is ${percent(found.turnover)} from one step to the next${movedWords(found)}.`);
  else if (found.turnover === 0) lines.push("Content sinks stay where they are from step to step.");
  return lines;
}

/**
 * @param {import("./trajectory.js").Effort} effort
 * @returns {string}
 */
function effortWords({ forwards, accepted, tokensPerForward }) {
  const beyond = accepted ? `; ${tokens(accepted)} accepted beyond one step per forward` : "";
  return `Written in ${forwards} forwards, ${number(tokensPerForward)} tokens per forward${beyond}.`;
}

/**
 * @param {Measures} found
 * @returns {string}
 */
function movedWords(found) {
  return found.moved === null || found.moved === 0 ? "" : `; the top one moves ${number(found.moved)} tokens a step, on average`;
}

/**
 * A sentence about two models, one with a sink of its own and one without.
 * @param {[Measures, Facts]} one
 * @param {[Measures, Facts]} other
 * @param {string} of the unit of shares
 * @returns {string | null}
 */
export function pairWords(one, other, of) {
  const [[plain], [own, facts]] = one[1].nSinks ? [other, one] : [one, other];
  if (!one[1].nSinks === !other[1].nSinks) return null;
  if (plain.sink_heads === null || own.sink_heads === null || own.sink_mass === null || own.top_received === null) return null;
  const name = ownName(facts);
  const heads = `${percent(plain.sink_heads)} of ${of} without it, ${percent(own.sink_heads)} with it`;
  const fewer = plain.sink_heads - own.sink_heads > CLEARLY;
  if (own.sink_mass > own.top_received && fewer) {
    const shifts = plain.turnover ? `, and ${percent(plain.turnover)} of these content sinks change from step to step` : "";
    return `Without a ${name}, attention gathers on a few tokens of the text${shifts}. With it, the ${name} receives ${percent(own.sink_mass)} of all attention. Content sinks are in ${heads}.`;
  }
  if (fewer) return `With the ${name} there are fewer content sinks: they are in ${heads}. But the ${name} receives only ${percent(own.sink_mass)} of all attention, and the most attended token of the text ${percent(own.top_received)}.`;
  if (own.sink_heads - plain.sink_heads > CLEARLY) return `In this text the ${name} does not make content sinks fewer: they are in ${heads}.`;
  return `In this text the two models hardly differ: content sinks are in ${heads}, and the ${name} receives ${percent(own.sink_mass)} of all attention.`;
}

/**
 * A sentence about one step, and what changed since the one before.
 * @param {Measures} now
 * @param {{position: number, piece: string | null, share: number, sink: boolean} | null} top the most attended token, where one head is chosen
 * @param {{position: number} | null} before
 * @param {Facts} facts
 * @returns {string}
 */
export function stepWords(now, top, before, facts) {
  const own = facts.nSinks ? `${percent(now.sink_mass)} on the ${ownName(facts)}, ` : "";
  if (top === null) return `Attention in this step: ${own}${percent(now.top_received)} on the most attended token of the text; ${number(now.content_sinks)} content sinks a head.`;
  const named = `“${top.piece === null ? "blank" : visible(top.piece)}” at ${top.position}`;
  const role = top.sink ? "a content sink" : "the most attended token of the text, but no content sink";
  const way = before === null ? "" : before.position === top.position ? "; it stayed where it was" : `; it moved ${tokens(Math.abs(top.position - before.position))}, from ${before.position}`;
  return `Attention in this step: ${own}${percent(top.share)} on ${named}, ${role}${way}.`;
}
