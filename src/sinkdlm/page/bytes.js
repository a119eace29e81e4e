// Unpacks numbers: from base64, and from zlib in files.

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
 * @param {number} most the bytes that it must unpack to
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
    if (size + value.length > most) throw new Error("an array has more numbers than its shape");
    found.set(value, size);
    size += value.length;
  }
  if (size !== most) throw new Error("an array has fewer numbers than its shape");
  return found;
}
