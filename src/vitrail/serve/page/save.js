// What a visitor takes along: a link, an image of the figure, the numbers behind it.

import { download, find, notify } from "./dom.js";
import { npz } from "./npz.js";

const fileName = (pane, photo, end) => `${(photo?.name ?? "vitrail").replace(/\.[^.]*$/, "").replace(/[^\w.-]+/g, "-").slice(0, 60) || "photo"}.${pane.name.replace(/[^\w.-]+/g, "-")}.${end}`;

export async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    notify("The link is copied. It opens the same view; a photo of your own has to be opened again, it is not in the link.", "info");
  } catch {
    notify(`This browser does not let a page copy: take the address of the window.`, "info");
  }
}

/** The photo with its map, title, status and top classes, as a PNG at twice the size. */
export function savePng(panes, photo) {
  const drawn = panes.map((pane) => pane.parts.pane), canvases = drawn.map((pane, n) => panes[n].drawImage?.() ?? find("canvas", pane));
  const side = 640, gap = 24, styles = getComputedStyle(document.body);
  const width = panes.length * (side + gap) + gap;
  const lines = drawn.map((pane) => [find(".status", pane)?.textContent, ...pane.querySelectorAll(".answer ol button")].filter(Boolean)
    .map((each) => (typeof each === "string" ? each : `${find(".number", each).textContent.padStart(6)}  ${find(".name", each).textContent}`)));
  const heights = canvases.map((canvas) => (side * canvas.height) / canvas.width);
  const height = 64 + Math.max(...heights.map((each, n) => each + 26 * lines[n].length)) + 48;
  const target = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  const context = target.getContext("2d"), font = (size, weight = "") => `${weight} ${size}px ${styles.fontFamily}`;
  context.scale(2, 2);
  context.fillStyle = styles.backgroundColor;
  context.fillRect(0, 0, width, height);
  context.fillStyle = styles.color;
  panes.forEach((pane, n) => {
    const left = gap + n * (side + gap);
    context.font = font(18, "600");
    context.fillText(find(".title", drawn[n]).textContent, left, 40, side);
    context.drawImage(canvases[n], left, 56, side, heights[n]);
    context.font = font(15);
    lines[n].forEach((text, row) => context.fillText(text, left, 56 + heights[n] + 26 * (row + 1), side));
    context.font = font(13);
    context.fillText(`${pane.name}, vitrail`, left, height - 18, side);
  });
  target.toBlob((blob) => download(fileName(panes[0], photo, "png"), blob), "image/png");
}

/** Everything that the figures show, as arrays for numpy.load. */
export function saveNpz(pane, photo) {
  const arrays = { ...pane.explained.arrays };
  if (pane.map) arrays.map = { data: Float32Array.from(pane.map.values), shape: pane.map.grid ?? pane.explained.grid };
  arrays.about = { data: JSON.stringify({ ...pane.explained.about, link: location.hash }), shape: [] };
  download(fileName(pane, photo, "npz"), new Blob([npz(arrays)], { type: "application/zip" }));
}
