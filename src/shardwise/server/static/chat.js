// The chat page: a client of the same API that every other program uses. The conversation lives in this tab only.
import { call, events } from "/static/api.js";
import { h } from "/static/dom.js";
import { number, seconds } from "/static/format.js";
import { showModel, showStatus } from "/static/status.js";

const place = (id) => document.getElementById(id);
const log = place("log");
const prompt = place("prompt");
let messages = [];
let modelName = "";
let running = null;

async function refresh() {
  try {
    const picture = await (await call("/api/status")).json();
    showStatus(picture.availability);
    showModel(picture.model);
    if (picture.model) await nameOfModel();
  } catch (error) {
    showStatus({ status: "no connection", reason: error.message });
  }
}

async function nameOfModel() {
  modelName ||= (await (await call("/v1/models")).json()).data[0].id;
  return modelName;
}

function addTurn(role, text) {
  place("hint")?.remove();
  const turn = h("div", { class: `turn ${role}` }, h("span", { class: "visually-hidden" }, role === "user" ? "You: " : "Model: "), h("span", { class: "text" }, text));
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

async function ask(text) {
  addTurn("user", text);
  messages.push({ role: "user", content: text });
  const turn = addTurn("assistant", "");
  turn.classList.add("streaming");
  const target = turn.querySelector(".text");
  const system = place("system").value.trim();
  const started = performance.now();
  let first = null, count = 0, answer = "", reason = null;
  running = new AbortController();
  setBusy(true);
  try {
    const response = await call("/v1/chat/completions", { method: "POST", signal: running.signal, body: {
      model: await nameOfModel(), messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      temperature: Number(place("temperature").value), max_tokens: Number(place("max").value), stream: true, stream_options: { include_usage: true },
    } });
    let last = performance.now();
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) count = chunk.usage.completion_tokens;
      reason = chunk.choices[0]?.finish_reason ?? reason;
      const piece = chunk.choices[0]?.delta.content;
      if (!piece) continue;
      last = performance.now();
      first ??= last;
      count += 1;
      answer += piece;
      target.textContent = answer;
      log.scrollTop = log.scrollHeight;
      if (last > first) place("rate").textContent = `${number((1000 * (count - 1)) / (last - first), 1)} tokens/s`;
    }
    if (reason === null) throw new TypeError("the stream ended early");
    const facts = [`${number(count)} tokens`];
    if (first !== null) facts.push(`first after ${seconds((first - started) / 1000)}`, `${number((1000 * Math.max(0, count - 1)) / Math.max(1, last - first), 1)} tokens/s`);
    if (reason === "length") facts.push("cut off at the limit (see Settings)");
    turn.append(h("span", { class: "meta" }, facts.join(" · ")));
  } catch (error) {
    if (error.name === "AbortError") turn.append(h("span", { class: "meta" }, "stopped"));
    else {
      turn.classList.add("failed");
      turn.append(h("span", { class: "meta" }, error instanceof TypeError ? "The connection broke, and this answer is not whole. Ask again." : error.message));
    }
  } finally {
    turn.classList.remove("streaming");
    if (answer) messages.push({ role: "assistant", content: answer });
    running = null;
    setBusy(false);
    refresh();
  }
}

function setBusy(busy) {
  place("send").disabled = busy;
  place("stop").hidden = !busy;
  log.setAttribute("aria-busy", String(busy));
}

place("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  prompt.style.height = "";
  ask(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); place("form").requestSubmit(); }
});
prompt.addEventListener("input", () => { prompt.style.height = "auto"; prompt.style.height = `${prompt.scrollHeight}px`; });
place("stop").addEventListener("click", () => running?.abort());
place("clear").addEventListener("click", () => { running?.abort(); messages = []; log.replaceChildren(); place("rate").textContent = ""; prompt.focus(); });
refresh();
setInterval(refresh, 3000);
prompt.focus();
