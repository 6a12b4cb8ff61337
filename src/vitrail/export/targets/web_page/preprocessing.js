// From a photo to the model's pixels, computed as Pillow and data/images/preprocessing.py do it: fixed-point sums of 22 bits,
// rounded to bytes between the two passes. Sizes are [rows, columns].

const BITS = 22;
const KERNELS = {
  bilinear: [1, (x) => Math.max(1 - Math.abs(x), 0)],
  bicubic: [2, (x) => {
    const at = Math.abs(x), a = -0.5;
    if (at < 1) return ((a + 2) * at - (a + 3)) * at * at + 1;
    return at < 2 ? (((at - 5) * at + 8) * at - 4) * a : 0;
  }],
};

/** Round as Python does: halves to the even number. */
const round = (value) => {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
};

/** Rows and columns before the crop. */
export function resizedSize([rows, columns], { size, crop, fit }) {
  const [high, wide] = size.map((side) => Math.floor(side / crop));
  if (fit === "squash") return [high, wide];
  if (high === wide) {
    const short = Math.min(rows, columns);
    return [Math.trunc((high * rows) / short), Math.trunc((wide * columns) / short)];
  }
  const shrink = Math.min(rows / high, columns / wide);
  return [round(rows / shrink), round(columns / shrink)];
}

const cropOffset = (have, want, middle) => {
  if (have < want) return -Math.floor((want - have) / 2);
  return middle === "floored" ? Math.floor((have - want) / 2) : round((have - want) / 2);
};

/** Top, left, rows and columns of the part of a photo that the model receives, in pixels of the photo. */
export function visibleBox(photo, how) {
  const resized = resizedSize(photo, how);
  const [top, left] = resized.map((side, axis) => cropOffset(side, how.size[axis], how.middle));
  const [y, x] = photo.map((side, axis) => side / resized[axis]);
  return [top * y, left * x, how.size[0] * y, how.size[1] * x];
}

/** For each position of the result: the first source position and its weights, as whole numbers of 2^-22. */
function weigh(from, to, interpolation) {
  const [reach, kernel] = KERNELS[interpolation], scale = from / to, wider = Math.max(scale, 1);
  return Array.from({ length: to }, (_, position) => {
    const center = (position + 0.5) * scale;
    const first = Math.max(Math.trunc(center - reach * wider + 0.5), 0);
    const end = Math.min(Math.trunc(center + reach * wider + 0.5), from);
    const raw = Array.from({ length: end - first }, (_, n) => kernel((n + first - center + 0.5) * (1 / wider)));
    const sum = raw.reduce((total, each) => total + each, 0);
    const weights = raw.map((each) => Math.trunc((each / sum) * 2 ** BITS + (each < 0 ? -0.5 : 0.5)));
    return { first, weights };
  });
}

/** Resize the rows of an image: `source` has `lines` lines of `from` positions of `channels` values. */
function resizeLines(source, lines, from, to, channels, interpolation) {
  if (from === to) return source;
  const found = new Uint8ClampedArray(lines * to * channels), table = weigh(from, to, interpolation);
  for (let line = 0; line < lines; line++) {
    for (let position = 0; position < to; position++) {
      const { first, weights } = table[position];
      for (let channel = 0; channel < channels; channel++) {
        let sum = 1 << (BITS - 1), at = (line * from + first) * channels + channel;
        for (let n = 0; n < weights.length; n++, at += channels) sum += source[at] * weights[n];
        found[(line * to + position) * channels + channel] = Math.floor(sum / 2 ** BITS);
      }
    }
  }
  return found;
}

/** (rows, columns, channels) → (columns, rows, channels). */
function transpose(source, rows, columns, channels) {
  const found = new Uint8ClampedArray(source.length);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      for (let c = 0; c < channels; c++) found[(x * rows + y) * channels + c] = source[(y * columns + x) * channels + c];
    }
  }
  return found;
}

/** Bytes of red, green, blue and alpha → of the model's channels; gray as Pillow converts to L. */
function dropAlpha(rgba, channels) {
  const count = rgba.length / 4, found = new Uint8ClampedArray(count * channels);
  for (let i = 0; i < count; i++) {
    const [red, green, blue] = [rgba[4 * i], rgba[4 * i + 1], rgba[4 * i + 2]];
    if (channels === 1) found[i] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    else found.set([red, green, blue], 3 * i);
  }
  return found;
}

/**
 * The model's input of an opaque photo: bytes, (rows, columns, channels) of `how.size`.
 * @param {ArrayLike<number>} rgba (rows, columns, 4)
 */
export function preprocess(rgba, [rows, columns], how) {
  const { channels, size: [high, wide], middle, interpolation } = how, [tall, broad] = resizedSize([rows, columns], how);
  const passes = {
    across: ({ values, y, x }) => ({ values: resizeLines(values, y, x, broad, channels, interpolation), y, x: broad }),
    down: ({ values, y, x }) => {
      const turned = resizeLines(transpose(values, y, x, channels), x, y, tall, channels, interpolation);
      return { values: transpose(turned, x, tall, channels), y: tall, x };
    },
  };
  const downFirst = how.down_first && rows - tall > 2 * Math.max(columns - broad, 0);
  let resized = { values: dropAlpha(rgba, channels), y: rows, x: columns };
  for (const pass of downFirst ? ["down", "across"] : ["across", "down"]) resized = passes[pass](resized);
  const found = new Uint8Array(high * wide * channels);
  const top = cropOffset(tall, high, middle), left = cropOffset(broad, wide, middle);
  for (let y = Math.max(0, -top); y < Math.min(high, tall - top); y++) {
    const x = Math.max(0, -left), end = Math.min(wide, broad - left);
    const start = ((y + top) * broad + x + left) * channels;
    found.set(resized.values.subarray(start, start + (end - x) * channels), (y * wide + x) * channels);
  }
  return found;
}

/** Decode a file upright, without color profiles, transparent parts over white: bytes (rows, columns, 4), and its size. */
export async function decode(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, bitmap.width, bitmap.height);
  context.drawImage(bitmap, 0, 0);
  return { bitmap, rgba: context.getImageData(0, 0, bitmap.width, bitmap.height).data, size: [bitmap.height, bitmap.width] };
}
