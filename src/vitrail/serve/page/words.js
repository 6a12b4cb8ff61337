// The words of the page: what each figure shows and what it does not, and how numbers are written.

/** As `format_probability` in base/text.py: 86.4%, below 0.1% two significant digits. */
export function percent(share) {
  if (share < 1e-6) return "<0.0001%";
  const value = 100 * share;
  if (Number(value.toPrecision(2)) >= 0.1) return `${value.toFixed(1)}%`;
  return `${value.toFixed(1 - Math.floor(Math.log10(Number(value.toPrecision(2)))))}%`;
}

export const times = (value) => `${value.toFixed(1)}×`;

/** A list in a sentence. */
export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** A long name, shortened in the middle. */
export function shorten(name, most = 40) {
  if (name.length <= most) return name;
  const kept = most - 1;
  return `${name.slice(0, Math.ceil(kept / 2))}…${name.slice(-Math.floor(kept / 2))}`;
}

/** Name of a token that asks, in a sentence. */
export function nameToken(patch, readout) {
  return patch ? `patch ${patch[0]},${patch[1]}` : readout;
}

/** The views of a photo, in the order of their tabs. `part` is what describe() calls it. */
export const VIEWS = [
  {
    name: "attention", tab: "Attention", part: "maps", panel: "strip",
    shows: "What one token attends to in one layer: the mean of its heads, or a single head. "
      + "The numbers are shares of the attention; 2× is twice the average patch.",
    not: "It shows where information was read from, not what was done with it. A strong patch need not change the prediction: see the check.",
  },
  {
    name: "rollout", tab: "Rollout", part: "rollout", panel: "strip",
    shows: "What reaches a token from each patch through all layers up to this one: "
      + "half of each layer is its attention, half is what the token already had (Abnar 2020).",
    not: "It treats all heads alike and knows nothing about classes; deep rollouts tend to become blurred.",
  },
  {
    name: "class", tab: "For this class", part: "relevance", panel: "strip",
    shows: "The attention that supports one class, through all layers up to this one: attention times its gradient, "
      + "where that is positive (Chefer 2021). Click a class to explain it.",
    not: "It shows what speaks for a class, not what speaks against it, and nothing outside of attention.",
  },
  {
    name: "distance", tab: "Distance", part: "distance", panel: "distance",
    shows: "How far each head looks on this photo: the mean distance between a patch and what it attends to, in pixels. "
      + "Each dot is a head; point at one to see its map.",
    not: "One photo is a small sample. A head that looks far is not better than one that looks near.",
  },
  {
    name: "positions", tab: "Positions", part: "positions", panel: "positions",
    shows: "How similar the position embeddings are: each small map compares one patch with all others. "
      + "Point at a patch to see its map over the photo.",
    not: "It belongs to the model and is the same for every photo. There is nothing to check here: no pixel is involved.",
  },
  {
    name: "norms", tab: "Norms", part: "norms", panel: "strip",
    shows: "How long the vector of each patch is after a layer. In models without registers a few background patches "
      + "become much longer than the others: the model stores global information there (Darcet 2023).",
    not: "A long vector is not a part of the object, and not a reason for the prediction.",
  },
  {
    name: "lens", tab: "Layer by layer", part: "lens", panel: "lens",
    shows: "What the model would have said after each layer: the final norm and head, applied to the tokens of that layer.",
    not: "Early layers were never trained to be read this way, so their words are often arbitrary.",
  },
];

export const findView = (name) => VIEWS.find((view) => view.name === name) ?? VIEWS[0];

/** The title of the figure: what is seen, not the method. `kind` is that of the map. */
export function titleOf(kind, { token, layer, head, label }) {
  switch (kind) {
    case "rollout": return `What reached ${token} through layers 0 to ${layer}`;
    case "class": return `What the model looked at for ${label}`;
    case "positions": return `Positions similar to ${token}`;
    case "norms": return `How long the vectors are after layer ${layer}`;
    default: return `What ${token} attends to, layer ${layer}${head === "mean" ? "" : `, head ${head}`}`;
  }
}

/** What the check found, in plain words. Probabilities of the class: of the photo, without these patches, at random. */
export function judge(probability, without, random, noun = "patches") {
  const drop = probability - without, chance = probability - random, these = noun === "patches" ? "These patches matter" : "This word matters";
  if (drop > 0.05 && drop > 2 * chance) return { verdict: "matters", text: `${these} much more than others.` };
  if (drop > 0.02 && drop > 1.2 * chance) return { verdict: "some", text: `${these} a little more than others.` };
  return { verdict: "no", text: `${these} no more than others: do not read much into this map.` };
}

export const TOUR = [
  ["photo", "Patches", "The model cuts the photo into a grid of patches. It never sees single pixels, only these squares."],
  ["photo", "Tokens", "Each patch becomes a token, a list of numbers. Move the mouse or the arrow keys over the photo to pick one."],
  ["controls", "Attention", "In every layer each token looks at the others. Bright patches are looked at. Slide through the layers."],
  ["answer", "Answer", "At the end one vector gives the classes. Next to it is a check: does the answer change without the bright patches?"],
];

export const KEYS = [
  ["← ↑ → ↓", "move the asking patch"], ["c", "ask for the classifier’s token"], ["+ −", "next or previous layer"],
  ["m", "mean of all heads"], ["0–9", "one head"], ["b", "hide patches by hand"], ["space", "hide or show the patch"],
  ["o", "open a photo"], ["?", "this list"],
];
