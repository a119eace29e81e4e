// The page: its form, its controls, and the sides that they control together. Drawing is in other modules.

import { nothingShown, readAddress, writeAddress } from "./address.js";
import { readColours } from "./colours.js";
import { openRequest } from "./live.js";
import { Notice } from "./notice.js";
import { part, Player } from "./player.js";
import { readRecording } from "./recorded.js";
import { keepKey, listModels, Problem, write } from "./server.js";
import { Side } from "./side.js";
import { startTheme } from "./theme.js";
import { askedWords, counted, pairWords, place, sinkDoes } from "./words.js";

/** @typedef {import("./server.js").Card} Card */

const STEPS = [4, 8, 16, 32, 64, 128, 256];
const QUIET = 1500; // ms of waiting before the page says so
const LARGEST = 256 << 20; // bytes of a recording, at most

const notice = new Notice();
const form = part("ask", HTMLFormElement);
const prompt = part("prompt", HTMLTextAreaElement);
const results = part("results", HTMLElement);
const [layers, heads, rule] = [part("layer", HTMLSelectElement), part("head", HTMLSelectElement), part("rule", HTMLSelectElement)];
const inputs = {
  left: part("left", HTMLSelectElement), right: part("right", HTMLSelectElement), policy: part("policy", HTMLSelectElement),
  steps: part("steps", HTMLSelectElement), length: part("length", HTMLInputElement), seed: part("seed", HTMLInputElement),
  temperature: part("temperature", HTMLInputElement), speculate: part("speculate", HTMLSelectElement),
};

let shown = nothingShown();
let colours = readColours();
/** @type {Side[]} */
let sides = [];
/** @type {Card[]} */
let cards = [];
/** @type {Record<string, any> | null} the settings of an opened recording */
let recorded = null;
let writing = new AbortController();
let starts = 0;
let choices = 0;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let addressing;

const player = new Player((step) => {
  shown.step = step;
  draw();
});

/**
 * Call this for each new choice of what to show: a text to write, a file, an address.
 * @returns {() => boolean} whether this is still the newest choice
 */
function choose() {
  choices += 1;
  const mine = choices;
  return () => mine === choices;
}

// -- what is shown ----------------------------------------------------------------------------------------------------------------

/** @returns {import("./measures.js").Choice} */
const choiceNow = () => ({ layer: shown.layer, head: shown.head, rule: shown.rule });

function draw() {
  const moment = { step: player.step, choice: choiceNow(), token: shown.token, colours };
  for (const side of sides) side.show(moment);
  clearTimeout(addressing);
  addressing = setTimeout(keepAddress, 150);
}

function keepAddress() {
  const { step, token } = shown;
  history.replaceState(null, "", writeAddress(recorded ? { ...nothingShown(), policy: "", seed: "", ...choiceNow(), step, token } : shown));
}

/** Writes the sentences above the sides, which compare two models. */
function summarize() {
  const root = part("summary", HTMLElement);
  const found = sides.flatMap((side) => (side.measures && side.source ? [{ measures: side.measures, facts: side.source.trajectory.facts }] : []));
  const words = found.length === 2 ? pairWords([found[0].measures, found[0].facts], [found[1].measures, found[1].facts], counted(choiceNow())) : null;
  const lines = words ? [words, `Measured ${place(choiceNow())}, in this text only; sinkdlm analyze measures many texts.`] : [];
  const now = lines.join("");
  if (root.textContent === now) return;
  root.replaceChildren(
    ...lines.map((line, at) => {
      const made = document.createElement("p");
      made.textContent = line;
      if (at) made.className = "note";
      return made;
    }),
  );
}

/**
 * @param {string} model
 * @returns {Side}
 */
function addSide(model) {
  const side = new Side(model, {
    pick: (token) => {
      shown.token = token;
      draw();
    },
    pickFrame: (frame, token) => {
      player.pause();
      [shown.step, shown.token] = [frame, token];
      player.set(mostFrames(), frame);
      draw();
    },
    pickHead: (layer, head) => {
      [layers.value, heads.value, heads.disabled] = [String(layer), String(head), false];
      [shown.layer, shown.head] = [layer, head];
      draw();
      summarize();
    },
    learned: summarize,
    failed: (failure) => fail(failure, null),
  });
  sides.push(side);
  part("sides", HTMLElement).append(side.root);
  return side;
}

