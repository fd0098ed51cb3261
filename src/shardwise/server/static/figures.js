// The strip of key figures with a line of the last two minutes.
import { fill, h } from "/static/dom.js";
import { number, percent, seconds } from "/static/format.js";

const figure = (name, value, unit = "") => h("div", { class: "figure" }, h("div", { class: "name" }, name), h("div", { class: "value" }, value, unit && h("small", {}, unit)));

export function drawFigures(place, picture) {
  const said = picture.availability;
  const history = picture.history.map((one) => one.tokens_per_s);
  const recent = history.slice(-6);
  const now = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
  const firsts = picture.requests.map((one) => one.time_to_first_token_s).filter((one) => one != null).sort((a, b) => a - b);
  const waiting = picture.requests.filter((one) => one.state === "waiting").length;
  fill(place,
    said.status === "loading" && h("div", { class: "loading-bar" },
      h("label", { for: "progress", class: "note" }, `${said.reason}${said.progress == null ? "" : ` · ${percent(said.progress)}`}${said.expected_s == null ? "" : ` · ${seconds(said.expected_s)} left`}`),
      h("progress", { id: "progress", max: 1, value: said.progress })),
    figure("Generating now", number(now, now < 10 ? 1 : 0), "tokens/s"),
    spark(history),
    figure("Requests in flight", number(picture.requests.length), waiting ? `${waiting} waiting` : ""),
    figure("First token, median", firsts.length ? seconds(firsts[firsts.length >> 1]) : "–"),
    figure("Last token came", said.last_token_age_s == null ? "–" : seconds(Math.max(0.1, Math.round(said.last_token_age_s * 10) / 10)), said.last_token_age_s == null ? "" : "ago"),
    figure("Recoveries", number((picture.recoveries ?? []).length)));
}

function spark(values) {
  const top = Math.max(1, ...values);
  const step = 240 / Math.max(1, values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(46 - (value / top) * 42).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "M0,46L240,46";
  return h("div", { class: "figure spark" },
    h("div", { class: "name" }, `Last two minutes, peak ${number(values.length ? Math.max(...values) : 0)} tokens/s`),
    h("svg", { viewBox: "0 0 240 48", preserveAspectRatio: "none", role: "img", "aria-label": "Tokens per second over the last two minutes" },
      h("path", { class: "spark-area", d: `${line}L240,48L0,48Z` }),
      h("path", { class: "spark-line", d: line })));
}
