// Draw a photo with what a model attends to: bright where it looked, dark grey elsewhere, nothing outside of its crop.

import { splitPhoto, toCanvas } from "./colors.js";
import { limits, strongest } from "./maths.js";

const LONGEST = 640; // pixels of the drawing, before the page scales it

/** A photo on a canvas. `place` is {photo, box, grid} of the answer, in pixels of the photo. */
export class PhotoCanvas {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.scratch = document.createElement("canvas");
    this.place = null;
  }

  /** @param {ImageBitmap} bitmap */
  setPhoto(bitmap, place) {
    const scale = LONGEST / Math.max(bitmap.width, bitmap.height);
    const width = Math.round(bitmap.width * scale), height = Math.round(bitmap.height * scale);
    if (this.bitmap !== bitmap) {
      this.layers = splitPhoto(bitmap, width, height);
      this.bitmap = bitmap;
      Object.assign(this.canvas, { width, height });
    }
    this.place = place;
    this.scale = place ? height / place.photo[0] : 1;
    if (place) this.prepare(width, height);
  }

  /** What does not change under the mouse: the photo with a pale margin, bright and dim in the crop; a scratch of its size. */
  prepare(width, height) {
    const box = this.rectangle(null), [left, top] = box.map(Math.floor);
    Object.assign(this.scratch, { width: Math.ceil(box[0] + box[2]) - left, height: Math.ceil(box[1] + box[3]) - top });
    this.corner = [left, top];
    this.bases = ["bright", "dim"].map((name) => {
      const base = Object.assign(document.createElement("canvas"), { width, height }), context = base.getContext("2d");
      context.drawImage(this.layers.bright, 0, 0);
      this.fade(context);
      context.beginPath();
      context.rect(...box);
      context.clip();
      context.drawImage(this.layers[name], 0, 0);
      return base;
    });
  }

  /** Left, top, width and height of a patch, or of the whole crop, on the canvas. */
  rectangle(patch) {
    const { box: [top, left, rows, columns], grid: [h, w] } = this.place, s = this.scale;
    if (!patch) return [left * s, top * s, columns * s, rows * s];
    return [(left + (patch[1] * columns) / w) * s, (top + (patch[0] * rows) / h) * s, (columns / w) * s, (rows / h) * s];
  }

  /** Draw the map in `values` (n), with the asking patch, the hidden patches and, if wanted, the grid. */
  draw({ values = null, mapGrid = this.place?.grid, fromZero = true, asking = null, cursor = null, hidden = new Set(), grid = false, outlined = true }) {
    const context = this.canvas.getContext("2d"), { width, height } = this.canvas;
    context.globalCompositeOperation = "source-over";
    if (!this.place) return context.drawImage(this.layers.bright, 0, 0), null;
    context.drawImage(this.bases[values ? 1 : 0], 0, 0);
    let scale = null;
    if (values) {
      scale = limits(values, fromZero);
      this.drawMap(context, values, mapGrid, scale);
      if (outlined) this.outline(context, strongest(values), mapGrid);
    }
    for (const each of hidden) this.hide(context, each.split(",").map(Number));
    if (grid) this.drawGrid(context);
    if (cursor) this.frame(context, this.rectangle(cursor), [3, 3]);
    if (asking) this.frame(context, this.rectangle(asking), [6, 4]);
    return { scale, width, height };
  }

  drawMap(context, values, grid, [low, high]) {
    const box = this.rectangle(null), [left, top] = this.corner;
    const strength = (value) => Math.min(Math.max((value - low) / (high - low), 0), 1);
    context.save();
    context.beginPath();
    context.rect(...box);
    context.clip();
    const passes = [
      [this.layers.bright, (share) => share, "source-over"], [this.layers.glow, (share) => share * share, "lighter"],
    ];
    const scratch = this.scratch.getContext("2d");
    for (const [layer, alpha, mode] of passes) {
      const small = toCanvas(values, grid, (value) => [0, 0, 0, 255 * alpha(strength(value))]);
      scratch.setTransform(1, 0, 0, 1, -left, -top);
      scratch.globalCompositeOperation = "copy";
      scratch.imageSmoothingQuality = "high";
      scratch.drawImage(spread(small), 0, 0, small.width + 2, small.height + 2, ...grown(box, grid));
      scratch.globalCompositeOperation = "source-in";
      scratch.drawImage(layer, 0, 0);
      context.globalCompositeOperation = mode;
      context.drawImage(this.scratch, left, top);
    }
    context.restore();
  }

  /** What the model does not receive: pale. */
  fade(context) {
    const [left, top, columns, rows] = this.rectangle(null), { width, height } = this.canvas;
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height);
    context.rect(left, top, columns, rows);
    context.clip("evenodd");
    context.fillStyle = "rgb(176 180 186 / 0.9)";
    context.fillRect(0, 0, width, height);
    context.restore();
  }

  /** The edges between chosen patches and others, white on black: visible on any background. */
  outline(context, chosen, [h, w]) {
    const at = (r, c) => r >= 0 && c >= 0 && r < h && c < w && chosen[r * w + c];
    const [left, top, columns, rows] = this.rectangle(null), dx = columns / w, dy = rows / h;
    context.beginPath();
    for (let r = 0; r <= h; r++) {
      for (let c = 0; c <= w; c++) {
        const x = left + c * dx, y = top + r * dy;
        if (at(r, c) !== at(r - 1, c)) line(context, x, y, x + dx, y);
        if (at(r, c) !== at(r, c - 1)) line(context, x, y, x, y + dy);
      }
    }
    this.strokeTwice(context, []);
  }

  strokeTwice(context, dashes) {
    const thin = Math.max(1.4, this.canvas.width / 420);
    context.lineCap = "round";
    for (const [color, width, dash] of [["#000", 2.4 * thin, []], ["#fff", 1.2 * thin, dashes]]) {
      Object.assign(context, { strokeStyle: color, lineWidth: width });
      context.setLineDash(dash);
      context.stroke();
    }
    context.setLineDash([]);
  }

  frame(context, [left, top, width, height], dashes) {
    context.beginPath();
    context.rect(left, top, width, height);
    this.strokeTwice(context, dashes);
  }

  hide(context, patch) {
    const [left, top, width, height] = this.rectangle(patch);
    context.fillStyle = "#8a8f98";
    context.fillRect(left, top, width, height);
    context.strokeStyle = "#5b626b";
    context.lineWidth = 1;
    context.beginPath();
    line(context, left, top + height, left + width, top);
    context.stroke();
  }

  drawGrid(context) {
    const [h, w] = this.place.grid, [left, top, columns, rows] = this.rectangle(null);
    context.beginPath();
    for (let r = 0; r <= h; r++) line(context, left, top + (r * rows) / h, left + columns, top + (r * rows) / h);
    for (let c = 0; c <= w; c++) line(context, left + (c * columns) / w, top, left + (c * columns) / w, top + rows);
    for (const [color, width] of [["rgb(0 0 0 / 0.45)", 2], ["rgb(255 255 255 / 0.7)", 1]]) {
      Object.assign(context, { strokeStyle: color, lineWidth: width });
      context.stroke();
    }
  }
}