function closeSides() {
  player.pause();
  for (const side of sides) side.close();
  sides = [];
  part("sides", HTMLElement).replaceChildren();
  part("summary", HTMLElement).replaceChildren();
  part("welcome", HTMLElement).hidden = true;
  part("save", HTMLButtonElement).disabled = true;
  results.hidden = false;
}

const mostFrames = () => Math.max(1, ...sides.map((side) => side.nFrames));

/** Sets the controls once all sides are open. */
function ready() {
  const facts = sides.flatMap((side) => (side.source ? [side.source.trajectory.facts] : []));
  fill(layers, "all layers", Math.max(...facts.map((one) => one.nLayers)), shown.layer);
  fill(heads, "all heads", Math.max(...facts.map((one) => one.nHeads)), shown.head);
  heads.disabled = layers.value === "";
  [shown.layer, shown.head] = [numberOf(layers), heads.disabled ? null : numberOf(heads)];
  rule.value = shown.rule;
  const asked = part("asked", HTMLElement);
  asked.hidden = recorded === null;
  asked.textContent = recorded ? askedWords(recorded) : "";
  explainRule();
  const last = mostFrames() - 1;
  shown.step = Math.min(shown.step ?? last, last);
  player.set(last + 1, shown.step);
  part("save", HTMLButtonElement).disabled = false;
  draw();
  summarize();
}

function explainRule() {
  const rules = sides[0]?.source?.trajectory.rules;
  if (rules) part("sink-does", HTMLElement).textContent = sinkDoes(shown.rule, rules);
}

/**
 * @param {HTMLSelectElement} select
 * @param {string} all
 * @param {number} n
 * @param {number | null} value
 */
function fill(select, all, n, value) {
  select.replaceChildren(new Option(all, ""), ...Array.from({ length: n }, (_, at) => new Option(String(at), String(at))));
  select.value = value !== null && value < n ? String(value) : "";
}

/**
 * @param {HTMLSelectElement} select
 * @returns {number | null}
 */
const numberOf = (select) => (select.value === "" ? null : Number(select.value));

layers.addEventListener("change", () => {
  shown.layer = numberOf(layers);
  heads.disabled = shown.layer === null;
  if (shown.layer === null) heads.value = "";
  shown.head = numberOf(heads);
  draw();
  summarize();
});
rule.addEventListener("change", () => {
  shown.rule = rule.value === "relative" ? "relative" : "absolute";
  explainRule();
  draw();
  summarize();
});
heads.addEventListener("change", () => {
  shown.head = numberOf(heads);
  draw();
  summarize();
});

// -- writing ----------------------------------------------------------------------------------------------------------------------

function readForm() {
  shown.prompt = prompt.value;
  [shown.left, shown.right, shown.policy] = [inputs.left.value, inputs.right.value, inputs.policy.value];
  shown.steps = numberOf(inputs.steps);
  shown.length = Math.max(1, Math.round(Number(inputs.length.value)) || 32);
  shown.temperature = Math.min(2, Math.max(0, Number(inputs.temperature.value) || 0));
  shown.speculate = inputs.speculate.value;
  shown.seed = /^-?\d{1,19}$/.test(inputs.seed.value) ? inputs.seed.value : "0";
}

/**
 * @param {string} model
 * @returns {string}
 */
function requestOf(model) {
  const speculate = shown.speculate === "auto" ? "auto" : Number(shown.speculate) || null;
  const ours = { policy: shown.policy, frames: true, inspect: true, speculate, ...(shown.steps === null ? {} : { steps: shown.steps }) };
  const asked = { model, prompt: shown.prompt ?? "", max_tokens: shown.length, temperature: shown.temperature, stream: true, sinkdlm: ours };
  return `{"seed":${shown.seed},${JSON.stringify(asked).slice(1)}`;
}

