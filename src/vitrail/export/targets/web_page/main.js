// A photo in, its classes and what the model looked at out. Everything runs in this page; no photo leaves the browser.

import { bar, find, findAll, make, notify, say, write } from "./dom.js";
import { largest, softmax } from "./maths.js";
import { openModel } from "./model.js";
import { PhotoCanvas } from "./photo.js";
import { decode, preprocess, visibleBox } from "./preprocessing.js";

const TOP = 5, percent = (share) => `${(100 * share).toFixed(1)}%`;
const canvas = new PhotoCanvas(find("canvas"));
let model, shown;

const label = (index) => model.about.labels?.[index] ?? `class ${index}`;

function draw() {
  canvas.draw({ values: find("#overlay").checked ? shown.relevance : null });
}

async function show(file) {
  try {
    const { bitmap, rgba, size } = await decode(file);
    const start = performance.now();
    const { logits, relevance } = await model.run(preprocess(rgba, size, model.about));
    const milliseconds = performance.now() - start, shares = softmax(logits), top = largest(shares, TOP);
    shown = { relevance, logits: Array.from(logits) };
    canvas.setPhoto(bitmap, { photo: size, box: visibleBox(size, model.about), grid: model.about.grid ?? [1, 1] });
    find("figure").hidden = false;
    draw();
    find("ol").replaceChildren(...top.map((index) => make("li", {},
      make("span", { className: "name" }, label(index)), make("span", { className: "number" }, percent(shares[index])), bar(shares[index]))));
    write(find("#time"), `${milliseconds.toFixed(0)} ms in this browser`);
    notify("");
    say(`${label(top[0])}, ${percent(shares[top[0]])}`);
    document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1);
  } catch (error) {
    notify(`${file.name ?? "The photo"} cannot be shown: ${error.message}. Open a JPEG, PNG or WebP.`);
  }
}

async function start() {
  find("#file").disabled = true;
  notify("Loading the model …", "note");
  model = await openModel((read, all) => notify(`Loading the model: ${read.toFixed(0)} of ${all} MB`, "note"));
  document.title = model.about.name;
  write(find("h1"), model.about.name);
  write(find("#reason"), model.about.reason ? `No map of what it looked at: ${model.about.reason}.` : "");
  for (const each of findAll(".map")) each.hidden = !model.about.maps.length;
  find("#file").disabled = false;
  notify("");
  document.body.dataset.ready = "true";
}

const first = (list) => [...list].find((each) => each.type.startsWith("image/"));
const open = (list) => model && first(list) && show(first(list));
find("#file").addEventListener("change", (event) => open(event.target.files));
find("#overlay").addEventListener("change", () => shown && draw());
addEventListener("paste", (event) => open(event.clipboardData.files));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  open(event.dataTransfer.files);
});
start().catch((error) => notify(`The model cannot be loaded: ${error.message}. Serve this folder over HTTP; a file:// address does not work.`));

/** For tests: the logits of the last photo. */
export const lastLogits = () => shown?.logits;
export const lastRelevance = () => shown?.relevance && Array.from(shown.relevance);
