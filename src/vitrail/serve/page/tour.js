// Four captions for the first visit, from patches to the answer. They can be skipped and do not come back.

import { find, write } from "./dom.js";
import { TOUR } from "./words.js";

const SEEN = "vitrail-tour";
const PLACES = { photo: ".pane .photo", controls: "#controls", answer: ".pane .answer" };

const store = {
  get: () => {
    try {
      return localStorage.getItem(SEEN);
    } catch {
      return "private"; // nothing can be kept here: do not ask at every visit
    }
  },
  set: () => {
    try {
      localStorage.setItem(SEEN, "1");
    } catch { /* as above */ }
  },
};

export function startTour() {
  if (store.get()) return;
  const card = find("#tour");
  let step = -1;
  const mark = (on) => TOUR[step] && find(PLACES[TOUR[step][0]])?.classList.toggle("toured", on);
  const finish = () => {
    mark(false);
    card.hidden = true;
    store.set();
  };
  const next = () => {
    mark(false);
    if (++step === TOUR.length) return finish();
    const [, title, text] = TOUR[step];
    write(find("#tour-step"), `${step + 1} of ${TOUR.length}`);
    write(find("#tour-title"), title);
    write(find("#tour-text"), text);
    write(find("#tour-next"), step === TOUR.length - 1 ? "Done" : "Next");
    find("#tour-skip").hidden = step === TOUR.length - 1;
    mark(true);
  };
  find("#tour-next").addEventListener("click", next);
  find("#tour-skip").addEventListener("click", finish);
  card.hidden = false;
  next();
}