const line = (context, x, y, toX, toY) => {
  context.moveTo(x, y);
  context.lineTo(toX, toY);
};

/** A map with its border repeated, so that smoothing does not fade at the edges. */
function spread(small) {
  const { width, height } = small;
  const wide = Object.assign(document.createElement("canvas"), { width: width + 2, height: height + 2 });
  const context = wide.getContext("2d");
  context.globalCompositeOperation = "copy";
  context.drawImage(small, 0, 0, width, height, 1, 1, width, height);
  context.globalCompositeOperation = "destination-over";
  const edges = [
    [0, 0, width, 1, 1, 0], [0, height - 1, width, 1, 1, height + 1], [0, 0, 1, height, 0, 1],
    [width - 1, 0, 1, height, width + 1, 1], [0, 0, 1, 1, 0, 0], [width - 1, 0, 1, 1, width + 1, 0],
    [0, height - 1, 1, 1, 0, height + 1], [width - 1, height - 1, 1, 1, width + 1, height + 1],
  ];
  for (const [x, y, columns, rows, toX, toY] of edges) context.drawImage(small, x, y, columns, rows, toX, toY, columns, rows);
  return wide;
}

/** A rectangle with one patch more on each side. */
function grown([left, top, width, height], [h, w]) {
  return [left - width / w, top - height / h, width + (2 * width) / w, height + (2 * height) / h];
}
