// Lines between two columns of words: what each word reads. The report of a translation draws with this file, too.

const LEAST = 0.02; // of the largest value: weaker lines are not drawn

/**
 * @param {HTMLElement} node with two lists, .read and .written, and an SVG between them
 * @param {(pointed: [number, number] | null) => void} onPoint side (0 is read, 1 is written) and number of a word
 * @returns {{show: (map: number[][], how: {largest: number, format: (value: number) => string}) => void, point: (pointed: [number, number] | null) => void}}
 */
export function connectWords(node, onPoint = () => {}) {
  const svg = node.querySelector("svg"), sides = ["read", "written"].map((side) => [...node.querySelectorAll(`.${side} li`)]);
  let map = [], how = { largest: 1, format: String }, pointed = null;

  const center = (word) => word.offsetTop + word.offsetHeight / 2; // from the top of .sides, as in the SVG

  const draw = () => {
    const lines = [];
    map.forEach((row, written) => row.forEach((value, read) => {
      const strength = Math.abs(value) / how.largest, shown = !pointed || pointed[1] === (pointed[0] ? written : read);
      if (!shown || strength < LEAST) return;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const ends = { x1: 0, y1: center(sides[0][read]), x2: 100, y2: center(sides[1][written]) };
      for (const [name, end] of Object.entries(ends)) line.setAttribute(name, end);
      line.style.opacity = Math.min(1, 0.1 + 0.9 * strength);
      line.style.strokeWidth = 1 + 3 * strength;
      line.classList.toggle("less", value < 0);
      lines.push(line);
    }));
    svg.setAttribute("viewBox", `0 0 100 ${svg.clientHeight}`);
    svg.replaceChildren(...lines);
    sides.forEach((words, side) => words.forEach((word, number) => {
      const other = pointed && pointed[0] !== side; // a word on the side that is not pointed at
      const value = other ? (side ? map[number]?.[pointed[1]] : map[pointed[1]]?.[number]) : undefined;
      word.dataset.value = value === undefined ? "" : how.format(value).replace("-", "−");
      word.style.setProperty("--share", value === undefined ? 0 : Math.max(0, value) / how.largest);
      word.classList.toggle("pointed", !!pointed && pointed[0] === side && pointed[1] === number);
    }));
  };

  const point = (found) => {
    pointed = found;
    draw();
  };
  sides.forEach((words, side) => words.forEach((word, number) => {
    for (const event of ["mouseenter", "focus"]) word.addEventListener(event, () => { point([side, number]); onPoint([side, number]); });
    for (const event of ["mouseleave", "blur"]) word.addEventListener(event, () => { point(null); onPoint(null); });
  }));
  new ResizeObserver(draw).observe(svg);
  return { point, show: (values, given) => { [map, how] = [values, given]; draw(); } };
}
