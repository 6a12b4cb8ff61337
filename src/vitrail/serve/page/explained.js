// One photo explained by one model: every map that the page draws, from the arrays of the answer.

import { Attention, centerOf, defaultReadout, largest, patchAt, shareOf } from "./maths.js";

const CHECK_SHARE = 0.2; // of the patches, removed to check a map

export class Explained {
  /**
   * @param {any} model what describe() returned
   * @param {{about: any, arrays: any}} answer
   */
  constructor(model, { about, arrays }) {
    Object.assign(this, { model, about, arrays, top: about.top ?? [] });
    this.grid = about.grid ?? model.grid;
    this.place = { photo: about.photo, box: about.box, grid: this.grid };
    this.patches = this.grid[0] * this.grid[1];
    this.relevance = new Map();
    this.explained = about.explained?.index ?? about.explained ?? this.top[0]?.index ?? null;
    this.share = about.check?.share ?? CHECK_SHARE;
    this.panels = new Map();
    if (arrays.relevance) this.addClass(this.explained, { about, arrays });
    const tokens = arrays.maps?.shape.at(-1) ?? (model.prefix?.length ?? 0) + this.patches;
    const readout = arrays.readout?.data ?? defaultReadout(model.prefix ?? [], this.patches, tokens);
    this.attention = new Attention(model.heads, tokens, this.patches, readout);
    this.prefix = tokens - this.patches;
    this.take(arrays, about);
  }

  /** Keep the maps or panels of an answer, of all layers or of the one that was asked for. */
  take(arrays, about) {
    if (arrays.maps) this.addLayers(about.map_layers?.[0] ?? 0, arrays);
    const size = arrays.panels ? arrays.panels.data.length / arrays.panels.shape[0] : 0;
    (about.panel_layers ?? []).forEach((layer, n) => {
      this.panels.set(layer, { data: arrays.panels.data.subarray(n * size, (n + 1) * size), shape: arrays.panels.shape.slice(1) });
    });
  }

  /** Maps of one layer (H, N, N) or of all layers (L, H, N, N), as bytes. */
  addLayers(first, { maps, scale }) {
    const count = maps.shape.length === 4 ? maps.shape[0] : 1;
    const [bytes, rows] = [maps.data.length / count, scale.data.length / count];
    for (let n = 0; n < count; n++) {
      const values = maps.data.subarray(n * bytes, (n + 1) * bytes);
      this.attention.addLayer(first + n, values, scale.data.subarray(n * rows, (n + 1) * rows));
    }
  }

  /** Relevance of the patches for a class, by layer. */
  addClass(index, { arrays }) {
    this.relevance.set(index, { data: arrays.relevance.data, layers: arrays.relevance.shape[0] });
  }

  /** A slice of an array (L, h, w); an array of fewer layers has those up to the last one. */
  slice({ data, layers }, layer) {
    const at = Math.min(Math.max(layer - (this.model.layers - layers), 0), layers - 1);
    return data.subarray(at * this.patches, (at + 1) * this.patches);
  }

  /** The token of a patch. */
  token(patch) {
    return patch ? this.prefix + patch[0] * this.grid[1] + patch[1] : null;
  }

  patchAt(point) {
    return point && patchAt(point, this.place);
  }

  centerOf(patch) {
    return centerOf(patch, this.place);
  }

  /** What the classifier reads, in words. */
  get readout() {
    const { reads = [] } = this.model;
    if (reads.length) return reads.length > 1 ? "the class and distillation tokens" : `the ${reads[0]} token`;
    const { data } = this.arrays.readout ?? { data: [0] };
    return Math.max(...data) > 1.01 / this.patches ? "what the classifier reads" : "all patches on average";
  }

  /**
   * The map over the photo: values (n) and how to read them, or nothing while it is on its way.
   * @returns {{kind: string, values: ArrayLike<number>, unit: string, fromZero: boolean, row?: ArrayLike<number>, prefix?: number} | null}
   */
  map(view, layer, head, patch, cls) {
    const { arrays } = this, token = this.token(patch);
    if (view === "norms" && arrays.norms) {
      const norms = { data: arrays.norms.data, layers: arrays.norms.shape[0] };
      return { kind: "norms", values: this.slice(norms, layer), unit: "length", fromZero: false };
    }
    if (view === "positions" && arrays.positions) {
      const start = (this.token(patch ?? this.middle()) - this.prefix) * this.patches;
      return { kind: "positions", values: arrays.positions.data.subarray(start, start + this.patches), unit: "cosine", fromZero: false };
    }
    if ((view === "class" || view === "lens") && !patch) {
      const found = this.relevance.get(cls ?? this.explained);
      if (!found) return view === "lens" ? this.map("attention", layer, head, null, null) : null;
      const map = this.slice(found, layer), sum = map.reduce((all, value) => all + value, 0) || 1;
      return { kind: "class", values: map.map((value) => (value * this.patches) / sum), unit: "average", fromZero: true };
    }
    if (!this.attention.has(layer)) return this.panel(layer, head);
    const row = view === "rollout" ? this.rollout(layer, token) : this.attention.row(layer, head, token);
    if (!row) return null;
    const { values, prefix } = this.attention.toPatches(row);
    return { kind: view === "rollout" ? view : "attention", values, unit: "average", fromZero: true, row, prefix };
  }

  /** Models without square maps: what the classifier's input attends to, by layer and head, each layer in its own grid. */
  panel(layer, head) {
    const found = this.panels.get(layer);
    if (!found) return null;
    const [heads, h, w] = found.shape, n = h * w, values = new Float32Array(n);
    const chosen = head === "mean" || head >= heads ? [...Array(heads).keys()] : [head];
    for (const each of chosen) {
      for (let i = 0; i < n; i++) values[i] += (found.data[each * n + i] * n) / chosen.length;
    }
    return { kind: "attention", values, unit: "average", fromZero: true, grid: [h, w] };
  }

  rollout(layer, token) {
    for (let at = 0; at <= layer; at++) if (!this.attention.has(at)) return null;
    return this.attention.rollout(layer, token);
  }

  middle() {
    return [Math.floor(this.grid[0] / 2), Math.floor(this.grid[1] / 2)];
  }

  /** The patches that a check removes, as "row,column". */
  brightest(values) {
    return largest(values, shareOf(this.share, this.patches)).map((index) => this.name(index));
  }

  /** Row and column of a patch, for people and for the server. */
  name(index, grid = this.grid) {
    return `${Math.floor(index / grid[1])},${index % grid[1]}`;
  }

  label(index) {
    return this.model.labels?.[index] ?? this.top.find((each) => each.index === index)?.label ?? `class ${index}`;
  }

  /** Layers whose maps a view needs and that have not arrived. */
  missing(view, layer) {
    if (!this.model.by_layer || view === "class" || view === "norms" || view === "positions") return [];
    const needed = view === "rollout" ? Array.from({ length: layer + 1 }, (_, n) => n) : [layer];
    return needed.filter((each) => !this.attention.has(each) && !this.panels.has(each));
  }

  /** Whether patches can ask: not in models that only have panels. */
  get canAsk() {
    return !this.reasonOf("maps");
  }

  /** Why a view cannot be shown; empty if it can. */
  reason(part) {
    if (part === "maps" && this.reasonOf("maps") && !this.reasonOf("panels")) return "";
    return this.reasonOf(part);
  }

  reasonOf(part) {
    const given = this.about.reasons?.[part] ?? this.model.parts?.[part];
    if (typeof given === "string") return given;
    return given === false ? "this model does not have it" : "";
  }
}
