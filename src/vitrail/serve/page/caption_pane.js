// One model that describes a photo: its words, and where it looked when it wrote each of them.

import { drawCheck, drawRandom } from "./answer.js";
import { find, make, notify, say, write } from "./dom.js";
import { drawStrip } from "./figures.js";
import { centerOf, largest, patchAt, shareOf } from "./maths.js";
import { PhotoCanvas } from "./photo.js";
import { followPointer } from "./pointer.js";
import { layerOf, redraw, state } from "./state.js";
import { explore } from "./wire.js";
import { percent, times } from "./words.js";

const clone = (id) => find(`#${id}`).content.firstElementChild.cloneNode(true);

const CAPTION_VIEWS = [
  { name: "attention", tab: "Attention", shows: "Where the model looked when it wrote the chosen word, in one layer. Point at a word; with a patch under the mouse, words are marked that looked at it.",
    not: "Looking at a part is not the same as naming it. Small words often look anywhere." },
  { name: "class", tab: "All layers", shows: "Where the model looked when it wrote the chosen word: the mean of all layers and heads.",
    not: "Layers that look elsewhere cancel out. Looking at a part is not the same as naming it: see the check." },
];

export class CaptionPane {
  reads = "photo";

  constructor(model, act) {
    Object.assign(this, { name: model.name, model: model.explore, act, explained: null, hidden: new Set() });
    this.parts = { pane: clone("image-pane"), strip: clone("image-strip") };
    this.parts.strip.setAttribute("aria-label", `Heads of ${model.name}`);
    const { pane } = this.parts;
    this.photo = new PhotoCanvas(find("canvas", pane));
    followPointer(this.photo.canvas, this);
    for (const each of [".brush", ".answer ol", ".answer .other"]) find(each, pane).hidden = true;
    this.line = make("p", { className: "words-line target", role: "group" });
    find(".answer", pane).append(this.line, make("p", { className: "soft" }, "Point at a word, or use the left and right arrow keys."));
  }

  get layers() {
    return this.explained?.arrays.weights?.shape[0] ?? this.model.layers ?? 1;
  }

  headsAt() {
    return this.explained?.arrays.weights?.shape[1] ?? 0;
  }

  views = CAPTION_VIEWS;

  async show(photo) {
    this.aborter?.abort();
    const { signal } = (this.aborter = new AbortController());
    find(".busy", this.parts.pane).hidden = false;
    try {
      const { about, arrays } = await explore(this.name, photo.blob, { part: "all" }, signal);
      const place = { photo: about.photo, box: about.box, grid: about.grid };
      this.explained = { about, arrays, grid: about.grid, words: about.words ?? [], patchAt: (point) => point && patchAt(point, place),
        centerOf: (patch) => centerOf(patch, place), readout: "" };
      Object.assign(this, { blob: photo.blob, checkKey: "" });
      this.photo.setPhoto(photo.bitmap, place);
      this.act.word(null);
    } catch (error) {
      if (error.name === "AbortError") return;
      notify(error.message);
    }
    find(".busy", this.parts.pane).hidden = true;
    redraw();
  }

  /** The map of a word in a layer, or in all of them, in multiples of the average patch. */
  values(word, layer, head) {
    const { weights } = this.explained.arrays, n = this.explained.grid[0] * this.explained.grid[1], map = new Float32Array(n);
    const [layers, heads, words] = weights.shape, chosen = head === "mean" || layer === null ? [...Array(heads).keys()] : [head];
    for (const at of layer === null ? Array(layers).keys() : [layer]) {
      for (const each of chosen) {
        const start = ((at * heads + each) * words + word) * n;
        for (let i = 0; i < n; i++) map[i] += weights.data[start + i] / chosen.length;
      }
    }
    const sum = map.reduce((all, value) => all + value, 0) || 1;
    return { values: map.map((value) => (value * n) / sum), share: sum };
  }

