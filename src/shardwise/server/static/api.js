// Talking to the server: the key (kept for this tab only), errors with their message, and streams of events.
import { h } from "/static/dom.js";

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function call(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem("key");
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    if (response.status === 401) { await askKey(); continue; }
    if (!response.ok) {
      const text = await response.text();
      let message = text;
      try { message = JSON.parse(text).error.message; } catch { /* not ours: show it as it is */ }
      throw new ApiError(response.status, message || response.statusText);
    }
    return response;
  }
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      let end;
      while ((end = held.indexOf("\n\n")) >= 0) {
        const block = held.slice(0, end);
        held = held.slice(end + 2);
        const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let asking = null;
function askKey() {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", id: "key", required: true, autocomplete: "current-password" });
    const dialog = h("dialog", { "aria-labelledby": "key-title" },
      h("form", { method: "dialog" },
        h("h2", { id: "key-title" }, "API key"),
        h("label", { for: "key" }, "This server asks for a key. It is kept in this tab only."),
        input,
        h("div", { class: "row" }, h("button", {}, "Continue"))));
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("key", input.value.trim());
      dialog.remove();
      asking = null;
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
