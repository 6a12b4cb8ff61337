// The choices of the page around `connectWords`, which the page of `vitrail serve` draws with, too. A panel has the maps of
// its layers and heads, in thousandths, and of the occlusion, if there is one.
const panels = JSON.parse(document.getElementById("maps").textContent);

for (const node of document.querySelectorAll(".lines")) {
  const data = panels[node.dataset.panel], lines = connectWords(node);
  const valueOf = name => {
    const found = node.querySelector(`select[name=${name}], input[name=${name}-${node.dataset.panel}]:checked`);
    return found ? found.value : "";
  };
  const choose = () => {
    const isOcclusion = !data.attention || valueOf("show") === "occlusion";
    const layer = valueOf("layer"), head = valueOf("head");
    const map = isOcclusion ? data.occlusion : data.attention[layer][head];
    node.querySelector("output").textContent = isOcclusion ? data.note : data.notes[layer][head];
    for (const select of node.querySelectorAll("select")) select.disabled = isOcclusion;
    node.classList.toggle("occlusion", isOcclusion);
    lines.show(map, isOcclusion
      ? { largest: Math.max(1, ...map.flat()), format: value => (Math.round(value / 100) / 10 || 0).toFixed(1) }
      : { largest: 1000, format: value => `${Math.round(value / 10)} %` });
  };
  node.addEventListener("change", choose);
  choose();
}
