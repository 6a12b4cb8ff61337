// Many photos at once: classify them one after the other and list those first that the model is least sure of.

import { find, make, notify, say, write } from "./dom.js";
import { explore } from "./wire.js";
import { count, percent, shorten } from "./words.js";

const IMAGES = /\.(jpe?g|png|webp|gif|bmp)$/i;
const MOST_FILES = 2000, MOST_ROWS = 200, THUMBNAIL = 56;
const plain = (name) => name.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();

/** Files of a drop, also those in folders: [{file, folder}]. Must be called in the event, since the items do not stay. */
export function readDrop(transfer) {
  const entries = [...(transfer?.items ?? [])].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const plainFiles = [...(transfer?.files ?? [])].map((file) => ({ file, folder: "" }));
  if (!entries.some((entry) => entry.isDirectory)) return Promise.resolve(plainFiles);
  return Promise.all(entries.map((entry) => readEntry(entry, ""))).then((found) => found.flat());
}

async function readEntry(entry, folder) {
  if (entry.isFile) return [{ file: await new Promise((resolve, reject) => entry.file(resolve, reject)), folder }];
  const reader = entry.createReader(), found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return found;
    for (const each of some) if (found.length < MOST_FILES) found.push(...await readEntry(each, entry.name));
  }
}

/** Files of an input for folders. */
export const readInput = (input) => [...input.files].map((file) => ({ file, folder: file.webkitRelativePath.split("/").at(-2) ?? "" }));

/** A list of photos, in which a visitor opens one. `model()` is the one that classifies. */
export class Listing {
  constructor(model, openFile) {
    Object.assign(this, { model, openFile, rows: [], run: 0 });
    find("#only-wrong").addEventListener("change", () => this.draw());
    find("#close-listing").addEventListener("click", () => {
      this.run++;
      find("#listing").hidden = true;
    });
  }

  async show(given) {
    const run = ++this.run, files = given.filter(({ file }) => IMAGES.test(file.name)).slice(0, MOST_FILES), model = this.model();
    if (!files.length) return notify("no photos were found; expected files such as .jpg or .png");
    if (!model?.explore?.classes) return notify(`${model?.name ?? "this model"} has no classes; choose a model that classifies photos`);
    Object.assign(this, { rows: [], failed: 0, total: files.length, classes: new Map(model.explore.labels?.map((label, index) => [plain(label), index])) });
    find("#listing").hidden = false;
    this.draw();
    for (const { file, folder } of files) {
      try {
        const { about } = await explore(model.name, file, { part: "top" });
        if (run !== this.run) return;
        const truth = this.classes.get(plain(folder)) ?? null;
        this.rows.push({ file, folder, top: about.top, truth, wrong: truth !== null && truth !== about.top[0].index });
      } catch (error) {
        if (run !== this.run) return;
        this.failed++;
        if (this.failed === 1) notify(`${file.name}: ${error.message}`);
      }
      const done = this.rows.length + this.failed;
      if (done < 20 || done % 20 === 0 || done === this.total) this.draw();
    }
    const [least] = this.sorted();
    if (least) say(`${count(this.rows.length, "photo")} classified; least sure of ${least.file.name}`);
  }

  sorted() {
    return [...this.rows].sort((a, b) => a.top[0].probability - b.top[0].probability);
  }

  draw() {
    const { rows, total, failed } = this, done = rows.length + failed, known = rows.filter((row) => row.truth !== null), wrong = known.filter((row) => row.wrong);
    write(find("#listing-name"), done < total ? `${done} of ${count(total, "photo")} classified` : `${count(rows.length, "photo")}, least sure first`);
    write(find("#listing-note"), [known.length && `${wrong.length} of ${known.length} differ from the name of their folder`, failed && `${count(failed, "file")} could not be read`]
      .filter(Boolean).join("; "));
    find("#only-wrong").disabled = !wrong.length;
    const shown = this.sorted().filter((row) => row.wrong || !find("#only-wrong").checked || !wrong.length);
    const more = shown.length > MOST_ROWS ? [make("li", { className: "soft" }, `and ${count(shown.length - MOST_ROWS, "more photo")}`)] : [];
    find("#listed").replaceChildren(...shown.slice(0, MOST_ROWS).map((row) => (row.element ??= this.makeRow(row))), ...more);
  }

  makeRow(row) {
    const [best] = row.top, canvas = make("canvas", { width: THUMBNAIL, height: THUMBNAIL });
    createImageBitmap(row.file).then((bitmap) => {
      const side = Math.min(bitmap.width, bitmap.height);
      canvas.getContext("2d").drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, THUMBNAIL, THUMBNAIL);
      bitmap.close();
    }, () => {});
    const says = make("span", {}, make("b", {}, shorten(best.label, 28)), " ", make("span", { className: "number" }, percent(best.probability)));
    const truth = row.truth === null ? null : make("span", { className: row.wrong ? "wrong" : "right" }, row.wrong ? `✗ in the folder ${row.folder}` : "✓ as its folder");
    const open = () => this.openFile(row.file, row.wrong ? { index: row.truth, folder: row.folder } : null);
    return make("li", {}, make("button", { type: "button", onclick: open }, canvas,
      make("span", { className: "row" }, make("span", { className: "soft" }, shorten(row.file.name, 28)), says, truth)));
  }
}
