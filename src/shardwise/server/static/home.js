// The home as it is: machines in the order of the layers, what each holds, and the links between them.
import { fill, h } from "/static/dom.js";
import { bytes, number, seconds } from "/static/format.js";

const STATE = { ready: "good", loading: "warn", gone: "bad" };
const layers = ([start, end]) => (end - start === 1 ? `layer ${start}` : `layers ${start}–${end - 1}`);

export function drawHome(place, picture) {
  if (!picture.stages) return fill(place, h("p", { class: "empty" }, picture.availability.reason || "Nothing runs yet."));
  const groups = [];
  for (const stage of picture.stages) {
    const last = groups.at(-1);
    if (last && last.name === stage.node) last.stages.push(stage);
    else groups.push({ name: stage.node, stages: [stage] });
  }
  const largest = Math.max(...groups.map((group) => used(group)));
  const busy = picture.requests.some((one) => one.state === "generating");
  const cards = groups.flatMap((group, index) => {
    const card = nodeCard(group, picture, largest, busy);
    return index ? [hop(picture, group.stages[0].index - 1, busy), card] : [card];
  });
  fill(place, strip(picture), h("div", { class: "nodes" }, cards),
    picture.stages.length > 1 && h("div", { class: "ring" }, "the chosen token goes back to stage 0, 4 bytes"));
}

const used = (group) => group.stages.reduce((sum, stage) => sum + stage.weight_bytes + stage.kv_bytes + stage.workspace_bytes, 0);

function strip(picture) {
  const total = picture.model.num_layers;
  return h("div", { class: picture.stages.length > 4 ? "strip many" : "strip", role: "img", "aria-label": `${total} layers over ${picture.stages.length} stages` },
    picture.stages.map((stage, index) => h("span", { class: stage.state === "gone" ? "gone" : null, style: { flex: String(stage.layers[1] - stage.layers[0]) },
      title: layers(stage.layers) }, index ? `${stage.layers[0]}–${stage.layers[1] - 1}` : layers(stage.layers))));
}

function nodeCard(group, picture, largest, busy) {
  const node = picture.nodes.find((one) => one.name === group.name);
  const gone = group.stages.filter((stage) => stage.state === "gone").length;
  const loading = group.stages.filter((stage) => stage.state === "loading").length;
  const capacity = node?.capacity_bytes ?? null;
  const whole = capacity ?? largest;
  const sum = (key) => group.stages.reduce((total, stage) => total + stage[key], 0);
  const segment = (kind, value, name) => h("i", { class: kind, style: { width: `${(100 * value) / whole}%` }, title: `${name} ${bytes(value)}` });
  const text = `${bytes(used(group))}${capacity ? ` of ${bytes(capacity)}` : ""}`;
  return h("article", { class: `node ${gone ? "down" : ""}`, "aria-label": `machine ${group.name}` },
    h("div", { class: "node-head" }, machine(), h("h3", {}, group.name),
      h("span", { class: `tag ${gone ? "bad" : loading ? "warn" : "good"}` }, gone ? `${gone} of ${group.stages.length} gone` : loading ? "loading" : "up")),
    h("div", { class: "bar", role: "img", "aria-label": `memory: ${text}; weights ${bytes(sum("weight_bytes"))}, KV cache ${bytes(sum("kv_bytes"))}, workspace ${bytes(sum("workspace_bytes"))}` },
      segment("weights", sum("weight_bytes"), "weights"), segment("kv", sum("kv_bytes"), "KV cache"), segment("workspace", sum("workspace_bytes"), "workspace")),
    h("div", { class: "bar-note" }, h("span", {}, text), h("span", {}, `weights ${bytes(sum("weight_bytes"))}`)),
    h("div", { class: "stages" }, group.stages.flatMap((stage, index) => (index ? [hop(picture, stage.index - 1, busy), stageTile(stage)] : [stageTile(stage)]))));
}

function stageTile(stage) {
  const alive = stage.state === "ready";
  const kv = !alive || stage.kv_tokens == null ? "–" : `${number(stage.kv_tokens)} / ${number(stage.kv_capacity_tokens)}`;
  return h("div", { class: `stage ${stage.state}`, "data-stage": stage.index },
    h("div", { class: "stage-title" }, h("span", {}, `Stage ${stage.index}`), h("span", { class: `tag ${STATE[stage.state] ?? "warn"}` }, stage.state)),
    h("dl", {},
      h("dt", {}, "holds"), h("dd", {}, layers(stage.layers)),
      h("dt", {}, "computes"), h("dd", {}, alive && stage.compute_s?.n ? `${seconds(stage.compute_s.p50)} a token` : "–"),
      h("dt", { title: "tokens whose keys and values this stage keeps, of those it has room for" }, "KV tokens"), h("dd", {}, kv),
      h("dt", {}, "memory"), h("dd", {}, alive ? bytes(stage.memory_bytes) : "–"),
      h("dt", {}, "process"), h("dd", {}, stage.pid ? String(stage.pid) : "–")));
}

function hop(picture, index, busy) {
  const found = picture.boundaries?.find((one) => one.from_stage === index);
  const broken = [index, index + 1].some((one) => picture.stages[one]?.state !== "ready");
  const time = broken ? null : found?.measured.transfer_s;
  return h("div", { class: `hop ${broken ? "broken" : busy ? "busy" : ""}`, role: "img", "aria-label": `link from stage ${index} to stage ${index + 1}${time?.n ? `: ${seconds(time.p50)}` : broken ? ": interrupted" : ""}` },
    h("strong", {}, broken ? "interrupted" : time?.n ? seconds(time.p50) : "–"),
    h("svg", { class: "arrow", viewBox: "0 0 60 12", preserveAspectRatio: "none", "aria-hidden": "true" },
      h("path", { d: "M2 6H52M46 2L54 6L46 10", fill: "none", stroke: "currentColor", "stroke-width": 2, "vector-effect": "non-scaling-stroke" })),
    h("span", {}, !broken && found?.bytes_per_token ? `${bytes(found.bytes_per_token)}/token` : ""));
}

const machine = () => h("svg", { class: "machine", viewBox: "0 0 24 24", "aria-hidden": "true" },
  h("path", { d: "M4 5h16v11H4zM9 20h6M12 16v4", fill: "none", stroke: "currentColor", "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-linecap": "round" }));