  draw() {
    if (!this.explained) return;
    const { pane, strip } = this.parts, { about, words, grid } = this.explained, layer = layerOf(this.layers);
    const word = Math.min(state.word?.row ?? 0, words.length - 1), head = state.head === "mean" || state.head < this.headsAt() ? state.head : "mean";
    this.drawLine(word, layer, head);
    write(find(".answer h3", pane), "What it says");
    write(find(".title", pane), words.length ? `What the model looked at for “${words[word]}”` : "The caption is empty");
    if (!words.length) return void this.photo.draw({});
    const { values } = (this.map = { ...this.values(word, state.view === "class" ? null : layer, head), unit: "average" });
    const { scale } = this.photo.draw({ values, cursor: this.explained.patchAt(state.hover), grid: Boolean(state.hover) });
    const best = values.reduce((at, value, n) => (value > values[at] ? n : at), 0), sum = values.reduce((a, b) => a + b, 0);
    const status = `“${words[word]}” looked most at ${Math.floor(best / grid[1])},${best % grid[1]}: ${percent(values[best] / sum)} of its attention to patches`;
    write(find(".status", pane), status);
    this.photo.canvas.setAttribute("aria-label", `${about.result ?? words.join(" ")}. ${status}`);
    if (state.word) say(status);
    write(find(".low", pane), "0");
    write(find(".high", pane), `≥ ${times(scale[1])}`);
    write(find(".unit", pane), "the average patch; outlined: the strongest 5%");
    this.scheduleCheck(word, values);
    const maps = Array.from({ length: this.headsAt() }, (_, n) => this.values(word, layer, n).values);
    write(find("h3", strip), `Heads of layer ${layer} for “${words[word]}”`);
    drawStrip(find(".thumbs", strip), maps, { names: maps.map((_, n) => String(n)), chosen: head, grid, label: "head", onChoose: (n) => this.act.chooseHead(n) });
  }

  /** The caption, word by word; with a patch under the mouse, how strongly each word looked at it. */
  drawLine(word, layer, head) {
    const { words, grid } = this.explained, patch = this.explained.patchAt(state.hover);
    if (this.line.childElementCount !== words.length || this.line.dataset.words !== words.join(" ")) {
      this.line.dataset.words = words.join(" ");
      this.line.replaceChildren(...words.map((each, n) => make("button", { type: "button", className: "word", onpointerenter: () => this.act.word({ row: n }),
        onfocus: () => this.act.word({ row: n }), onclick: () => this.act.word({ row: n }) }, each)));
    }
    [...this.line.children].forEach((button, n) => {
      const share = patch ? this.values(n, layer, head).values[patch[0] * grid[1] + patch[1]] / 4 : 0;
      button.classList.toggle("chosen", n === word);
      button.setAttribute("aria-pressed", String(n === word));
      button.style.setProperty("--share", String(Math.min(share, 1)));
    });
  }

  /** Check the map of a word: how sure the model is of it without the brightest patches. */
  scheduleCheck(word, values) {
    const card = find(".check", this.parts.pane), { explained } = this, share = explained.about.check.share, count = shareOf(share, values.length);
    const brightest = largest(values, count), key = `${word}|${brightest}`;
    if (key === this.checkKey) return;
    this.checkKey = key;
    clearTimeout(this.timer);
    if (!find("dl", card)) drawCheck(card, null);
    card.classList.add("stale");
    this.timer = setTimeout(async () => {
      try {
        const hide = [brightest, ...drawRandom(share, values.length)].map((each) => each.join(".")).join("_");
        const { about, arrays: { probability: { data, shape: [sets, words] } } } = await explore(this.name, this.blob, { part: "hide", hide });
        if (this.checkKey !== key) return;
        const random = Array.from({ length: sets - 1 }, (_, n) => data[(n + 1) * words + word]).reduce((sum, value) => sum + value, 0) / (sets - 1);
        const extra = `Without these patches it would have written: ${about.texts[0]}`;
        drawCheck(card, { share, probability: explained.arrays.probability.data[word], without: data[word], random, extra }, `“${explained.words[word]}”`);
      } catch (error) {
        drawCheck(card, null, "", `Not checked: ${error.message}`);
      }
      card.classList.remove("stale");
    }, 350);
  }

  step(_, by) {
    const { words } = this.explained;
    this.act.word({ row: Math.min(Math.max((state.word?.row ?? 0) + by, 0), words.length - 1) });
  }

  close() {
    clearTimeout(this.timer);
    this.aborter?.abort();
  }
}
