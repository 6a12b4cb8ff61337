// Where photos come from: the examples, a file, a drop, or the clipboard.

import { find, make, notify } from "./dom.js";
import { readDrop, readInput } from "./folder.js";
import { digest, fetchExample } from "./wire.js";

const MAX_BYTES = 64e6; // the server has its own limit

/** A photo that the browser can show and the server receives as it is. */
async function prepare(blob, name, example = "") {
  if (blob.size > MAX_BYTES) throw new Error(`${name} has ${Math.round(blob.size / 1e6)} MB; expected at most ${MAX_BYTES / 1e6} MB`);
  const bytes = await blob.arrayBuffer();
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Error(`${name} is not an image that this browser can read; expected JPEG, PNG, WebP, GIF or BMP`);
  }
  return { name, blob, bitmap, example, digest: await digest(bytes) };
}

/**
 * @param {(photo: any) => void} show one photo
 * @param {(files: {file: File, folder: string}[]) => void} list several
 */
export function preparePhotos(examples, show, list) {
  let latest = 0;
  const open = async (get, name, example, truth = null) => {
    const number = ++latest;
    try {
      const photo = await prepare(await get(), name, example);
      if (number === latest) show({ ...photo, truth });
    } catch (error) {
      notify(error.message);
    }
  };
  const openFile = (file, truth = null) => open(async () => file, file.name || "the pasted image", "", truth);
  const openExample = (name) => open(() => fetchExample(name), name, name);

  find("#examples").replaceChildren(...examples.map(({ name, title }) => {
    const image = make("img", { alt: "", width: 56, height: 56 }); // fetched, since a token may be asked for
    fetchExample(name).then((blob) => (image.src = URL.createObjectURL(blob)), () => image.remove());
    return make("button", { type: "button", title, "aria-label": title, "data-example": name, onclick: () => openExample(name) }, image);
  }));
  const file = find("#file");
  file.addEventListener("change", () => {
    if (file.files[0]) openFile(file.files[0]);
    file.value = "";
  });
  const folder = find("#folder");
  folder.addEventListener("change", () => {
    if (folder.files.length) list(readInput(folder));
    folder.value = "";
  });
  document.addEventListener("paste", (event) => {
    const [pasted] = [...(event.clipboardData?.files ?? [])].filter((each) => each.type.startsWith("image/"));
    if (pasted) openFile(pasted);
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  for (const name of ["dragleave", "drop", "dragend"]) {
    document.addEventListener(name, (event) => {
      if (name !== "dragleave" || !event.relatedTarget) document.body.classList.remove("dropping");
    });
  }
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    const dropped = await readDrop(event.dataTransfer);
    if (dropped.length > 1 || dropped[0]?.folder) list(dropped);
    else if (dropped.length) openFile(dropped[0].file);
    else notify("nothing was dropped that this page can open; expected image files or a folder");
  });
  return { openExample, openFile };
}

/** Mark the example that is shown. */
export function markExample(name) {
  for (const button of find("#examples").children) button.setAttribute("aria-pressed", String(button.dataset.example === name));
}