/** Writes the form's request with every chosen model, and opens the texts. */
async function run() {
  choose();
  writing.abort();
  writing = new AbortController();
  const { signal } = writing;
  recorded = null;
  closeSides();
  keepAddress();
  player.set(1, 0);
  setBusy(true);
  const names = [shown.left, ...(shown.right ? [shown.right] : [])];
  const waited = startWaiting(signal);
  try {
    const made = names.map(addSide);
    const sources = await Promise.all(
      made.map(async (side) => {
        const nSinks = cards.find((card) => card.id === side.model)?.sinkdlm.sinks.n ?? 0;
        const id = await write(requestOf(side.model), (frame) => {
          waited();
          if (!signal.aborted) side.stream(frame, nSinks);
        }, signal);
        return openRequest(id, signal);
      }),
    );
    if (signal.aborted) return;
    made.forEach((side, at) => side.open(sources[at]));
    notice.clear();
    ready();
  } catch (failure) {
    waited();
    if (!signal.aborted) fail(failure, run);
  } finally {
    if (writing.signal === signal) setBusy(false);
  }
}

/**
 * Shows how long the user has waited, until the returned function is called.
 * @param {AbortSignal} signal
 * @returns {() => void}
 */
function startWaiting(signal) {
  const began = performance.now();
  notice.clear();
  const timer = setInterval(() => {
    const seconds = Math.round((performance.now() - began) / 1000);
    if (performance.now() - began > QUIET) notice.say(`Waiting for the model: ${seconds} s. Other requests may be ahead in the queue.`);
  }, 250);
  let over = false;
  const end = () => {
    if (over) return;
    over = true;
    clearInterval(timer);
    notice.clear();
  };
  signal.addEventListener("abort", end);
  return end;
}

/** @param {boolean} busy */
function setBusy(busy) {
  part("write", HTMLButtonElement).disabled = busy;
  part("stop", HTMLButtonElement).hidden = !busy;
  results.setAttribute("aria-busy", String(busy));
}

/**
 * @param {unknown} failure
 * @param {(() => void) | null} retry
 */
function fail(failure, retry) {
  const told = failure instanceof Error ? failure.message : String(failure);
  if (!sides.some((side) => side.source)) results.hidden = true;
  const locked = failure instanceof Problem && failure.kind === "key";
  part("key-form", HTMLFormElement).hidden = !locked;
  form.hidden = locked;
  if (locked) {
    notice.clear();
    part("key", HTMLInputElement).focus();
    return;
  }
  if (failure instanceof Problem && failure.kind === "full" && retry) {
    countDown(told, failure.seconds, retry);
    return;
  }
  const kept = failure instanceof Problem && failure.kind === "lost" && sides.some((side) => side.source) ? " What is shown stays." : "";
  notice.say(told + kept, { bad: true, retry });
}

/**
 * @param {string} told
 * @param {number} seconds
 * @param {() => void} retry
 */
function countDown(told, seconds, retry) {
  const { signal } = writing;
  const tick = (/** @type {number} */ left) => {
    if (signal.aborted) return;
    if (left <= 0) {
      retry();
      return;
    }
    notice.say(`${told}. Next try in ${left} s.`, { retry });
    setTimeout(() => tick(left - 1), 1000);
  };
  tick(Math.max(1, Math.round(seconds)));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  readForm();
  [shown.step, shown.token] = [null, null];
  void run();
  if (results.getBoundingClientRect().top > innerHeight / 2) results.scrollIntoView({ block: "start" });
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
prompt.addEventListener("input", notePrompt);
for (const button of part("examples", HTMLElement).querySelectorAll("button")) {
  button.addEventListener("click", () => {
    prompt.value = button.textContent ?? "";
    notePrompt();
    form.requestSubmit();
  });
}
part("stop", HTMLButtonElement).addEventListener("click", () => {
  writing.abort();
  setBusy(false);
  notice.say("Stopped.");
  if (!sides.some((side) => side.source)) results.hidden = true;
});
part("key-form", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(part("key", HTMLInputElement).value);
  void start();
});

function notePrompt() {
  part("prompt-note", HTMLElement).textContent = prompt.value ? "" : "Without a prompt the model writes a text from blanks alone.";
}

// -- recordings -------------------------------------------------------------------------------------------------------------------

/**
 * @param {string} text
 * @param {() => boolean} newest
 */
async function openRecording(text, newest) {
  try {
    const found = await readRecording(text);
    if (!newest()) return;
    closeSides();
    notice.clear();
    recorded = found.asked;
    for (const source of found.sources) addSide(source.trajectory.facts.model).open(source);
    if (typeof recorded.prompt === "string") prompt.value = recorded.prompt;
    notePrompt();
    ready();
  } catch (failure) {
    if (newest()) fail(failure, null);
  }
}

