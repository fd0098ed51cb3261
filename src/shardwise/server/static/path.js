// The newest traced token: when each stage had it, and what it did with it.
import { fill, h } from "/static/dom.js";
import { seconds } from "/static/format.js";

export function drawPath(place, picture) {
  const path = picture.path;
  if (!path || !path.visits.length) return fill(place, h("p", { class: "empty" }, "Send a request: tokens are traced while this page is open."));
  const total = Math.max(path.total_s, ...path.visits.map((one) => one.start_s + one.wait_s + one.compute_s + one.send_s));
  const share = (value) => `${(100 * value) / total}%`;
  const lane = (visit) => {
    let at = visit.start_s;
    const parts = [["waiting", visit.wait_s, "waits"], ["compute", visit.compute_s, "computes"], ["send", visit.send_s, "sends"]].map(([kind, length, verb]) => {
      const part = h("i", { class: kind, style: { left: share(at), width: share(length) }, title: `${verb} ${seconds(length)}` });
      at += length;
      return part;
    });
    return h("div", { class: "lane" }, h("span", {}, `Stage ${visit.stage}`),
      h("div", { class: "track", role: "img", "aria-label": `stage ${visit.stage}: waits ${seconds(visit.wait_s)}, computes ${seconds(visit.compute_s)}, sends ${seconds(visit.send_s)}` }, parts));
  };
  const compute = path.visits.reduce((sum, one) => sum + one.compute_s, 0);
  fill(place, path.visits.map(lane),
    h("p", { class: "note" }, `Token at position ${path.position}: ${seconds(total)} from stage ${path.visits[0].stage} to the driver, ${seconds(compute)} of it computing (${Math.round((100 * compute) / total)} %), with ${path.visits[0].rows} row${path.visits[0].rows === 1 ? "" : "s"} in its step.${path.complete ? "" : " (It shared its steps with requests that are not traced.)"}`));
}
