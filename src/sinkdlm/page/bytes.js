// Numbers on their way: base64, and zlib where it is a file.

/**
 * @param {string} text base64
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function bytesOf(text) {
  const letters = atob(text);
  const found = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) found[place] = letters.charCodeAt(place);
  return found;
}

/**
 * @param {string} text base64 of zlib
 * @param {number} most bytes; a file that unpacks to more is not one of ours
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 */
export async function inflated(text, most) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const reader = stream.getReader();
  const found = new Uint8Array(most);
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (size + value.length > most) throw new Error("more numbers than its shape has");
    found.set(value, size);
    size += value.length;
  }
  if (size !== most) throw new Error("fewer numbers than its shape has");
  return found;
}