/** @param {File | undefined} file */
async function openFile(file) {
  if (!file) return;
  const newest = choose();
  writing.abort();
  setBusy(false);
  if (file.size > LARGEST) {
    fail(new Error("This file is too large for a recording (more than 256 MiB). Choose another."), null);
    return;
  }
  let text;
  try {
    text = await file.text();
  } catch {
    if (newest()) fail(new Error("This file cannot be read: it has changed or is gone. Choose it again."), null);
    return;
  }
  if (!newest()) return;
  shown = { ...shown, step: null, token: null };
  await openRecording(text, newest);
}

async function save() {
  const button = part("save", HTMLButtonElement);
  button.disabled = true;
  notice.say("Collecting all frames for the recording…");
  try {
    const saved = await Promise.all(sides.map((side) => side.source?.side()));
    const { prompt: text, seed, policy, steps, length, temperature, speculate } = shown;
    const asked = recorded ?? { prompt: text, seed, policy, steps, length, temperature, speculate: speculate || null };
    const whole = { format: "sinkdlm-recording", version: 1, made: { by: "page" }, asked, sides: saved };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(whole)], { type: "application/json" }));
    link.download = "recording.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    notice.say("Saved. To show the recording, open it or drop it in this page; it needs no server.");
  } catch (failure) {
    fail(failure, save);
  } finally {
    button.disabled = false;
  }
}

const open = part("open", HTMLInputElement);
open.addEventListener("change", () => {
  void openFile(open.files?.[0]);
  open.value = "";
});
part("save", HTMLButtonElement).addEventListener("click", () => void save());
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  void openFile(event.dataTransfer?.files[0]);
});

// -- the beginning ----------------------------------------------------------------------------------------------------------------

function fillForm() {
  const names = cards.map((card) => card.id);
  const known = (/** @type {string} */ name) => names.includes(name);
  inputs.left.replaceChildren(...names.map((name) => new Option(name, name)));
  inputs.right.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name, name)));
  if (!known(shown.left)) shown.left = names[0];
  if (shown.prompt === null && !shown.right) shown.right = names.find((name) => name !== shown.left) ?? "";
  if (!known(shown.right)) shown.right = "";
  const { policies, limits, defaults } = cards[0].sinkdlm;
  inputs.policy.replaceChildren(...Object.keys(policies).map((name) => new Option(name, name)));
  if (!(shown.policy in policies)) shown.policy = defaults.policy;
  const steps = [...new Set([...STEPS.filter((n) => n <= limits.steps), ...(shown.steps === null ? [] : [shown.steps])])].sort((a, b) => a - b);
  inputs.steps.replaceChildren(new Option("one a token", ""), ...steps.map((n) => new Option(String(n), String(n))));
  inputs.length.max = String(limits.length);
  shown.length ??= Math.min(32, limits.length);
  [inputs.left.value, inputs.right.value, inputs.policy.value] = [shown.left, shown.right, shown.policy];
  [inputs.steps.value, inputs.length.value] = [shown.steps === null ? "" : String(shown.steps), String(shown.length)];
  [inputs.seed.value, inputs.temperature.value, inputs.speculate.value] = [shown.seed, String(shown.temperature), shown.speculate];
  prompt.value = shown.prompt ?? "";
  notePrompt();
  part("examples", HTMLElement).hidden = false;
}

async function start() {
  starts += 1;
  const mine = starts;
  shown = readAddress(location.hash);
  const inside = document.getElementById("recording");
  if (inside) {
    form.hidden = true;
    await openRecording(inside.textContent ?? "", choose());
    return;
  }
  const newest = shown.prompt === null ? () => false : choose();
  try {
    const listed = await listModels();
    if (mine !== starts) return; // a later start takes over
    cards = listed;
    part("key-form", HTMLFormElement).hidden = true;
    form.hidden = false;
    notice.clear();
    fillForm();
    if (newest()) await run();
  } catch (failure) {
    if (mine === starts) fail(failure, start);
  }
}

startTheme(part("theme", HTMLButtonElement), () => {
  colours = readColours();
  draw();
});
addEventListener("hashchange", () => void start());
void start();
