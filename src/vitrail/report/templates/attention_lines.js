"use strict";
// Lines between two columns of words. A panel has the maps of its layers and heads, in thousandths, and
// of the occlusion, if there is one. Pointing at a word, or focusing it, shows what it reads or who reads it.
const LEAST = 0.02; // of the largest value: weaker lines are not drawn
const panels = JSON.parse(document.getElementById("maps").textContent);

for (const node of document.querySelectorAll(".lines")) {
  const data = panels[node.dataset.panel], svg = node.querySelector("svg");
  const sides = ["read", "written"].map(side => [...node.querySelectorAll(`.${side} li`)]);
  const valueOf = name => {
    const found = node.querySelector(`select[name=${name}], input[name=${name}-${node.dataset.panel}]:checked`);
    return found ? found.value : "";
  };
  let map = [], largest = 1, isOcclusion = false, pointed = null; // pointed: [side, number] of a word

  const choose = () => {
    isOcclusion = !data.attention || valueOf("show") === "occlusion";
    const layer = valueOf("layer"), head = valueOf("head");
    map = isOcclusion ? data.occlusion : data.attention[layer][head];
    largest = isOcclusion ? Math.max(1, ...map.flat()) : 1000;
    node.querySelector("output").textContent = isOcclusion ? data.note : data.notes[layer][head];
    for (const select of node.querySelectorAll("select")) select.disabled = isOcclusion;
    node.classList.toggle("occlusion", isOcclusion);
    draw();
  };

  const center = word => word.offsetTop + word.offsetHeight / 2; // from the top of .sides, as in the SVG

  const draw = () => {
    const height = svg.clientHeight, lines = [];
    map.forEach((row, written) => row.forEach((value, read) => {
      const strength = Math.abs(value) / largest;
      const shown = !pointed || pointed[1] === (pointed[0] ? written : read);
      if (!shown || strength < LEAST) return;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const ends = { x1: 0, y1: center(sides[0][read]), x2: 100, y2: center(sides[1][written]) };
      for (const [name, end] of Object.entries(ends)) line.setAttribute(name, end);
      line.style.opacity = Math.min(1, 0.1 + 0.9 * strength);
      line.style.strokeWidth = 1 + 3 * strength;
      line.classList.toggle("less", value < 0);
      lines.push(line);
    }));
    svg.setAttribute("viewBox", `0 0 100 ${height}`);
    svg.replaceChildren(...lines);
    sides.forEach((words, side) => words.forEach((word, number) => {
      const other = pointed && pointed[0] !== side; // a word on the side that is not pointed at
      const value = other ? (side ? map[number][pointed[1]] : map[pointed[1]][number]) : undefined;
      const text = isOcclusion ? (Math.round(value / 100) / 10 || 0).toFixed(1) : `${Math.round(value / 10)} %`;
      word.dataset.value = value === undefined ? "" : text.replace("-", "−");
      word.style.setProperty("--share", value === undefined ? 0 : Math.max(0, value) / largest);
      word.classList.toggle("pointed", !!pointed && pointed[0] === side && pointed[1] === number);
    }));
  };

  sides.forEach((words, side) => words.forEach((word, number) => {
    for (const event of ["mouseenter", "focus"]) word.addEventListener(event, () => { pointed = [side, number]; draw(); });
    for (const event of ["mouseleave", "blur"]) word.addEventListener(event, () => { pointed = null; draw(); });
  }));
  node.addEventListener("change", choose);
  window.addEventListener("resize", draw);
  choose();
}
