// Figures below the photo: maps of all heads, of all layers, distances, positions, and the answer layer by layer.

import { toCanvas, viridis } from "./colors.js";
import { bar, find, findAll, make, svg, write } from "./dom.js";
import { percent, shorten } from "./words.js";

const NORMAL = [0, 1];

/** Draw small maps of the same size as buttons; those of a strip share one scale. */
export function drawStrip(place, maps, { names, chosen, grid, onChoose, scale = null, fromZero = true, label }) {
  let buttons = findAll("button", place);
  if (buttons.length !== maps.length) {
    buttons = maps.map((_, n) => make("button", { type: "button", className: "thumb", onclick: () => place.choose(n) },
      make("canvas", { width: 1, height: 1 }), make("span", {})));
    place.replaceChildren(...buttons);
  }
  place.choose = onChoose;
  const grids = maps.map((map) => map?.grid ?? grid);
  maps = maps.map((map) => (map && !ArrayBuffer.isView(map) ? map.values : map));
  const known = maps.filter(Boolean);
  const [low, high] = scale ?? (known.length ? range(known, fromZero) : NORMAL);
  buttons.forEach((button, n) => {
    const canvas = find("canvas", button);
    if (maps[n]) toCanvas(maps[n], grids[n], (value) => viridis((value - low) / (high - low || 1)), canvas);
    canvas.style.aspectRatio = `${grids[n][1]} / ${grids[n][0]}`;
    write(find("span", button), names[n]);
    button.setAttribute("aria-label", `${label} ${names[n]}`);
    button.setAttribute("aria-pressed", String(n === chosen));
  });
  return [low, high];
}

/** From 0, or from the smallest value, to the 99% quantile of all maps: single patches do not darken the rest. */
export function range(maps, fromZero = true) {
  const all = Float64Array.from(maps.flatMap((map) => Array.from(map))).sort();
  const low = fromZero ? 0 : all[0];
  return [low, Math.max(all[Math.floor(0.99 * (all.length - 1))], low + 1e-9)];
}

/**
 * One dot per head by layer, as an SVG; `onPoint(layer, head)` while the mouse or the focus is on a dot.
 * @param {{data: Float32Array, shape: number[]}} distance
 */
