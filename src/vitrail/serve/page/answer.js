// The cards next to the photo: what the model says, and whether the map that is shown matters for it.

import { bar, find, make, write } from "./dom.js";
import { largest, shareOf, shuffled, softmax } from "./maths.js";
import { explore } from "./wire.js";
import { judge, percent, shorten } from "./words.js";

const RANDOM_DRAWS = 3;
const MARKS = { matters: "✓", some: "≈", no: "✗" };

/** The list of classes; with patches hidden by hand, also what the model says without them. */
export function drawAnswer(card, explained, { cls, hidden, onClass, photo }) {
  const list = find("ol", card), chosen = cls ?? explained.explained;
  const shown = explained.top.map(({ index, probability }) => ({ index, probability }));
  const all = explained.arrays.logits ? softmax(explained.arrays.logits.data) : null;
  if (all && chosen !== null && !shown.some((each) => each.index === chosen)) shown.push({ index: chosen, probability: all[chosen] });
  list.replaceChildren(...shown.map(({ index, probability }) => {
    const name = explained.label(index), now = hidden ? hidden[index] : null;
    const numbers = make("span", { className: "number" }, percent(now ?? probability));
    const before = now === null ? null : make("span", { className: "before" }, `was ${percent(probability)}`);
    const button = make("button", { type: "button", className: "class", title: `Explain ${name}`, "aria-pressed": index === chosen,
      onclick: () => onClass(index) }, make("span", { className: "name" }, shorten(name)), numbers, bar(now ?? probability), before);
    return make("li", {}, button);
  }));
  drawTruth(find(".truth", card), explained, photo);
  const said = find(".said", card);
  said.hidden = !hidden;
  if (hidden) {
    const best = hidden.indexOf(Math.max(...hidden));
    const same = best === explained.top[0]?.index;
    write(said, same ? `Still ${explained.label(best)} without the hidden patches.`
      : `Without the hidden patches it would have said ${explained.label(best)} (${percent(hidden[best])}).`);
  }
}

/** Of a photo whose folder names another class: what it said instead. */
function drawTruth(place, explained, photo) {
  const truth = explained.arrays.logits ? photo?.truth ?? null : null;
  place.hidden = !truth;
  if (!truth) return;
  const sure = softmax(explained.arrays.logits.data), [best] = explained.top;
  write(place, `✗ It said ${best.label} (${percent(best.probability)}), but the photo is in the folder ${truth.folder} (${percent(sure[truth.index])}).`);
}

/**
 * Probabilities of all classes, each time without some patches, given as lists of indices in row-major order.
 * @returns {Promise<number[][]>}
 */
export async function hidePatches(name, photo, sets, { grid = null, signal = undefined } = {}) {
  const query = { part: "hide", hide: sets.map((each) => each.join(".")).join("_"), ...(grid && { grid: grid.join("x") }) };
  const { logits: { data, shape: [, classes] } } = (await explore(name, photo, query, signal)).arrays;
  return sets.map((_, n) => Array.from(softmax(data.slice(n * classes, (n + 1) * classes))));
}

/** Patches at random, as many as a check removes; the same in every check. */
export const drawRandom = (share, patches) => Array.from({ length: RANDOM_DRAWS }, (_, n) => shuffled(patches, n + 1).slice(0, shareOf(share, patches)));

export const mean = (rows) => rows[0].map((_, at) => rows.reduce((sum, row) => sum + row[at], 0) / rows.length);

/** Checks of maps: all probabilities without the brightest patches, and without as many at random. Each answer is kept. */
export class Checker {
  constructor(name, photo, explained) {
    Object.assign(this, { name, photo, explained, kept: new Map(), random: new Map() });
  }

  /** One request for both; later ones of the same grid ask for the brightest patches only. */
  ask(brightest, grid) {
    const key = `${grid}|${brightest}`;
    if (!this.kept.has(key)) {
      const known = this.random.get(String(grid)), sets = [brightest, ...(known ? [] : drawRandom(this.explained.share, grid[0] * grid[1]))];
      const asked = hidePatches(this.name, this.photo, sets, { grid }).then(([without, ...draws]) => {
        if (!known) this.random.set(String(grid), mean(draws));
        return { without, random: this.random.get(String(grid)) };
      });
      asked.catch(() => this.kept.delete(key));
      this.kept.set(key, asked);
    }
    return this.kept.get(key);
  }

  /** What a class loses without the brightest patches of a map, and what would have been said. */
  async check({ values, grid }, cls) {
    const { share, arrays, top } = this.explained, side = grid ?? this.explained.grid;
    const brightest = largest(values, shareOf(share, side[0] * side[1])), { without, random } = await this.ask(brightest, side);
    const best = without.indexOf(Math.max(...without)), name = this.explained.label(best);
    const extra = best === top[0]?.index ? `Without this part it would still have said ${name} (${percent(without[best])}).`
      : `It looked at the brightest parts; without them it would have said ${name} (${percent(without[best])}).`;
    return { share, probability: softmax(arrays.logits.data)[cls], without: without[cls], random: random[cls], extra };
  }
}

/** Draw the result of a check; `reason` says why there is none. `names` are those of the three rows. */
export function drawCheck(card, found, label, reason = "", names = null) {
  const body = find(".result", card);
  if (!found) {
    body.replaceChildren(make("p", { className: "soft" }, reason || "Checking the map …"));
    card.removeAttribute("data-verdict");
    return;
  }
  const { share, probability, without, random, extra, noun } = found, { verdict, text } = judge(probability, without, random, noun);
  const part = `${Math.round(100 * share)}%`, [whole, less, other] = names ?? ["whole photo", `without these ${part}`, `without ${part} at random`];
  const rows = [[whole, probability, "whole"], [less, without, "without"], [other, random, "random"]];
  body.replaceChildren(
    make("p", { className: "soft about" }, `How sure it is of ${shorten(label, 32)}:`),
    make("dl", {}, ...rows.map(([name, value, kind]) => make("div", {}, make("dt", {}, name),
      make("dd", { className: "number" }, percent(value)), bar(value, kind)))),
    make("p", { className: "verdict" }, make("span", { "aria-hidden": "true" }, `${MARKS[verdict]} `), text),
    make("p", { className: "would" }, extra ?? ""),
  );
  card.dataset.verdict = verdict;
}
