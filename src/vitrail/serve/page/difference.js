// Two models on one photo: where one looked more than the other. Each has its own grid and crop.

import { diverging, toCanvas } from "./colors.js";
import { find, write } from "./dom.js";
import { percent } from "./words.js";

/**
 * Shares of the first map minus shares of the second, on the grid of the first; NaN outside of the second's crop.
 * @param {{values: ArrayLike<number>, patchAt: (point: number[]) => number[] | null, centerOf: (patch: number[]) => number[], grid: number[]}} one
 */
export function subtract(one, other) {
  const [h, w] = one.grid, cells = other.grid[0] * other.grid[1];
  return Float32Array.from({ length: h * w }, (_, n) => {
    const there = other.patchAt(one.centerOf([Math.floor(n / w), n % w]));
    if (!there) return NaN;
    return one.values[n] / (h * w) - (other.values[there[0] * other.grid[1] + there[1]] / cells) * (cells / (h * w));
  });
}

const side = ({ map, explained }) => (map && !map.grid && map.unit === "average" ? { values: map.values, grid: explained.grid, patchAt: (point) => explained.patchAt(point), centerOf: (patch) => explained.centerOf(patch) } : null);

/** Draw the difference of the maps that two panes show; hidden if they have none in common. */
export function drawDifference(panes) {
  const place = find("#difference"), [one, other] = panes.length === 2 ? panes.map((pane) => pane.explained && side(pane)) : [];
  place.hidden = !one || !other;
  if (place.hidden) return;
  const found = subtract(one, other), most = Math.max(...found.filter((value) => !Number.isNaN(value)).map(Math.abs), 1e-9);
  const canvas = find("canvas", place), [first, second] = panes.map((pane) => pane.name);
  toCanvas(found, one.grid, (value) => (Number.isNaN(value) ? [0, 0, 0, 0] : diverging(value / most)), canvas);
  canvas.style.aspectRatio = `${one.grid[1]} / ${one.grid[0]}`;
  write(find("h3", place), `${first} minus ${second}`);
  const at = found.reduce((best, value, n) => (Math.abs(value) > Math.abs(found[best]) || Number.isNaN(found[best]) ? n : best), 0);
  const text = `The largest difference is at ${Math.floor(at / one.grid[1])},${at % one.grid[1]}: ${found[at] > 0 ? first : second} looked more there, by ${percent(Math.abs(found[at]))} of the attention.`;
  write(find(".status", place), text);
  canvas.setAttribute("aria-label", text);
}
