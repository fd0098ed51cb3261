// Drain, stop, start, restart a machine's workers, and re-plan with a preview of what would move.
import { call } from "/static/api.js";
import { fill, h } from "/static/dom.js";
import { bytes } from "/static/format.js";

let preview = null;
let message = "";
let latest = null;

async function act(path, body) {
  message = "";
  try {
    const response = await call(path, { method: "POST", body: body ?? {} });
    return await response.json();
  } catch (error) {
    message = error.message;
    return null;
  } finally {
    redraw();
  }
}

function redraw() {
  if (latest) drawOperate(document.getElementById("operate"), document.getElementById("operate-card"), latest);
}

export function drawOperate(place, card, picture) {
  latest = picture;
  const can = picture.operations ?? {};
  card.hidden = !Object.keys(can).length;
  if (card.hidden) return;
  const nodes = [...new Set((picture.stages ?? []).map((stage) => stage.node))];
  const button = (text, allowed, onclick) => h("button", { type: "button", class: "plain", disabled: !allowed, onclick }, text);
  fill(place,
    h("div", { class: "row" },
      button("Drain: accept nothing new", can.drain, () => act("/api/drain")),
      button("Accept requests again", can.resume, () => act("/api/resume")),
      button("Stop the model", can.stop, () => act("/api/stop")),
      button("Start the model", can.start, () => act("/api/start")),
      nodes.map((node) => button(`New workers on ${node}`, can.restart, () => act("/api/restart", { node }))),
      nodes.length > 1 && nodes.map((node) => button(`Move everything off ${node}`, can.leave, () => act("/api/leave", { node })))),
    can.replan && replanForm(picture),
    message && h("p", { class: "banner", role: "alert" }, message));
}

function replanForm(picture) {
  const current = picture.stages.map((stage) => stage.layers[1] - stage.layers[0]).join(",");
  const input = h("input", { id: "split", name: "split", placeholder: current, pattern: "[0-9]+(,[0-9]+)*", size: "18", "aria-describedby": "split-help" });
  return h("div", { class: "moves" },
    h("form", { class: "row", onsubmit: async (event) => {
      event.preventDefault();
      const text = event.target.elements.split.value.trim() || current;
      preview = await act("/api/replan/preview", { layers: text.split(",").map(Number) });
      redraw();
    } },
      h("label", { for: "split" }, "Layers of each stage"), input, h("button", { type: "submit", class: "plain" }, "Preview the move"),
      h("span", { id: "split-help", class: "note" }, `now ${current}, ${picture.model.num_layers} in all`)),
    preview && h("div", {},
      h("p", { class: "note" }, preview.moves.length ? `${bytes(preview.moved_bytes)} of weights change hands. ${latest.operations.live ? "The old workers serve until the new ones are ready; no request is lost." : "Running requests end first, then the model is loaded anew."}` : "Nothing would move."),
      preview.moves.length > 0 && h("table", {},
        h("thead", {}, h("tr", {}, ["Layers", "From", "To", "Weights"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, preview.moves.map((move) => h("tr", {}, h("td", {}, `${move.layers[0]}–${move.layers[1] - 1}`), h("td", {}, move.source), h("td", {}, move.target), h("td", {}, bytes(move.weight_bytes)))))),
      preview.moves.length > 0 && h("div", { class: "row moves" },
        h("button", { type: "button", onclick: async () => { const layers = preview.layers; preview = null; await act("/api/replan/apply", { layers }); } }, "Apply"),
        h("button", { type: "button", class: "plain", onclick: () => { preview = null; redraw(); } }, "Leave it"))));
}
