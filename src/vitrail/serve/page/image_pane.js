// One model and one photo: the photo with a map, the cards next to it, the heads, and the figure of the chosen tab.

import { Checker, drawAnswer, drawCheck, hidePatches } from "./answer.js";
import { clearError, find, make, notify, say, write } from "./dom.js";
import { Explained } from "./explained.js";
import { drawDistance, drawLens, drawPositions, drawStrip, drawTable } from "./figures.js";
import { PhotoCanvas } from "./photo.js";
import { followPointer } from "./pointer.js";
import { layerOf, redraw, state } from "./state.js";
import { explore } from "./wire.js";
import { VIEWS, findView, nameToken, percent, times, titleOf } from "./words.js";

const clone = (id) => find(`#${id}`).content.firstElementChild.cloneNode(true);
const CHECK_DELAY = 350; // ms that a map stays before it is checked
const CHECKED = ["attention", "rollout", "class", "lens", "distance"];

export class ImagePane {
  reads = "photo";
  views = VIEWS;

  /** @param {{name: string, explore: any}} model of GET /explore; `act` changes the state */
  constructor(model, act) {
    Object.assign(this, { name: model.name, model: model.explore, act, explained: null, hidden: new Set(), without: null });
    this.layers = model.explore.layers;
    this.parts = { pane: clone("image-pane"), strip: clone("image-strip"), panel: clone("image-panel") };
    const { pane } = this.parts;
    this.photo = new PhotoCanvas(find("canvas", pane));
    this.parts.strip.setAttribute("aria-label", `Heads of ${model.name}`);
    this.parts.panel.setAttribute("aria-label", `Figure of ${model.name}`);
    followPointer(this.photo.canvas, this);
    const names = find("datalist", pane), other = find(".other input", pane);
    names.id = `labels-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    other.setAttribute("list", names.id);
    const labels = (model.explore.labels ?? []).slice(0, 30000);
    names.replaceChildren(...labels.map((label) => make("option", { value: label })));
    find(".other", pane).hidden = labels.length <= 5;
    other.addEventListener("change", () => {
      const index = labels.indexOf(other.value);
      if (index >= 0) act.explainClass(index);
      else if (other.value) notify(`“${other.value}” is not a class of ${this.name}; choose a name from the list`);
      if (index >= 0) other.value = "";
    });
    find(".toggle", pane).addEventListener("click", () => act.brush(!state.brushing));
    find(".clear", pane).addEventListener("click", () => act.showAll());
    find(".brightest", pane).addEventListener("click", () => {
      if (this.map && !this.map.grid) this.hide(this.explained.brightest(this.map.values));
    });
    find(".check", pane).hidden = find(".answer", pane).hidden = !model.explore.classes;
    this.canHide = this.model.parts?.check !== false;
  }

  headsAt(layer) {
    return this.model.heads[layer] ?? 0;
  }

  /** Explain another photo; the figures of the last one stay until the answer is here. */
  async show(photo) {
    this.aborter?.abort();
    const { signal } = (this.aborter = new AbortController());
    this.waiting = true;
    redraw();
    try {
      const answer = await explore(this.name, photo.blob, { part: "all" }, signal);
      this.explained = new Explained(this.model, answer);
      clearError();
      this.checker = new Checker(this.name, photo.blob, this.explained);
      this.photo.setPhoto(photo.bitmap, this.explained.place);
      Object.assign(this, { blob: photo.blob, shown: photo, hidden: new Set(), without: null, asked: new Set(), checkKey: "", problem: "" });
    } catch (error) {
      if (error.name === "AbortError") return;
      notify(error.message);
    }
    this.waiting = false;
    redraw();
  }

  /** Ask for a part that is missing, once. */
  async fetchPart(key, query, take) {
    if (this.asked.has(key)) return;
    this.asked.add(key);
    const { explained } = this;
    try {
      take(await explore(this.name, this.blob, query, this.aborter.signal));
      if (explained === this.explained) redraw();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.problem = error.message;
      redraw();
    }
  }

  fetchMissing(layer, cls) {
    const { explained } = this, chosen = cls ?? explained.explained;
    if (state.view === "positions" && !explained.arrays.positions && !explained.reason("positions")) {
      this.fetchPart("positions", { part: "positions" }, ({ arrays }) => Object.assign(explained.arrays, arrays));
    }
    for (const each of explained.missing(state.view, layer)) {
      this.fetchPart(`layer ${each}`, { part: "layer", layer: each }, ({ arrays, about }) => explained.take(arrays, about));
    }
    if (["class", "lens"].includes(state.view) && chosen !== null && !explained.relevance.has(chosen) && !explained.reason("relevance")) {
      this.fetchPart(`class ${chosen}`, { part: "class", class: chosen }, (answer) => explained.addClass(chosen, answer));
    }
  }

  /** Draw what follows from the state; `names` is what changed. */
  draw(names) {
    const { explained } = this, { pane } = this.parts;
    find(".busy", pane).hidden = !this.waiting;
    pane.classList.toggle("waiting", Boolean(this.waiting));
    if (!explained) return;
    const resting = !state.hover && !state.hoverHead, moved = [...names].every((name) => name === "hover" || name === "hoverHead");
    const view = findView(state.view), layer = state.hoverHead?.[0] ?? layerOf(this.layers);
    const wanted = state.hoverHead?.[1] ?? state.head, head = wanted === "mean" || wanted < this.headsAt(layer) ? wanted : "mean";
    const cls = state.cls !== null && state.cls < (this.model.classes || 0) ? state.cls : null;
    if (!moved) this.fetchMissing(layerOf(this.layers), cls);
    const hovered = state.brushing || !explained.canAsk ? null : explained.patchAt(state.hover);
    const patch = hovered ?? (explained.canAsk ? explained.patchAt(state.asking) : null);
    const reason = explained.reason(view.part);
    this.map = reason ? explained.map("attention", layer, head, patch, null) : explained.map(view.name, layer, head, patch, cls);
    const current = { view, layer, head, patch, hovered, cls, reason };
    this.drawPhoto(current);
    this.drawHeads(current);
    this.drawPanel(current, moved);
    if (!moved) {
      drawAnswer(find(".answer", pane), explained, { cls, hidden: this.without, onClass: (index) => this.act.explainClass(index), photo: this.shown });
      find(".toggle", pane).setAttribute("aria-pressed", String(state.brushing));
      find(".clear", pane).hidden = !this.hidden.size;
    }
    if (resting && !moved) this.scheduleCheck(current);
  }

  drawPhoto({ view, layer, head, patch, hovered, cls, reason }) {
    const { explained, map } = this, { pane } = this.parts, outlined = view.name !== "norms";
    const where = view.name === "norms" ? null : patch ?? (view.name === "positions" ? explained.middle() : null);
    const drawn = this.photo.draw({ values: map?.values ?? null, mapGrid: map?.grid, fromZero: map?.fromZero ?? true, asking: where,
      cursor: state.brushing || view.name === "norms" ? explained.patchAt(state.hover ?? state.asking) : null, hidden: this.hidden,
      grid: state.brushing || Boolean(hovered), outlined });
    const token = nameToken(where, explained.readout), chosen = cls ?? explained.explained;
    const label = chosen === null ? "" : explained.label(chosen);
    const title = titleOf(map?.kind ?? view.name, { token, layer, head, label });
    write(find(".title", pane), title);
    const status = map ? this.describe(view.name, patch, map) : reason || this.problem || (this.waiting ? "" : "Computing this map …");
    write(find(".status", pane), status);
    if (!state.hover) this.photo.canvas.setAttribute("aria-label", `${title}. ${status}`);
    if (document.activeElement === this.photo.canvas || state.asking) say(status);
    const legend = find(".legend", pane);
    legend.classList.toggle("empty", !drawn?.scale);
    if (drawn?.scale) {
      const write1 = (value) => (map.unit === "average" ? (value ? times(value) : "0") : value.toFixed(map.unit === "cosine" ? 2 : 1));
      write(find(".low", legend), write1(drawn.scale[0]));
      write(find(".high", legend), `≥ ${write1(drawn.scale[1])}`);
      write(find(".unit", legend), { average: "the average patch", length: "length", cosine: "cosine" }[map.unit] + (outlined ? "; outlined: the strongest 5%" : ""));
    }
  }

  /** The line below the photo, which is also read aloud. */
  describe(view, patch, { values, row, prefix, unit, grid }) {
    const { explained } = this, best = explained.name(values.reduce((at, value, n) => (value > values[at] ? n : at), 0), grid);
    const at = patch ? patch[0] * explained.grid[1] + patch[1] : null;
    if (unit === "length") return patch ? `patch ${patch}: length ${values[at].toFixed(1)}; the longest is ${best}` : `the longest is patch ${best}`;
    if (unit === "cosine") return `most similar: ${explained.name([...values.keys()].sort((a, b) => values[b] - values[a])[1])}`;
    const top = Math.max(...values);
    if (!row) return `brightest: patch ${best}, ${times(top)} the average`;
    const sum = row.reduce((all, value) => all + value, 0) || 1, share = row[explained.token(best.split(",").map(Number))] / sum;
    const rest = explained.prefix ? `; ${percent(prefix)} on ${this.model.prefix?.length === 1 ? `the ${this.model.prefix[0]} token` : "tokens before the patches"}` : "";
    const verb = view === "rollout" ? "reached most by" : "attends most to";
    return `${nameToken(patch, explained.readout)} ${verb} patch ${best} (${percent(share)})${rest}`;
  }

  drawHeads({ layer, head, patch }) {
    const { explained } = this, { strip } = this.parts, count = this.headsAt(layer);
    strip.hidden = !count || Boolean(explained.reason("maps"));
    if (strip.hidden) return;
    const maps = Array.from({ length: count }, (_, n) => explained.map("attention", layer, n, patch, null));
    write(find("h3", strip), `Heads of layer ${layer}`);
    drawStrip(find(".thumbs", strip), maps, { names: maps.map((_, n) => String(n)), chosen: head, grid: explained.grid, label: "head",
      onChoose: (n) => this.act.chooseHead(n) });
  }

  drawPanel({ view, layer, head, patch, hovered, cls, reason }, moved) {
    const { explained } = this, { panel } = this.parts, body = find(".body", panel);
    const heading = { attention: "By layer", rollout: "Rollout by layer", class: "By layer", norms: "Length by layer", distance: "Distance of each head",
      positions: "Similarity of positions", lens: "After each layer" }[view.name];
    write(find("h3", panel), heading);
    if (body.dataset.view !== view.name || reason) {
      body.replaceChildren(...(reason ? [make("p", { className: "soft" }, `Not for this model: ${reason}.`)] : []));
      body.className = `body ${view.panel}`;
      body.dataset.view = view.name;
      delete body.dataset.key;
      body.shown = null;
    }
    if (!moved && this.map) drawTable(panel, explained, this.map);
    if (reason) return;
    const chosen = layerOf(this.layers);
    if (view.panel === "distance") {
      drawDistance(body, { data: explained.arrays.distance.data, shape: explained.arrays.distance.shape }, { chosen: [layer, head],
        onPoint: (at, one) => this.act.pointAtHead(at === null ? null : [at, one]), onChoose: (at, one) => this.act.chooseLayerAndHead(at, one, this.layers) });
    } else if (view.panel === "positions") {
      if (!explained.arrays.positions) return;
      drawPositions(body, explained.arrays.positions, explained.grid, { chosen: hovered ?? explained.patchAt(state.asking) ?? explained.middle(),
        onPoint: (at) => this.act.hover(at && explained.centerOf(at)), onChoose: (at) => this.act.ask(explained.centerOf(at), { exact: true }) });
    } else if (view.panel === "lens") {
      if (!moved) drawLens(body, explained, { layer: chosen, onLayer: (at) => this.act.chooseLayer(at, this.layers) });
    } else if (!moved || view.name === "attention") {
      const maps = Array.from({ length: this.layers }, (_, at) => explained.map(view.name, at, head, view.name === "norms" ? null : patch, cls));
      drawStrip(body, maps, { names: maps.map((_, at) => String(at)), chosen, grid: explained.grid, label: "layer",
        fromZero: view.name !== "norms", onChoose: (at) => this.act.chooseLayer(at, this.layers) });
    }
  }

  /** Check the map that is shown once it stays for a moment. */
  scheduleCheck({ view, cls, layer, head, patch, reason }) {
    const card = find(".check", this.parts.pane), { explained } = this, chosen = cls ?? explained.explained;
    if (chosen === null || card.hidden) return;
    const key = [view.name, chosen, layer, head, patch, this.map ? 1 : 0].join("|");
    const no = explained.reason("check") || (this.map ? "" : reason) || (CHECKED.includes(view.name) ? "" : "There is nothing to check: this figure does not say where the model looked.");
    if (no || !this.map) {
      drawCheck(card, null, "", no);
      this.checkKey = "";
    }
    if (no || !this.map || key === this.checkKey) return;
    const first = !this.checkKey, { map } = this;
    this.checkKey = key;
    clearTimeout(this.timer);
    if (!find("dl", card)) drawCheck(card, null);
    card.classList.add("stale");
    this.timer = setTimeout(async () => {
      try {
        const found = await this.checker.check(map, chosen);
        if (this.checkKey === key && this.explained === explained) drawCheck(card, found, explained.label(chosen));
      } catch (error) {
        if (this.checkKey === key) drawCheck(card, null, "", `Not checked: ${error.message}`);
      }
      if (this.checkKey === key) card.classList.remove("stale");
    }, first ? 0 : CHECK_DELAY);
  }

  /** Move the asking patch by rows and columns. */
  step(rows, columns) {
    const { explained } = this, [row, column] = explained.patchAt(state.asking) ?? explained.middle(), [h, w] = explained.grid;
    const next = state.asking ? [Math.min(Math.max(row + rows, 0), h - 1), Math.min(Math.max(column + columns, 0), w - 1)] : [row, column];
    this.act.ask(explained.centerOf(next), { exact: true });
  }

  /** Hide or show the patch that the arrow keys are at. */
  toggleAsking() {
    const patch = this.explained.patchAt(state.asking);
    if (patch) this.act.paint(this.explained.centerOf(patch), !this.hidden.has(patch.join(",")));
  }

  /** Hide patches, given as "row,column", besides those that are hidden; or show them. */
  hide(names, on = true) {
    for (const name of names) {
      if (on && this.hidden.size < this.explained.patches - 1) this.hidden.add(name);
      else if (!on) this.hidden.delete(name);
    }
    clearTimeout(this.hideTimer);
    this.hideTimer = setTimeout(() => this.askHidden(), 80);
    redraw();
  }

  async askHidden() {
    this.hideAborter?.abort();
    const { signal } = (this.hideAborter = new AbortController()), { explained } = this;
    try {
      const [, columns] = explained.grid, patches = [...this.hidden].map((name) => name.split(",").map(Number)).map(([row, column]) => row * columns + column);
      const [found] = patches.length ? await hidePatches(this.name, this.blob, [patches], { signal }) : [null];
      if (explained !== this.explained) return;
      this.without = found;
      const chosen = state.cls ?? explained.explained;
      if (found) say(`${this.hidden.size} patches hidden: ${explained.label(chosen)} ${percent(found[chosen])}`);
      redraw();
    } catch (error) {
      if (error.name !== "AbortError") notify(error.message);
    }
  }

  close() {
    this.aborter?.abort();
    this.hideAborter?.abort();
    clearTimeout(this.timer);
  }
}
