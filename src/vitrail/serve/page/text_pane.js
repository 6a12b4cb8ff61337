// One model and one sentence: the words it wrote, and which words it looked at, as lines of words and as a matrix.

import { drawCheck } from "./answer.js";
import { viridis } from "./colors.js";
import { find, make, notify, say, write } from "./dom.js";
import { drawStrip, range } from "./figures.js";
import { layerOf, redraw, state } from "./state.js";
import { explore } from "./wire.js";
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
    const { pane } = this.parts, table = find(".matrix table", pane);
    const cell = (event) => event.target.closest?.("[data-row]");
    const point = (event) => {
      const at = cell(event);
      if (at) act.word({ side: "matrix", row: Number(at.dataset.row), column: at.dataset.column === undefined ? null : Number(at.dataset.column) });
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
      this.checked = null;
      notify("");
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
    const { data, shape: [, heads, rows, columns] } = this.explained.arrays[state.view], size = rows * columns;
    const chosen = head === "mean" ? Array.from({ length: heads }, (_, n) => n) : [head], found = new Float32Array(size);
    for (const each of chosen) {
      const start = (layer * heads + each) * size;
      for (let i = 0; i < size; i++) found[i] += data[start + i] / chosen.length;
    }
    return { values: found, rows, columns };
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
    const { probability, without } = checked.arrays, inputs = without.shape[1], row = state.word?.side !== "target-line" && state.word?.row !== undefined ? state.word.row : this.lastRow ?? 0;
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
    const head = make("tr", {}, make("th", {}), ...columns.map((word, at) => make("th", { className: "above", "data-at": at }, make("span", {}, shorten(word, 14)))));
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

  /** Both lines of words: the one that is pointed at, and how strongly it looked at each of the others. */
  drawWords({ values, columns: width }, rows, columns, sides) {
    const { pane } = this.parts, at = state.word, { about } = this.explained;
    const asked = at === null ? null : at.side === "target-line" ? { column: at.row } : { row: at.row };
    const shade = (row, column) => values[row * width + column];
    const mark = (place, words, side, strength, chosen) => {
      const spans = words.map((word, n) => {
        const token = make("span", { className: `word${n === chosen ? " chosen" : ""}`, tabIndex: 0,
          onpointerenter: () => this.act.word({ side: `${side}-line`, row: n }), onfocus: () => this.act.word({ side: `${side}-line`, row: n }) }, word);
        if (strength) token.style.setProperty("--share", String(Math.min(strength(n), 1)));
        return token;
      });
      const focused = [...place.children].indexOf(document.activeElement);
      if (place.childElementCount === spans.length) {
        spans.forEach((token, n) => {
          const old = place.children[n];
          write(old, token.textContent);
          old.className = token.className;
          old.style.setProperty("--share", strength ? String(Math.min(strength(n), 1)) : "0");
        });
      } else place.replaceChildren(...spans);
      if (focused >= 0 && document.activeElement === document.body) place.children[focused]?.focus();
    };
    const most = asked === null ? 1 : Math.max(...(asked.row !== undefined ? columns.map((_, n) => shade(asked.row, n)) : rows.map((_, n) => shade(n, asked.column))), 1e-9);
    mark(find(".target", pane), rows, "source", asked?.column !== undefined ? (n) => shade(n, asked.column) / most : null, asked?.row ?? null);
    mark(find(".source", pane), columns, "target", asked?.row !== undefined ? (n) => shade(asked.row, n) / most : null, asked?.column ?? null);
    find(".source-name", pane).textContent = sides[1] === "source" ? "input" : "output";
    find(".target-name", pane).textContent = sides[0] === "target" ? "output" : "input";
    for (const cell of pane.querySelectorAll(".matrix [data-row]")) cell.classList.toggle("lit", asked?.row === Number(cell.dataset.row));
    let line = `Point at a word to see what it looked at. ${about.score === undefined ? "" : `Score ${Number(about.score).toFixed(2)}.`}`;
    if (asked?.row !== undefined) {
      const best = columns.reduce((top, _, n) => (shade(asked.row, n) > shade(asked.row, top) ? n : top), 0);
      line = `“${rows[asked.row]}” looks most at “${columns[best]}”, ${percent(shade(asked.row, best))}`;
    } else if (asked?.column !== undefined) {
      const best = rows.reduce((top, _, n) => (shade(n, asked.column) > shade(top, asked.column) ? n : top), 0);
      line = `“${columns[asked.column]}” is looked at most by “${rows[best]}”, ${percent(shade(best, asked.column))}`;
    }
    write(find(".status", pane), line);
    if (asked) say(line);
  }

  close() {
    this.aborter?.abort();
  }
}
