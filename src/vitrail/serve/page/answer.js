// The cards next to the photo: what the model says, and whether the map that is shown matters for it.

import { bar, find, make, write } from "./dom.js";
import { shareOf, shuffled, softmax } from "./maths.js";
import { explore } from "./wire.js";
import { judge, percent, shorten } from "./words.js";

const RANDOM_DRAWS = 3;
const MARKS = { matters: "✓", some: "≈", no: "✗" };

/** The list of classes; with patches hidden by hand, also what the model says without them. */
export function drawAnswer(card, explained, { cls, hidden, onClass }) {
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
  const said = find(".said", card);
  said.hidden = !hidden;
  if (hidden) {
    const best = hidden.indexOf(Math.max(...hidden));
    const same = best === explained.top[0]?.index;
    write(said, same ? `Still ${explained.label(best)} without the hidden patches.`
      : `Without the hidden patches it would have said ${explained.label(best)} (${percent(hidden[best])}).`);
  }
}

/** Probabilities of all classes without some patches. */
export async function hidePatches(name, photo, patches, signal) {
  const { arrays } = await explore(name, photo, { part: "hide", hide: patches.join(";") }, signal);
  return Array.from(softmax(arrays.logits.data));
}

/**
 * Checks of maps: the probability of a class without the brightest patches, and without as many at random. Each answer of
 * the server is kept, so that going back and forth asks nothing twice.
 */
export class Checker {
  constructor(name, photo, explained) {
    Object.assign(this, { name, photo, explained, kept: new Map() });
  }

  /** The probabilities without patches, from the server once. */
  ask(patches) {
    const key = [...patches].sort().join(";");
    if (!this.kept.has(key)) {
      const asked = hidePatches(this.name, this.photo, patches);
      asked.catch(() => this.kept.delete(key));
      this.kept.set(key, asked);
    }
    return this.kept.get(key);
  }

  /** The same number of patches at random, the mean of three draws. */
  async askRandom() {
    const { patches, share } = this.explained, count = shareOf(share, patches);
    const draws = [];
    for (let seed = 1; seed <= RANDOM_DRAWS; seed++) {
      const chosen = shuffled(patches, seed).slice(0, count).map((index) => this.explained.name(index));
      draws.push(await this.ask(chosen));
    }
    return draws[0].map((_, index) => draws.reduce((sum, draw) => sum + draw[index], 0) / RANDOM_DRAWS);
  }

  /** {probability, without, random} of a class, for a map; what the server has checked already is used. */
  async check(values, cls, given) {
    if (given) return { share: given.share, probability: given.probability, without: given.without, random: given.random };
    const all = softmax(this.explained.arrays.logits.data);
    const without = (await this.ask(this.explained.brightest(values)))[cls];
    const random = (await this.askRandom())[cls];
    return { share: this.explained.share, probability: all[cls], without, random };
  }
}

/** Draw the result of a check; `reason` says why there is none. */
export function drawCheck(card, found, label, reason = "") {
  const body = find(".result", card);
  if (!found) {
    body.replaceChildren(make("p", { className: "soft" }, reason || "Checking the map …"));
    card.removeAttribute("data-verdict");
    return;
  }
  const { share, probability, without, random } = found, { verdict, text } = judge(probability, without, random);
  const part = `${Math.round(100 * share)}%`;
  const rows = [["whole photo", probability, "whole"], [`without the brightest ${part}`, without, "without"],
    [`without ${part} at random`, random, "random"]];
  body.replaceChildren(
    make("p", { className: "soft about" }, `How sure it is of ${shorten(label, 32)}:`),
    make("dl", {}, ...rows.map(([name, value, kind]) => make("div", {}, make("dt", {}, name),
      make("dd", { className: "number" }, percent(value)), bar(value, kind)))),
    make("p", { className: "verdict" }, make("span", { "aria-hidden": "true" }, `${MARKS[verdict]} `), text),
  );
  card.dataset.verdict = verdict;
}
