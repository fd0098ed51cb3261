// The pill in the header, on every page.
import { fill, h } from "/static/dom.js";
import { params, percent, seconds } from "/static/format.js";

export function showStatus(said) {
  const pill = document.getElementById("status");
  const names = { ready: "Ready", loading: "Loading", draining: "Draining", not_ready: "Not ready", failed: "Failed", stopped: "Stopped" };
  const kind = { ready: "ready", loading: "loading", draining: "draining" }[said.status] ?? "bad";
  const parts = [names[said.status] ?? said.status];
  if (said.status === "loading" && said.progress != null) parts.push(percent(said.progress));
  if (said.expected_s != null) parts.push(`${seconds(said.expected_s)} left`);
  const text = parts.join(" · ");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `status ${kind}`;
  pill.title = said.reason ?? "";
}

export function showModel(model) {
  const place = document.getElementById("model");
  if (!model) return fill(place);
  fill(place, h("b", {}, model.name), ` ${model.quantization} · ${params(model.num_params)} · ${model.num_layers} layers`);
}
