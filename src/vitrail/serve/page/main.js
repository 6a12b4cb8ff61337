// The page: panes for one or two models, the controls they share, and the link that holds the state.

import { CaptionPane } from "./caption_pane.js";
import { drawDifference } from "./difference.js";
import { find, findAll, make, notify, say, write } from "./dom.js";
import { Listing } from "./folder.js";
import { ImagePane } from "./image_pane.js";
import { listenToKeys } from "./keys.js";
import { markExample, preparePhotos } from "./photos.js";
import { copyLink, saveNpz, savePng } from "./save.js";
import { fromLink, layerOf, onChange, redraw, state, toLink, update } from "./state.js";
import { TextPane } from "./text_pane.js";
import { startTour } from "./tour.js";
import { fetchModels, takeToken } from "./wire.js";
import { findView } from "./words.js";

const KINDS = { image: ImagePane, text: TextPane, caption: CaptionPane };
let known = [], panes = [], photos = null;
let wanted = null; // what a link says about the photo, until a visitor opens one
let pendingPatch = null; // of a link, until the grid is known

const act = {
  hover: (point) => update({ hover: point }),
  ask: (point, { exact = false } = {}) => {
    const [pane] = panes, patch = point && pane?.explained?.patchAt(point);
    const same = !exact && patch && String(patch) === String(pane.explained.patchAt(state.asking));
    const view = patch && !state.brushing && ["class", "lens", "distance"].includes(state.view) ? "attention" : state.view;
    update({ asking: patch && !same ? pane.explained.centerOf(patch) : null, view });
  },
  explainClass: (index) => update({ cls: index, view: "class", asking: null }),
  chooseLayer: (at, layers) => update({ layer: layers > 1 ? at / (layers - 1) : null }),
  stepLayer: (by) => {
    const layers = panes[0]?.layers ?? 1;
    act.chooseLayer(Math.min(Math.max(layerOf(layers) + by, 0), layers - 1), layers);
  },
  chooseHead: (head, exact = false) => {
    if (head !== "mean" && head >= (panes[0]?.headsAt(layerOf(panes[0].layers)) ?? 0)) return;
    const chosen = head === state.head && !exact ? "mean" : head;
    const view = chosen !== "mean" && !["attention", "distance", "weights"].includes(state.view) ? "attention" : state.view;
    update({ head: chosen, view });
  },
  chooseLayerAndHead: (layer, head, layers) => update({ layer: layers > 1 ? layer / (layers - 1) : null, head, hoverHead: null }),
  pointAtHead: (hoverHead) => update({ hoverHead }),
  brush: (brushing) => update({ brushing }),
  paint: (point, on) => {
    for (const pane of panes) {
      const patch = pane.explained?.patchAt(point);
      if (patch) pane.hide?.([patch.join(",")], on);
    }
  },
  showAll: () => {
    for (const pane of panes) pane.hide?.([...pane.hidden], false);
  },
  word: (word) => update({ word }),
  view: (view) => update({ view, asking: view === "class" || view === "lens" ? null : state.asking }),
};

const entry = (name) => known.find((model) => model.name === name);

/** Open the panes of the chosen models, those of models that stay are kept. */
function openPanes() {
  const kept = new Map(panes.map((pane) => [pane.name, pane]));
  panes = state.models.map((name) => kept.get(name) ?? new KINDS[entry(name).explore.kind](entry(name), act));
  for (const [name, pane] of kept) if (!state.models.includes(name)) pane.close();
  for (const [place, part] of [["#panes", "pane"], ["#strips", "strip"], ["#panels", "panel"]]) {
    const parts = panes.map((pane) => pane.parts[part]).filter(Boolean);
    find(place).replaceChildren(...parts);
    find(place).classList.toggle("two", panes.length > 1);
  }
  panes.forEach((pane) => {
    pane.parts.pane.dataset.model = pane.name;
    pane.parts.pane.setAttribute("aria-label", pane.name);
    const reads = pane.reads === "text" ? state.text : state.photo;
    if (reads && !kept.has(pane.name)) pane.show(reads);
  });
  document.body.classList.toggle("compared", panes.length > 1);
  const isText = panes[0]?.reads === "text";
  find("#sentence").hidden = !isText;
  if (isText) drawSentences();
  find("#photos").hidden = isText;
  document.body.classList.toggle("unpaneled", !find("#panels").childElementCount);
  drawTabs();
  drawSelects();
}

