// The dashboard: one stream of pictures, drawn section by section. When the stream breaks it says so and comes back by itself.
import { call, events } from "/static/api.js";
import { fill } from "/static/dom.js";
import { clock, seconds } from "/static/format.js";
import { drawBoundaries } from "/static/boundaries.js";
import { drawFigures } from "/static/figures.js";
import { drawHome } from "/static/home.js";
import { drawAdvice, drawEvents, drawRequests } from "/static/lists.js";
import { drawOperate } from "/static/operate.js";
import { drawPath } from "/static/path.js";
import { showModel, showStatus } from "/static/status.js";

const place = (id) => document.getElementById(id);

function draw(picture) {
  showStatus(picture.availability);
  showModel(picture.model);
  drawFigures(place("figures"), picture);
  drawHome(place("home"), picture);
  drawPath(place("path"), picture);
  drawBoundaries(place("boundaries"), picture);
  drawRequests(place("requests"), picture);
  drawAdvice(place("advice"), picture);
  drawEvents(place("events"), picture);
  drawOperate(place("operate"), place("operate-card"), picture);
  const old = picture.stats_age_s != null && picture.stats_age_s > 3 ? ` · stage figures are ${seconds(picture.stats_age_s)} old` : "";
  fill(place("foot"), `shardwise ${picture.version} · up ${seconds(picture.uptime_s)} · ${clock(picture.at_s)}${old}`);
}

function lost(text) {
  const banner = place("banner");
  banner.hidden = !text;
  if (banner.textContent !== text) banner.textContent = text;
  document.body.classList.toggle("stale", Boolean(text));
}

async function watch() {
  let wait = 500;
  for (;;) {
    try {
      for await (const picture of events(await call("/api/events"))) { lost(""); wait = 500; draw(picture); }
      lost("The server has ended the connection. Trying again…");
    } catch (error) {
      lost(`No connection to the server (${error.message}). What you see is old; trying again…`);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 1.6, 5000);
  }
}
watch();