export function drawDistance(place, distance, { chosen, onPoint, onChoose }) {
  const [layers, heads] = distance.shape, width = Math.min(640, Math.max(280, place.clientWidth)), height = 260, left = 46, bottom = 34, top = 10;
  const most = Math.max(...distance.data.filter((value) => !Number.isNaN(value)), 1) * 1.08;
  const x = (layer) => left + ((layer + 0.5) / layers) * (width - left - 8);
  const y = (value) => top + (1 - value / most) * (height - top - bottom);
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((each) => most / each <= 6) ?? 1000;
  const key = `${width},${layers},${heads},${distance.data.join()}`;
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    const parts = [];
    for (let value = 0; value <= most; value += step) {
      parts.push(svg("line", { class: "rule", x1: left, x2: width - 8, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick end", x: left - 8, y: y(value) + 4 }, String(value)));
    }
    const every = Math.ceil(layers / Math.max(6, Math.min(16, (width - left) / 24)));
    for (let layer = 0; layer < layers; layer += every) {
      parts.push(svg("text", { class: "tick middle", x: x(layer), y: height - bottom + 16 }, String(layer)));
    }
    parts.push(svg("text", { class: "tick middle", x: (left + width) / 2, y: height - 2 }, "layer"));
    const means = [];
    for (let layer = 0; layer < layers; layer++) {
      const values = [...distance.data.subarray(layer * heads, (layer + 1) * heads)].filter((value) => !Number.isNaN(value));
      if (values.length) means.push(`${x(layer)},${y(values.reduce((a, b) => a + b, 0) / values.length)}`);
      values.forEach((value, head) => parts.push(dot(x(layer), y(value), layer, head, value)));
    }
    parts.splice(parts.findIndex((part) => part.localName === "circle"), 0, svg("polyline", { class: "mean", points: means.join(" ") }));
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Distance of ${layers * heads} heads by layer` }, ...parts);
    place.replaceChildren(make("p", { className: "axis" }, "distance (pixels); line: mean of the heads"), drawn);
    const aim = (event) => event.target.dataset?.layer && onPoint(Number(event.target.dataset.layer), Number(event.target.dataset.head));
    drawn.addEventListener("pointerover", aim);
    drawn.addEventListener("focusin", aim);
    drawn.addEventListener("pointerleave", () => onPoint(null, null));
    drawn.addEventListener("focusout", () => onPoint(null, null));
    drawn.addEventListener("click", (event) => event.target.dataset?.layer
      && onChoose(Number(event.target.dataset.layer), Number(event.target.dataset.head)));
    drawn.addEventListener("keydown", (event) => stepDots(event, drawn, layers, heads, onChoose));
  }
  for (const each of findAll("circle", place)) {
    const on = Number(each.dataset.layer) === chosen[0] && (chosen[1] === "mean" || Number(each.dataset.head) === chosen[1]);
    each.classList.toggle("chosen", on);
  }
}

function dot(x, y, layer, head, value) {
  const first = layer === 0 && head === 0;
  return svg("circle", { class: "dot", cx: x, cy: y, r: 5.5, tabindex: first ? 0 : -1, role: "button", "data-layer": layer, "data-head": head,
    "aria-label": `layer ${layer}, head ${head}: ${value.toFixed(1)} pixels` });
}

/** One dot is in the order of the tab key; arrows lead to the others. */
function stepDots(event, drawn, layers, heads, onChoose) {
  const { layer, head } = event.target.dataset ?? {};
  if (layer === undefined) return;
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  if (event.key === "Enter" || event.key === " ") onChoose(Number(layer), Number(head));
  else if (moves[event.key]) {
    const [to, other] = [(Number(layer) + moves[event.key][0] + layers) % layers, (Number(head) + moves[event.key][1] + heads) % heads];
    const next = find(`[data-layer="${to}"][data-head="${other}"]`, drawn);
    if (!next) return;
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

/** A map of maps: at each patch, its similarity to all patches. One canvas; `onPoint(patch)` under the mouse. */
export function drawPositions(place, positions, grid, { chosen, onPoint, onChoose }) {
  const [h, w] = grid, n = h * w, step = Math.max(1, Math.ceil(Math.max(h, w) / 16));
  const rows = Math.ceil(h / step), columns = Math.ceil(w / step), cell = [h + 2, w + 2];
  let canvas = find("canvas", place);
  const size = [rows * cell[0], columns * cell[1]];
  const patchOf = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows) * step;
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns) * step;
    return [Math.min(Math.max(row, 0), h - 1), Math.min(Math.max(column, 0), w - 1)];
  };
  if (!canvas || place.shown !== positions) {
    place.shown = positions;
    const least = positions.data.reduce((a, b) => Math.min(a, b), 1), image = new Float32Array(size[0] * size[1]).fill(NaN);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) {
        const from = (r * step * w + c * step) * n;
        for (let i = 0; i < n; i++) {
          const x = c * cell[1] + 1 + (i % w), y = r * cell[0] + 1 + Math.floor(i / w);
          image[y * size[1] + x] = (positions.data[from + i] - least) / (1 - least || 1);
        }
      }
    }
    canvas = toCanvas(image, size, (value) => (Number.isNaN(value) ? [0, 0, 0, 0] : viridis(value)));
    canvas.className = "positions";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${rows} by ${columns} maps: how similar the positions of the patches are`);
    const marker = make("span", { className: "marker", "aria-hidden": "true" });
    place.replaceChildren(make("div", { className: "framed" }, canvas, marker),
      make("p", { className: "axis" }, `dark: ${least.toFixed(2)}, bright: 1 (cosine)${step > 1 ? `; every ${step}th patch` : ""}`));
    canvas.addEventListener("pointermove", (event) => place.point(patchOf(event)));
    canvas.addEventListener("pointerleave", () => place.point(null));
    canvas.addEventListener("click", (event) => place.pick(patchOf(event)));
  }
  Object.assign(place, { point: onPoint, pick: onChoose });
  const marker = find(".marker", place);
  marker.hidden = !chosen;
  if (chosen) {
    const at = [Math.floor(chosen[0] / step), Math.floor(chosen[1] / step)];
    Object.assign(marker.style, { top: `${(100 * at[0]) / rows}%`, left: `${(100 * at[1]) / columns}%`,
      width: `${100 / columns}%`, height: `${100 / rows}%` });
  }
}

/** The most likely class after each layer, as a table; a click goes to the layer. */
export function drawLens(place, explained, { layer, onLayer }) {
  const { lens_index: index, lens_probability: probability } = explained.arrays, [layers, shown] = index.shape;
  const final = explained.top[0]?.index;
  const rows = Array.from({ length: layers }, (_, at) => {
    const best = index.data[at * shown], known = best >= 0, share = probability.data[at * shown];
    const next = known && shown > 1 ? `${shorten(explained.label(index.data[at * shown + 1]), 24)} ${percent(probability.data[at * shown + 1])}` : "";
    const button = make("button", { type: "button", className: "plain", "aria-pressed": at === layer, onclick: () => onLayer(at) }, String(at));
    return make("tr", { className: `${at === layer ? "chosen" : ""} ${best === final ? "final" : ""}` }, make("td", {}, button),
      make("td", {}, known ? shorten(explained.label(best), 30) : "–"), make("td", { className: "number" }, known ? percent(share) : ""),
      make("td", { className: "wide" }, bar(share)), make("td", { className: "soft second" }, next));
  });
  const head = make("tr", {}, ...["layer", "would have said", "sure", "", "then"].map((text, n) => make(text ? "th" : "td", { className: n === 4 ? "second" : "" }, text)));
  place.replaceChildren(make("table", { className: "lens" }, make("thead", {}, head), make("tbody", {}, ...rows)));
}

/** The strongest patches as a table, for those who cannot see the map. */
export function drawTable(place, explained, map) {
  const body = find("tbody", place);
  const order = Array.from(map.values.keys()).sort((a, b) => map.values[b] - map.values[a]).slice(0, 10);
  const unit = (value) => (map.unit === "average" ? `${value.toFixed(2)}× the average` : value.toFixed(2));
  body.replaceChildren(...order.map((at, rank) => make("tr", {}, make("td", { className: "number" }, String(rank + 1)),
    make("td", {}, explained.name(at, map.grid)), make("td", { className: "number" }, unit(map.values[at])))));
}