/** Sentences to begin with, in the language of the model. */
function drawSentences() {
  const pane = panes[0];
  find("#sentences").replaceChildren(...(pane.model.examples ?? []).map((text) => make("button", { type: "button", onclick: () => {
    find("#text").value = text;
    update({ text });
    pane.show(text);
  } }, text)));
}

function drawTabs() {
  const views = panes[0]?.views ?? [], names = views.map((view) => view.name);
  if (!names.includes(state.view)) update({ view: names.includes("class") ? "class" : names[0] ?? "attention" });
  find("#tabs").replaceChildren(...views.map(({ name, tab }) => make("button", { type: "button", role: "tab", id: `tab-${name}`, "data-view": name,
    "aria-controls": "figure", onclick: () => act.view(name), onkeydown: (event) => stepTabs(event, names) }, tab)));
  find("#figure").hidden = !views.length;
}

/** On a phone the row of tabs is wider than the window. */
function showTab(tab) {
  const row = tab.parentElement, from = tab.offsetLeft - row.offsetLeft;
  if (from < row.scrollLeft) row.scrollLeft = from;
  else if (from + tab.offsetWidth > row.scrollLeft + row.clientWidth) row.scrollLeft = from + tab.offsetWidth - row.clientWidth;
}

function stepTabs(event, names) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const next = names[(names.indexOf(event.target.dataset.view) + by + names.length) % names.length];
  act.view(next);
  find(`#tab-${next}`).focus();
  event.preventDefault();
}

function drawSelects() {
  const option = (model, selected) => make("option", { value: model.name, disabled: !model.explore, selected,
    textContent: model.explore ? model.name : `${model.name} (${model.reason ?? "cannot be explained"})` });
  find("#model").replaceChildren(...known.map((model) => option(model, model.name === state.models[0])));
  const own = entry(state.models[0]), kind = own?.explore.kind;
  const others = kind === "text" ? [] : known.filter((model) => model !== own && model.explore?.kind === kind);
  find("#compare").replaceChildren(make("option", { value: "", textContent: "one model" }), ...others.map((model) => option(model, model.name === state.models[1])));
  find("#compare").parentElement.hidden = !others.length;
}

function showPhoto(photo) {
  const asked = wanted, isFirst = !state.photo;
  if (asked?.digest && photo.digest !== asked.digest && !isFirst) {
    notify(`This link was made with another photo (checksum ${asked.digest}); ${photo.name} has ${photo.digest}.`, "info");
  } else if (!isFirst) notify("");
  if (!isFirst || !asked?.digest) wanted = null;
  const keep = asked && (isFirst || asked.digest === photo.digest) ? {} : { cls: null, asking: null };
  if (asked && asked.digest === photo.digest) pendingPatch = asked.patch;
  update({ photo, hover: null, ...keep });
  markExample(photo.example);
  for (const pane of panes) if (pane.reads !== "text") pane.show(photo);
}

function drawControls() {
  const [pane] = panes, slider = find("#layer");
  find("#controls").hidden = !pane?.layers;
  if (!pane?.layers) return;
  const layer = state.hoverHead?.[0] ?? layerOf(pane.layers);
  slider.max = pane.layers - 1;
  slider.value = layer;
  const shown = new Set([`${layer} of ${pane.layers - 1}`, ...panes.slice(1).map((each) => `${layerOf(each.layers)} of ${each.layers - 1}`)]);
  write(find("#layer-name"), [...shown].join(", "));
  const head = state.hoverHead?.[1] ?? state.head;
  write(find("#head-name"), head === "mean" ? "mean of all" : `${head}`);
  find("#mean").disabled = head === "mean";
  const asking = pane.explained?.patchAt?.((state.brushing ? null : state.hover) ?? state.asking);
  find("#asker").hidden = !pane.explained?.readout;
  write(find("#asking-name"), asking ? `patch ${asking}` : pane.explained?.readout ?? "");
  find("#ask-class").disabled = !state.asking;
}

function draw(names) {
  if (names.has("models")) openPanes();
  for (const pane of panes) pane.draw(names);
  drawDifference(panes);
  drawControls();
  if ([...names].every((name) => name === "hover" || name === "hoverHead")) return;
  document.body.classList.toggle("brushing", state.brushing);
  const view = panes[0]?.views?.find((each) => each.name === state.view) ?? findView(state.view);
  write(find("#shows"), view.shows);
  write(find("#not"), view.not);
  for (const tab of findAll("#tabs button")) {
    const chosen = tab.dataset.view === state.view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) showTab(tab);
  }
  find("#figure").setAttribute("aria-labelledby", `tab-${state.view}`);
  for (const id of ["#png", "#npz"]) find(id).disabled = !panes[0]?.explained;
  clearTimeout(draw.timer);
  draw.timer = setTimeout(writeLink, 250);
}

