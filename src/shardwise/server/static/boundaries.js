// What a boundary costs a token: predicted beside measured, one scale for all.
import { fill, h } from "/static/dom.js";
import { bytes, seconds } from "/static/format.js";

const PARTS = [["transfer", "transfer_s"], ["copy", "copy_s"], ["waiting", "wait_s"]];
const total = (figures) => PARTS.reduce((sum, [, key]) => sum + figures[key].p50, 0);

export function drawBoundaries(place, picture) {
  const found = picture.boundaries ?? [];
  if (!found.length) {
    const text = picture.stages?.length === 1 ? "One stage holds the whole model: there is no boundary to pay for." : "No figures yet.";
    return fill(place, h("p", { class: "empty" }, text));
  }
  const scale = Math.max(1e-9, ...found.flatMap((one) => [total(one.measured), one.predicted ? total(one.predicted) : 0]));
  fill(place, found.map((one) => h("div", { class: "boundary" },
    h("h3", {}, name(one), h("span", {}, one.bytes_per_token ? `${bytes(one.bytes_per_token)} a token` : "")),
    one.predicted ? bar("predicted", one.predicted, scale) : h("div", { class: "pair" }, h("span", { class: "label" }, "predicted"), h("span", { class: "label" }, "no plan behind this deployment"), h("span", {})),
    bar("measured", one.measured, scale))));
}

function name(one) {
  const stages = `stage ${one.from_stage} → ${one.to_stage}`;
  return one.source === one.target ? stages : `${one.source} → ${one.target} (${stages})`;
}

function bar(label, figures, scale) {
  const text = PARTS.map(([, key]) => `${key.slice(0, -2)} ${seconds(figures[key].p50)}`).join(", ");
  return h("div", { class: "pair" }, h("span", { class: "label" }, label),
    h("div", { class: "bar", role: "img", "aria-label": `${label}: ${text}` },
      PARTS.map(([kind, key]) => h("i", { class: kind, style: { width: `${(100 * figures[key].p50) / scale}%` }, title: `${key.slice(0, -2)} ${seconds(figures[key].p50)}` }))),
    h("span", { class: "total" }, seconds(total(figures))));
}
