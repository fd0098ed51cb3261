// Automatic, light, dark; the choice stays in this browser.
const media = matchMedia("(prefers-color-scheme: dark)");
const ORDER = ["automatic", "light", "dark"];
let choice = localStorage.getItem("theme") ?? "automatic";

function apply() {
  const dark = choice === "dark" || (choice === "automatic" && media.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  if (!button) return;
  button.textContent = { automatic: "◐", light: "☀", dark: "☾" }[choice];
  button.setAttribute("aria-label", `Colour theme: ${choice}`);
}
media.addEventListener("change", apply);
document.getElementById("theme")?.addEventListener("click", () => {
  choice = ORDER[(ORDER.indexOf(choice) + 1) % ORDER.length];
  localStorage.setItem("theme", choice);
  apply();
});
apply();