function writeLink() {
  const [pane] = panes;
  if (!pane || wanted) return;
  history.replaceState(null, "", toLink({ reads: pane.reads, patch: pane.explained?.patchAt?.(state.asking) ?? null, layer: state.layer === null ? null : layerOf(pane.layers) }));
}

/** Take over what the address says: models, view, photo; what it cannot hold is asked for. */
function followLink() {
  const found = fromLink(location.hash), usable = known.filter((model) => model.explore);
  const names = found.models.filter((name) => entry(name)?.explore), missing = found.models.filter((name) => !names.includes(name));
  if (missing.length) notify(`This server does not serve ${missing.join(" and ")}; shown is ${names[0] ?? usable[0]?.name}.`, "info");
  const models = names.length ? names.slice(0, 2) : usable.slice(0, 1).map((model) => model.name);
  const model = entry(models[0])?.explore;
  if (model && found.layer !== null && model.layers > 1) found.changes.layer = Math.min(found.layer, model.layers - 1) / (model.layers - 1);
  const text = found.text || state.text || usable.find((each) => each.explore.examples?.length)?.explore.examples[0] || "";
  update({ ...found.changes, models, text });
  find("#text").value = text;
  const [, scheme, value] = /^(example|sha256):(.*)$/.exec(found.photo) ?? [];
  pendingPatch = scheme === "sha256" ? null : found.patch;
  wanted = { patch: found.patch, example: scheme === "example" ? value : "", digest: scheme === "sha256" ? value : "" };
  if (wanted.digest) notify(`This link was made with a photo that it does not contain. Open the photo (checksum ${wanted.digest}) to see the same view.`, "info");
  return wanted.example;
}

async function start() {
  let given;
  takeToken();
  try {
    given = await fetchModels();
  } catch (error) {
    return notify(error.message);
  }
  known = given.models;
  write(find("#version"), `vitrail ${given.version}.`);
  if (!known.some((model) => model.explore)) return notify(`No model can be explained here: ${known.map((model) => `${model.name}: ${model.reason}`).join("; ")}`);
  const listing = new Listing(() => entry(state.models[0]), (file, truth) => photos.openFile(file, truth));
  photos = preparePhotos(given.examples, showPhoto, (files) => listing.show(files));
  onChange(draw);
  onChange(() => {
    const grid = panes[0]?.explained?.grid, patch = pendingPatch;
    if (!patch || !grid) return;
    pendingPatch = null;
    if (patch[0] < grid[0] && patch[1] < grid[1]) update({ asking: panes[0].explained.centerOf(patch) });
  });
  const example = followLink();
  const names = given.examples.map((each) => each.name), first = names.includes(example) ? example : names.find((name) => name === "cat") ?? names[0];
  find("#model").addEventListener("change", (event) => update({ models: [event.target.value], layer: null, head: "mean", cls: null }));
  find("#compare").addEventListener("change", (event) => update({ models: [state.models[0], event.target.value].filter(Boolean) }));
  find("#layer").addEventListener("input", (event) => act.chooseLayer(Number(event.target.value), panes[0].layers));
  find("#mean").addEventListener("click", () => act.chooseHead("mean"));
  find("#ask-class").addEventListener("click", () => act.ask(null));
  find("#link").addEventListener("click", () => {
    writeLink();
    copyLink();
  });
  addEventListener("hashchange", () => location.reload()); // a link that is opened in the same window
  find("#png").addEventListener("click", () => savePng(panes, state.photo));
  find("#npz").addEventListener("click", () => panes.forEach((pane) => pane.explained && saveNpz(pane, state.photo)));
  find("#sentence").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!find("#text").value.trim()) return notify("There is no sentence; type one, or choose an example");
    update({ text: find("#text").value.trim() });
    for (const pane of panes) if (pane.reads === "text" && state.text) pane.show(state.text);
  });
  listenToKeys(() => panes[0], act);
  if (first) photos.openExample(first);
  redraw();
  startTour();
  say("vitrail is ready");
}

start();
