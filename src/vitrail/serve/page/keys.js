// The keyboard: arrows move the asking patch, letters do what the buttons do.

import { find, make } from "./dom.js";
import { state } from "./state.js";
import { KEYS } from "./words.js";

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function toggleHelp(on = find("#keys").hidden) {
  find("#keys").hidden = !on;
  find("#help").setAttribute("aria-expanded", String(on));
}

/** @param {() => any} first the pane whose patches the arrows follow */
export function listenToKeys(first, act) {
  find("#keys").replaceChildren(make("dl", {}, ...KEYS.map(([key, does]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, does)))));
  find("#help").addEventListener("click", () => toggleHelp());
  document.addEventListener("keydown", (event) => {
    const target = event.target, pane = first();
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.matches?.("input:not([type=range]), select, textarea")) return;
    const arrow = ARROWS[event.key];
    if (arrow && (target.matches?.("[role=tab], input") || !pane?.explained)) return;
    if (arrow) pane.step(...arrow);
    else if (event.key === " " && target.matches?.("canvas, body") && state.brushing) pane.toggleAsking();
    else if (event.key === "Escape") {
      toggleHelp(false);
      if (state.brushing) act.brush(false);
    } else if (event.key === "?") toggleHelp();
    else if (event.key === "c") act.ask(null);
    else if (event.key === "m") act.chooseHead("mean");
    else if (event.key === "b" && pane?.hide) act.brush(!state.brushing);
    else if (event.key === "o") find("#file").click();
    else if (event.key === "+" || event.key === "=") act.stepLayer(1);
    else if (event.key === "-") act.stepLayer(-1);
    else if (/^\d$/.test(event.key)) act.chooseHead(Number(event.key), true);
    else return;
    event.preventDefault();
  });
}
