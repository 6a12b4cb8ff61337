// Color maps of the figures (the table is in base/style.py), and how a photo is dimmed where it is not attended.

const stops = (text) => text.match(/.{6}/g).map((each) => [0, 2, 4].map((at) => parseInt(each.slice(at, at + 2), 16)));

const VIRIDIS = stops(
  "44015448186a472d7b4240863b528b33638d2c728e26828e21918c1fa08828ae803fbc735ec96284d44baddc30d8e219fde725",
);
const PUOR = stops("2d004b5326878073acb1aad1d8daebf7f7f6fee0b6fcb761e08214b257067f3b08");

function mix(table, share) {
  const place = Math.min(Math.max(share, 0), 1) * (table.length - 1), low = Math.min(Math.floor(place), table.length - 2);
  return table[low].map((value, channel) => value + (place - low) * (table[low + 1][channel] - value));
}

/** Red, green and blue of a share from 0 to 1, dark to light. */
export const viridis = (share) => mix(VIRIDIS, share);

/** Red, green and blue of a signed value: −1 violet, 0 neutral, 1 orange. */
export const diverging = (value) => mix(PUOR, (value + 1) / 2);

/**
 * A map as a small canvas with one pixel per value, to be drawn enlarged.
 * @param {ArrayLike<number>} values
 * @param {(value: number) => number[]} paint from a value to red, green, blue[, alpha], each 0 to 255
 */
export function toCanvas(values, [h, w], paint, canvas = document.createElement("canvas")) {
  canvas.width = w;
  canvas.height = h;
  const context = canvas.getContext("2d"), image = context.createImageData(w, h);
  for (let i = 0; i < h * w; i++) {
    const [red, green, blue, alpha = 255] = paint(values[i]);
    image.data.set([red, green, blue, alpha], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// As in inspection/explain/overlay.py: grey and dark where a patch is not attended, a warm glow where it is.
const SHADE = [0.03, 0.04, 0.06], GLOW = [0.3, 0.17, 0.04];

/**
 * The two layers that `drawOverlay` mixes: the photo in dark grey, and its glow.
 * @param {CanvasImageSource} photo
 */
export function splitPhoto(photo, width, height) {
  const canvases = Array.from({ length: 3 }, () => Object.assign(document.createElement("canvas"), { width, height }));
  const [bright, dim, glow] = canvases.map((each) => each.getContext("2d", { willReadFrequently: false }));
  bright.drawImage(photo, 0, 0, width, height);
  const { data } = bright.getImageData(0, 0, width, height);
  const dark = dim.createImageData(width, height), warm = glow.createImageData(width, height);
  for (let i = 0; i < data.length; i += 4) {
    const mean = (data[i] + data[i + 1] + data[i + 2]) / 765;
    for (let c = 0; c < 3; c++) {
      dark.data[i + c] = 255 * (mean * 0.38 + SHADE[c]);
      warm.data[i + c] = 255 * GLOW[c] * (1.6 - mean);
    }
    dark.data[i + 3] = warm.data[i + 3] = 255;
  }
  dim.putImageData(dark, 0, 0);
  glow.putImageData(warm, 0, 0);
  return { bright: canvases[0], dim: canvases[1], glow: canvases[2] };
}
