// Talks to the server that sent this page: lists models, streams frames, reads finished requests. Knows no drawing.

/**
 * A failed request, with a message for the user.
 */
export class Problem extends Error {
  /**
   * @param {string} message
   * @param {"lost" | "key" | "full" | "gone" | "refused" | "failed"} kind
   * @param {number} seconds to wait before the next try
   */
  constructor(message, kind, seconds = 0) {
    super(message);
    this.kind = kind;
    this.seconds = seconds;
  }
}

/**
 * @typedef {object} Card
 * @property {string} id
 * @property {{context_length: number, n_layers: number, n_heads: number, sinks: {n: number, kind: string}, policies: Record<string, {steps: number | null}>, defaults: {policy: string, max_tokens: number}, limits: {length: number, steps: number}}} sinkdlm
 */

/**
 * @typedef {object} Frame
 * @property {number} step
 * @property {(number | null)[]} tokens
 * @property {(string | null)[]} pieces
 * @property {(number | null)[]} confidence
 */

/**
 * @typedef {object} Packed
 * @property {number[]} shape
 * @property {number} scale
 * @property {string} data
 */

const KEY = "sinkdlm-key";

/** @returns {string} */
function keptKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** @param {string} key */
export function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Without storage the key is asked for again after a reload.
  }
}

/**
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<Response>}
 */
async function send(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = keptKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (failure) {
    if (failure instanceof DOMException && failure.name === "AbortError") throw failure;
    throw new Problem("The server does not answer. It may have stopped, or the network is down.", "lost");
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

/**
 * @param {Response} answer
 * @returns {Promise<Problem>}
 */
async function problemOf(answer) {
  let told = `${answer.status} ${answer.statusText}`;
  try {
    told = String((await answer.json()).error.message);
  } catch {
    // Not this server's own error: the status is all there is.
  }
  if (answer.status === 401) return new Problem("This server asks for its API key.", "key");
  if (answer.status === 429) return new Problem(`The queue is full: ${told}`, "full", Number(answer.headers.get("Retry-After") ?? 5));
  if (answer.status === 503) return new Problem(`The server is shutting down: ${told}`, "lost");
  if (answer.status === 404) return new Problem(told, "gone");
  return new Problem(told, answer.status < 500 ? "refused" : "failed");
}

/**
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, signal) {
  return (await send(path, signal ? { signal } : {})).json();
}

/** @returns {Promise<Card[]>} */
export async function listModels() {
  return (await get("/v1/models")).data;
}

/**
 * Requests a text and passes on every frame. Returns the id under which the server keeps the text.
 * @param {string} body the request, as JSON text: its seed may have 64 bits, more than a number holds
 * @param {(frame: Frame) => void} tell
 * @param {AbortSignal} signal
 * @returns {Promise<string>}
 */
export async function write(body, tell, signal) {
  const answer = await send("/v1/completions", { method: "POST", body, signal, headers: { "Content-Type": "application/json" } });
  let id = "";
  for await (const event of events(answer)) {
    if (event.error) throw new Problem(event.error.message, event.error.code === "timeout" ? "failed" : "refused");
    id = event.id;
    if (event.sinkdlm?.frame) tell(event.sinkdlm.frame);
  }
  return id;
}

/**
 * @param {Response} answer
 * @returns {AsyncGenerator<any>}
 */
async function* events(answer) {
  const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
  let [kept, whole] = ["", false];
  while (reader) {
    let part;
    try {
      part = await reader.read();
    } catch (failure) {
      if (failure instanceof DOMException && failure.name === "AbortError") throw failure;
      break;
    }
    if (part.done) break;
    const lines = (kept + part.value).split("\n");
    kept = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "data: [DONE]") whole = true;
      else if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
  if (!whole) throw new Problem("The connection to the server broke in the middle of the text.", "lost");
}
