// Elements as values, and a patch that changes only what differs: focus, scroll and selection survive every update.
const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect", "line", "circle", "g", "polyline", "title"]);

export function h(tag, properties = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue;
    if (name === "style") setStyle(element, value);
    else if (name.startsWith("on")) { element[name] = value; }
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child == null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

function setStyle(element, style) {  // through the object model: the content security policy forbids style attributes
  for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value);
}

export function fill(parent, ...wanted) {
  const nodes = wanted.flat(Infinity).filter((node) => node != null && node !== false).map((n) => (n instanceof Node ? n : document.createTextNode(String(n))));
  const have = [...parent.childNodes];
  nodes.forEach((node, index) => {
    const old = have[index];
    if (!old) parent.append(node);
    else if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) old.replaceWith(node);
    else if (old.nodeType === Node.TEXT_NODE) { if (old.data !== node.data) old.data = node.data; }
    else patch(old, node);
  });
  for (const extra of have.slice(nodes.length)) extra.remove();
}

function patch(old, wanted) {
  for (const { name } of [...old.attributes]) if (name !== "style" && !wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.style && wanted.style && old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
  for (const handler of ["onclick", "onsubmit", "oninput"]) if (old[handler] !== wanted[handler]) old[handler] = wanted[handler];
  fill(old, [...wanted.childNodes]);
}
