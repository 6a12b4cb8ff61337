// The mouse and the finger over a photo: point at a patch, click to keep it, or paint patches that are hidden.

import { state } from "./state.js";

/** The point of the photo under the pointer: shares of its width and height. */
function pointOf(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

/** @param {HTMLCanvasElement} canvas */
export function followPointer(canvas, pane) {
  let painting = null; // true while patches are hidden, false while they are shown
  const paint = (event) => {
    const patch = pane.explained?.patchAt(pointOf(event, canvas));
    if (!patch) return;
    const name = patch.join(",");
    painting ??= !pane.hidden.has(name);
    if (pane.hidden.has(name) !== painting) pane.act.paint(pane.explained.centerOf(patch), painting);
  };
  canvas.addEventListener("pointermove", (event) => {
    if (!pane.explained) return;
    pane.act.hover(pointOf(event, canvas));
    if (state.brushing && painting !== null) paint(event);
  });
  canvas.addEventListener("pointerleave", () => pane.act.hover(null));
  canvas.addEventListener("pointerdown", (event) => {
    if (!pane.explained || event.button) return;
    pane.act.hover(pointOf(event, canvas));
    if (!state.brushing) return;
    canvas.setPointerCapture(event.pointerId);
    paint(event);
  });
  const end = () => {
    painting = null;
  };
  canvas.addEventListener("pointerup", (event) => {
    end();
    if (event.pointerType === "touch" && !state.brushing) {
      pane.act.ask(pointOf(event, canvas));
      pane.act.hover(null);
    }
  });
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("click", (event) => {
    if (!state.brushing && pane.explained && event.pointerType !== "touch") pane.act.ask(pointOf(event, canvas));
  });
}
