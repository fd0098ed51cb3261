// Requests, advice, and the log of what happened.
import { fill, h } from "/static/dom.js";
import { clock, number, seconds } from "/static/format.js";

const STATE = { generating: "good", waiting: "warn", paused: "bad" };

export function drawRequests(place, picture) {
  if (!picture.requests.length) return fill(place, h("p", { class: "empty" }, `Nobody is asking. ${number(picture.totals.requests)} requests and ${number(picture.totals.generated_tokens)} tokens so far.`));
  const head = ["Request", "Who", "State", "Prompt tokens", "Generated", "Tokens/s", "First token", "Age"];
  fill(place, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name, index) => h("th", { scope: "col", class: index > 2 ? "number" : null }, name)))),
    h("tbody", {}, picture.requests.slice(0, 40).map((one) => h("tr", {}, [
      h("code", {}, one.id.slice(0, 14)),
      `${one.client} · ${one.endpoint}`,
      h("span", { class: `tag ${STATE[one.state]}` }, one.state),
      number(one.prompt_tokens),
      number(one.generated_tokens),
      number(one.tokens_per_s, 1),
      seconds(one.time_to_first_token_s),
      seconds(one.age_s),
    ].map((value, index) => h("td", { class: index > 2 ? "number" : null, "data-label": head[index] }, value)))))),
    picture.requests.length > 40 && h("p", { class: "note" }, `and ${picture.requests.length - 40} more`));
}

export function drawAdvice(place, picture) {
  const advice = picture.advice;
  if (!advice) {
    const text = picture.stages?.length > 1
      ? ["This deployment was not planned, so there is no advice about it. ", h("code", {}, "shardwise advise"), " tells whether splitting pays on your machines."]
      : ["One stage holds the model; nothing is split."];
    return fill(place, h("p", { class: "empty" }, text));
  }
  fill(place, h("p", { class: "verdict" }, advice.headline), h("span", { class: "tag" }, advice.verdict.replaceAll("_", " ")),
    h("ul", { class: "reasons" }, advice.reasons.map((one) => h("li", {}, one.message))));
}

export function drawEvents(place, picture) {
  const events = [...picture.events].reverse();
  fill(place, events.map((one) => h("li", {}, h("time", { datetime: new Date(one.at_s * 1000).toISOString() }, clock(one.at_s)), h("span", { class: one.kind }, one.text))));
}
