// Write arrays as .npz: a zip file, without compression, of .npy files. numpy.load reads it without pickle.

const TYPES = new Map([
  [Uint8Array, "|u1"], [Int32Array, "<i4"], [Float32Array, "<f4"], [Float64Array, "<f8"], [BigInt64Array, "<i8"],
]);

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

function checksum(bytes) {
  let crc = ~0;
  for (const byte of bytes) crc = CRC[(crc ^ byte) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}

/** An .npy file: header in a multiple of 64 bytes, then the values in C order. A string becomes one unicode value. */
export function npy(data, shape) {
  let kind = TYPES.get(data.constructor), values = data;
  if (typeof data === "string") {
    const points = Uint32Array.from(data, (character) => character.codePointAt(0));
    [kind, values, shape] = [`<U${Math.max(points.length, 1)}`, points.length ? points : new Uint32Array(1), []];
  }
  const sides = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const text = `{'descr': '${kind}', 'fortran_order': False, 'shape': (${sides}), }`;
  const header = text.padEnd(Math.ceil((text.length + 11) / 64) * 64 - 11) + "\n";
  const start = Uint8Array.of(0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, header.length & 255, header.length >> 8);
  return join([start, new TextEncoder().encode(header), new Uint8Array(values.buffer, values.byteOffset, values.byteLength)]);
}

function join(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}

/** Numbers of 2 (negative sizes) or 4 bytes, least significant first. */
function fields(...pairs) {
  const bytes = pairs.flatMap(([size, value]) => Array.from({ length: size }, (_, n) => (value / 256 ** n) & 255));
  return Uint8Array.from(bytes);
}

/**
 * @param {Object<string, {data: any, shape: number[]}>} arrays
 * @returns {Uint8Array}
 */
export function npz(arrays) {
  const files = [], entries = [];
  let place = 0;
  for (const [name, { data, shape }] of Object.entries(arrays)) {
    const path = new TextEncoder().encode(`${name}.npy`), body = npy(data, shape);
    const shared = [[2, 20], [2, 0x800], [2, 0], [2, 0], [2, 0x21], [4, checksum(body)], [4, body.length],
      [4, body.length], [2, path.length], [2, 0]];
    files.push(fields([4, 0x04034b50], ...shared), path, body);
    entries.push(fields([4, 0x02014b50], [2, 20], ...shared, [2, 0], [2, 0], [2, 0], [4, 0], [4, place]), path);
    place += 30 + path.length + body.length;
  }
  const directory = join(entries), count = Object.keys(arrays).length;
  const end = fields([4, 0x06054b50], [2, 0], [2, 0], [2, count], [2, count], [4, directory.length], [4, place], [2, 0]);
  return join([...files, directory, end]);
}
