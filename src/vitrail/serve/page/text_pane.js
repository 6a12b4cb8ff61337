// One model and one sentence: the words it wrote, and which words it looked at, as lines of words and as a matrix.

import { drawCheck } from "./answer.js";
import { viridis } from "./colors.js";
import { clearError, find, make, notify, say, svg, write } from "./dom.js";
import { drawStrip, range } from "./figures.js";
import { layerOf, redraw, state } from "./state.js";
import { explore } from "./wire.js";
import { connectWords } from "./word_lines.js";
import { percent, shorten } from "./words.js";

const MOST = 64; // words a side in the matrix; a longer sentence is shown up to here
const clone = (id) => find(`#${id}`).content.firstElementChild.cloneNode(true);

/** What asks (rows) and what is looked at (columns). */
const SIDES = {
  weights: ["target", "source"], encoder: ["source", "source"], decoder: ["target", "before"],
};

export const TEXT_VIEWS = [
  { name: "weights", tab: "Output to input", part: "maps", shows: "Each row is a word that was written; bright columns are the words of the input that were looked at. Point at a word or a cell.",
    not: "Looking at a word is not the same as translating it: the last words and the end often collect attention that has no meaning." },
  { name: "encoder", tab: "Input to input", shows: "How the words of the input look at each other while they are read.",
    not: "It says nothing about the output by itself." },
  { name: "decoder", tab: "Output to output", shows: "How each word that is written looks back at the words before it. Words that come later are not visible to it.",
    not: "A dark row does not mean that a word was ignored: its content may have moved on in an earlier layer." },
];

export class TextPane {
  reads = "text";

  constructor(model, act) {
    Object.assign(this, { name: model.name, model: model.explore, act, explained: null });
    this.parts = { pane: clone("text-pane"), strip: clone("image-strip") };
    this.parts.strip.setAttribute("aria-label", `Heads of ${model.name}`);
    const { pane } = this.parts, table = find(".matrix table", pane);
    const cell = (event) => event.target.closest?.("[data-row]");
    const point = (event) => {
      const at = cell(event);
      if (at) act.word({ row: Number(at.dataset.row) });
    };
    table.addEventListener("pointerover", point);
    table.addEventListener("focusin", point);
    table.addEventListener("pointerleave", () => act.word(null));
    find(".check", pane).hidden = !model.explore.parts?.check;
  }

  get layers() {
    const name = this.explained?.arrays[state.view] ? state.view : "weights";
    return this.explained?.arrays[name]?.shape[0] ?? this.model.layers ?? 1;
  }

  headsAt() {
    return this.explained?.arrays[state.view]?.shape[1] ?? 0;
  }

  get views() {
    return TEXT_VIEWS.filter(({ name }) => !this.explained || this.explained.arrays[name]);
  }

