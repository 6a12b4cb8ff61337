// Small helpers for the page. Text reaches the page by textContent only, so that a label is never markup.

/** @returns {any} */
export const find = (selector, root = document) => root.querySelector(selector);

export const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

/**
 * An element with properties and children; strings become text. `aria-…`, `data-…` and role are attributes.
 * @returns {any}
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (/^(aria-|data-|role$|for$|list$)/.test(name)) element.setAttribute(name, String(value));
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** An SVG element; the figures of numbers are drawn with it, so that they stay sharp and readable. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Set the text of an element if it is another. */
export function write(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

let spoken = 0;

/** Say a line to screen readers, the last one of several in a row. */
export function say(text) {
  clearTimeout(spoken);
  spoken = setTimeout(() => write(find("#live"), text), 200);
}

/** Show a line above the figures: an error, or what happens. */
export function notify(text, kind = "error") {
  const place = find("#notice");
  write(place, text);
  place.dataset.kind = kind;
  place.hidden = !text;
}

/** What went wrong has been put right; what a link lacks is still to be read. */
export function clearError() {
  if (find("#notice").dataset.kind === "error") notify("");
}

/** Offer bytes as a file. */
export function download(name, blob) {
  const address = URL.createObjectURL(blob), link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** A bar with its share; drawn by CSS from a custom property. */
export function bar(share, kind = "") {
  const element = make("span", { className: `bar ${kind}`, "aria-hidden": "true" });
  element.style.setProperty("--share", String(Math.min(Math.max(share, 0), 1)));
  return element;
}
