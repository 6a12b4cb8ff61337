// What is shown, in one object; a change is drawn in the next frame. A link holds it, except for a photo of one's own.

/** Points are shares of the photo's width and height, so that two models with their own grids stay in step. */
export const state = {
  models: [], // names, one or two
  view: "class",
  layer: null, // share of the depth, 0 to 1; null is the last layer
  head: "mean",
  asking: null, // point of the patch that asks; null is what the classifier reads
  hover: null, // point under the mouse
  hoverHead: null, // [layer, head] under the mouse in a figure
  cls: null, // class to explain; null is the top class
  photo: null, // {name, blob, bytes, bitmap, digest, example}
  text: "",
  word: null, // of a caption or a sentence
  brushing: false,
};

const listeners = [];
let pending = 0;

/** Call `draw` in the next frame after each change, with the names of what changed. */
export function onChange(draw) {
  listeners.push(draw);
}

const changed = new Set();

export function update(changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (state[name] === value) continue;
    state[name] = value;
    changed.add(name);
  }
  if (changed.size && !pending) pending = requestAnimationFrame(flush);
}

/** Draw again without a change of the state, for example when an answer has arrived. */
export function redraw(name = "answer") {
  changed.add(name);
  pending ||= requestAnimationFrame(flush);
}

function flush() {
  pending = 0;
  const names = new Set(changed);
  changed.clear();
  for (const draw of listeners) draw(names);
}

/** The layer of a model with so many layers. */
export const layerOf = (layers) => (state.layer === null ? layers - 1 : Math.round(state.layer * (layers - 1)));

const VALUES = { view: String, head: (text) => (text === "mean" ? text : Number(text)) };

/** The state as the fragment of an address. `patch` is [row, column] and `layer` a number, of the first model. */
export function toLink({ patch, layer, reads }) {
  const words = new URLSearchParams();
  words.set("model", state.models[0]);
  if (state.models[1]) words.set("with", state.models[1]);
  if (reads === "text" && state.text) words.set("text", state.text);
  else if (state.photo) words.set("photo", state.photo.example ? `example:${state.photo.example}` : `sha256:${state.photo.digest}`);
  for (const name of Object.keys(VALUES)) words.set(name, state[name]);
  if (layer !== null) words.set("layer", layer);
  if (patch) words.set("patch", patch.join(","));
  if (state.cls !== null) words.set("class", state.cls);
  return `#${words}`;
}

/** What a link says; anything that is not understood is left out. */
export function fromLink(fragment) {
  const words = new URLSearchParams(fragment.replace(/^#/, "")), found = { changes: {} };
  for (const [name, read] of Object.entries(VALUES)) if (words.has(name)) found.changes[name] = read(words.get(name));
  if (Number.isNaN(found.changes.head)) delete found.changes.head;
  found.models = [words.get("model"), words.get("with")].filter(Boolean);
  const number = (name) => (/^\d{1,6}$/.test(words.get(name) ?? "") ? Number(words.get(name)) : null);
  found.layer = number("layer");
  found.changes.cls = number("class");
  const patch = /^(\d{1,4}),(\d{1,4})$/.exec(words.get("patch") ?? "");
  found.patch = patch && [Number(patch[1]), Number(patch[2])];
  found.photo = words.get("photo") ?? "";
  found.text = (words.get("text") ?? "").slice(0, 2000);
  return found;
}
