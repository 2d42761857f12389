// A request in an address: packed, after the #, so that no server sees it.
const VERSION = "p1";
const LONGEST = 100_000;
const LARGEST = 8 << 20;

async function through(bytes, stream, most) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return new Blob(parts).arrayBuffer();
    size += value.length;
    if (size > most) { await reader.cancel(); throw new Error("too large"); }
    parts.push(value);
  }
}

/** The part of an address that holds a value. Throws an `Error` where it would be too long for an address. */
export async function pack(value) {
  const packed = new Uint8Array(await through(new TextEncoder().encode(JSON.stringify(value)), new CompressionStream("deflate-raw"), LARGEST));
  let binary = "";
  for (let i = 0; i < packed.length; i += 8192) binary += String.fromCharCode(...packed.subarray(i, i + 8192));
  const text = btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (text.length > LONGEST) throw new Error("This request is too large for a link: download plan.json and share the file.");
  return `#${VERSION}=${text}`;
}

/** The value in an address; null where there is none. Throws an `Error` that says what is wrong with it. */
export async function unpack(hash) {
  const [, version, text] = /^#(\w+)=(.*)$/s.exec(hash) ?? [];
  if (version === undefined || !/^p\d+$/.test(version)) return null;
  if (version !== VERSION) {
    throw new Error(`This link is of another version of the page (${version}; this one reads ${VERSION}). Open it at the planner that made it, and share plan.json instead.`);
  }
  let value;
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
    value = JSON.parse(new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw"), LARGEST)));
  } catch {
    throw new Error("This link is damaged: copy it again, all of it.");
  }
  return value;
}
