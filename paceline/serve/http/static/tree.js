"use strict";
// The colour of a source, and the picture of a draft tree: depth to the right, siblings below one another.

const FIXED_COLOURS = { recovered: "var(--correction)", bonus: "var(--bonus)", target: "transparent" };
const NUM_COLOURS = 6;
const memberColours = new Map(); // in order of appearance, so that a drafter keeps its colour

function colourOf(source) {
  if (source in FIXED_COLOURS) return FIXED_COLOURS[source];
  if (!memberColours.has(source)) memberColours.set(source, `var(--c${memberColours.size % NUM_COLOURS})`);
  return memberColours.get(source);
}

function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
}

const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.appendChild(element);
  return element;
}

// Rows: a node's first child goes on in its row, each further one opens a new row.
function layOut(nodes) {
  const children = new Map();
  nodes.forEach((node, i) => children.set(node.parent, [...(children.get(node.parent) || []), i]));
  const places = [];
  let numRows = 0;
  const place = (i, depth, row) => {
    places[i] = { depth, row };
    (children.get(i) || []).forEach((child, k) => place(child, depth + 1, k === 0 ? row : numRows++));
  };
  (children.get(-1) || []).forEach((top) => place(top, 0, numRows++));
  return { places, numRows };
}

function drawTree(holder, tree) {
  const width = 96, height = 28, gap = 18;
  const nodes = [...tree.nodes];
  const lastAccepted = nodes.reduce((last, node, i) => (node.accepted ? i : last), -1);
  const leaf = !tree.nodes.some((node) => node.parent === lastAccepted);
  tree.then.forEach((text, k) => nodes.push({
    text, accepted: true, parent: k ? nodes.length - 1 : lastAccepted,
    members: [leaf && lastAccepted >= 0 ? "bonus" : "recovered"],
  }));
  const { places, numRows } = layOut(nodes);
  const depth = Math.max(...places.map((p) => p.depth)) + 1;
  const picture = svg("svg", {
    width: depth * (width + gap), height: numRows * (height + 6) + 4, role: "img",
    "aria-label": `draft of ${tree.num_nodes} nodes by ${tree.method}`,
  });
  const x = (i) => places[i].depth * (width + gap) + 1, y = (i) => places[i].row * (height + 6) + 2;
  nodes.forEach((node, i) => {
    if (node.parent < 0) return;
    const x1 = x(node.parent) + width, y1 = y(node.parent) + height / 2, x2 = x(i), y2 = y(i) + height / 2;
    const middle = (x1 + x2) / 2;
    svg("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, class: node.accepted ? "yes" : "" }, picture);
  });
  nodes.forEach((node, i) => {
    const group = svg("g", { class: node.accepted ? "yes" : "" }, picture);
    const source = node.members.join("+");
    svg("rect", { x: x(i), y: y(i), width, height, rx: 6, style: node.accepted ? `fill:${colourOf(source)}` : "" }, group);
    const shown = visible(node.text);
    svg("text", { x: x(i) + 8, y: y(i) + 18 }, group).textContent = shown.length > 11 ? shown.slice(0, 10) + "…" : shown;
    svg("title", {}, group).textContent = `${JSON.stringify(node.text)}, ${source}${node.accepted ? "" : ", rejected"}`;
  });
  holder.replaceChildren(picture);
}