  async show(text) {
    this.aborter?.abort();
    const { signal } = (this.aborter = new AbortController());
    write(find(".status", this.parts.pane), "Translating …");
    try {
      this.explained = await explore(this.name, text, { part: "all" }, signal);
      Object.assign(this, { checked: null, cached: new Map() });
      clearError();
      redraw();
      this.checked = await explore(this.name, text, { part: "check" }, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      notify(error.message);
      write(find(".status", this.parts.pane), "");
    }
    redraw();
  }

  tokens(side) {
    return (this.explained.about[side] ?? []).slice(0, MOST);
  }

  /** Weights of a layer: the mean of the heads or one head, (rows, columns). */
  weights(layer, head) {
    const key = `${state.view} ${layer} ${head}`;
    if (this.cached.get(key)) return this.cached.get(key);
    const { data, shape: [, heads, rows, columns] } = this.explained.arrays[state.view], size = rows * columns;
    const chosen = head === "mean" ? Array.from({ length: heads }, (_, n) => n) : [head], found = new Float32Array(size);
    for (const each of chosen) {
      const start = (layer * heads + each) * size;
      for (let i = 0; i < size; i++) found[i] += data[start + i] / chosen.length;
    }
    this.cached.set(key, { values: found, rows, columns });
    return this.cached.get(key);
  }

  draw(names) {
    if (!this.explained) return;
    const { pane, strip } = this.parts, { about } = this.explained, sides = SIDES[state.view] ?? SIDES.weights;
    if (!this.explained.arrays[state.view]) {
      write(find(".title", pane), about.result);
      write(find(".status", pane), about.reasons?.maps ? `Only the translation: ${about.reasons.maps}.` : "");
      return;
    }
    const layer = layerOf(this.layers), head = state.head === "mean" || state.head < this.headsAt() ? state.head : "mean";
    const found = this.weights(layer, head), rows = this.tokens(sides[0]), columns = this.tokens(sides[1]);
    if (!(names.size === 1 && names.has("word"))) {
      write(find(".title", pane), about.result ?? rows.join(" "));
      write(find(".matrix h3", pane), `What each word looked at, layer ${layer}, ${head === "mean" ? "mean of the heads" : `head ${head}`}`);
      this.drawMatrix(find(".matrix table", pane), found, rows, columns);
      const grid = [found.rows, found.columns], maps = Array.from({ length: this.headsAt() }, (_, n) => this.weights(layer, n).values);
      write(find("h3", strip), `Heads of layer ${layer}`);
      drawStrip(find(".thumbs", strip), maps, { names: maps.map((_, n) => String(n)), chosen: head, grid, label: "head", scale: range(maps),
        onChoose: (n) => this.act.chooseHead(n) });
    }
    this.drawWords(found, rows, columns, sides);
    this.drawWordCheck(found, rows, columns);
  }

  /** What an output word loses without the input word that it looked at most. */
  drawWordCheck({ values, columns: width }, rows, columns) {
    const card = find(".check", this.parts.pane), { checked } = this;
    if (state.view !== "weights") return drawCheck(card, null, "", "Only what the output looks at in the input is checked.");
    if (!checked) return drawCheck(card, null);
    const { probability, without } = checked.arrays, inputs = without.shape[1], row = state.word?.row ?? this.lastRow ?? 0;
    if (row >= rows.length || !inputs) return;
    this.lastRow = row;
    const shares = values.subarray(row * width, row * width + inputs), best = shares.indexOf(Math.max(...shares));
    const losses = without.data.subarray(row * inputs, (row + 1) * inputs), others = [...losses].filter((_, n) => n !== best);
    const random = others.length ? others.reduce((sum, value) => sum + value, 0) / others.length : probability.data[row];
    const text = checked.about.texts[best], extra = `It looked most at “${columns[best]}”; without this word it would have said: ${text}`;
    drawCheck(card, { probability: probability.data[row], without: losses[best], random, extra, noun: "word" }, `“${rows[row]}”`, "",
      ["complete sentence", `without “${shorten(columns[best], 16)}”`, "without another word (mean)"]);
  }

  drawMatrix(table, { values, columns: width }, rows, columns) {
    const top = range([values])[1];
    const head = make("tr", {}, make("td", {}), ...columns.map((word, at) => make("th", { className: "above", "data-at": at }, make("span", {}, shorten(word, 14)))));
    table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows.map((word, row) => make("tr", {},
      make("th", { "data-row": row, tabIndex: 0 }, shorten(word, 16)),
      ...columns.map((_, column) => {
        const share = values[row * width + column], cell = make("td", { "data-row": row, "data-column": column, title: `${word} → ${columns[column]}: ${percent(share)}` });
        cell.style.background = `rgb(${viridis(share / top).map(Math.round).join(" ")})`;
        return cell;
      })))));
  }

  /** The matrix with its words as an image. */
  drawImage() {
    const sides = SIDES[state.view], rows = this.tokens(sides[0]), columns = this.tokens(sides[1]), cell = 40, left = 160, top = 130;
    const canvas = make("canvas", { width: left + cell * columns.length, height: top + cell * rows.length }), context = canvas.getContext("2d");
    const { values } = this.weights(layerOf(this.layers), state.head), most = range([values])[1], styles = getComputedStyle(document.body);
    Object.assign(context, { font: `18px ${styles.fontFamily}`, fillStyle: styles.color, textAlign: "right", textBaseline: "middle" });
    rows.forEach((word, row) => context.fillText(shorten(word, 16), left - 8, top + (row + 0.5) * cell));
    context.textAlign = "left";
    columns.forEach((word, column) => {
      context.setTransform(0, -1, 1, 0, left + (column + 0.5) * cell, top - 8);
      context.fillText(shorten(word, 12), 0, 0);
    });
    context.resetTransform();
    values.forEach((value, n) => {
      context.fillStyle = `rgb(${viridis(value / most).map(Math.round).join(" ")})`;
      context.fillRect(left + (n % columns.length) * cell, top + Math.floor(n / columns.length) * cell, cell - 1, cell - 1);
    });
    return canvas;
  }

  /** Both columns of words, with lines from the word that is pointed at to those that it looked at. */
  drawWords({ values, columns: width }, rows, columns, sides) {
    const { pane } = this.parts, place = find(".lines", pane), key = JSON.stringify([rows, columns]), { about } = this.explained;
    if (place.dataset.key !== key) {
      place.dataset.key = key;
      const list = (side, words, name) => make("ol", { className: side, "aria-label": name },
        ...words.map((word) => make("li", { tabIndex: 0 }, make("bdi", {}, word))));
      find(".sides", place).replaceChildren(list("read", columns, sides[1] === "source" ? "input" : "output"),
        make("div", { className: "ties" }, svg("svg", { "aria-hidden": "true", preserveAspectRatio: "none" })),
        list("written", rows, sides[0] === "target" ? "output" : "input"));
      this.lines = connectWords(place, (pointed) => this.act.word(pointed && (pointed[0] ? { row: pointed[1] } : { column: pointed[1] })));
      this.drawn = null;
    }
    if (this.drawn !== values) this.lines.show(rows.map((_, row) => Array.from(values.subarray(row * width, row * width + columns.length))), { largest: 1, format: percent });
    this.drawn = values;
    const { row, column } = state.word ?? {}, shade = (from, to) => values[from * width + to];
    const asksRow = row !== undefined && row < rows.length, asksColumn = !asksRow && column !== undefined && column < columns.length;
    this.lines.point(asksRow ? [1, row] : asksColumn ? [0, column] : null);
    for (const cell of pane.querySelectorAll(".matrix [data-row]")) cell.classList.toggle("lit", asksRow && row === Number(cell.dataset.row));
    let line = `Point at a word to see what it looked at. ${about.score === undefined ? "" : `Score ${Number(about.score).toFixed(2)}.`}`;
    if (asksRow) {
      const best = columns.reduce((top, _, n) => (shade(row, n) > shade(row, top) ? n : top), 0);
      line = `“${rows[row]}” looks most at “${columns[best]}”, ${percent(shade(row, best))}`;
    } else if (asksColumn) {
      const best = rows.reduce((top, _, n) => (shade(n, column) > shade(top, column) ? n : top), 0);
      line = `“${columns[column]}” is looked at most by “${rows[best]}”, ${percent(shade(best, column))}`;
    }
    write(find(".status", pane), line);
    if (asksRow || asksColumn) say(line);
  }

  close() {
    this.aborter?.abort();
  }
}
