// Elements from data. Text is always set as text, never read as HTML: names, plans and log lines come from anywhere.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Put other children into an element, unless they are the same text. */
export function put(element, ...children) {
  const found = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  if (found.every((child) => typeof child === "string") && found.join("") === element.textContent && !element.children.length) return;
  element.replaceChildren(...found);
}

/** A number that is typed, checked by the browser; returns null where none is given. */
export function numberOf(input) {
  const value = input.valueAsNumber;
  return Number.isInteger(value) && value > 0 ? value : null;
}
