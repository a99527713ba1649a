// A world map with the sites, this router, and streams that move between sites.

import { s } from "./dom.js";
import { LAND } from "./land.js";

const x = (place) => (place.longitude + 180) * 4;
const y = (place) => (90 - place.latitude) * 4;
const SHOWN_MOVES_MS = 6000;

export function draw(network, moves) {
  const placed = network.sites.filter((site) => site.place);
  const labelled = placed.length <= 40;
  const recent = moves.filter((move) => performance.now() - move.seen_ms < SHOWN_MOVES_MS);
  const at = new Map(placed.map((site) => [site.name, site.place]));
  const bad = placed.filter((site) => site.state !== "healthy").map((site) => `${site.name} is ${site.state}`);
  const summary = `${placed.length} sites on a map of the world` + (bad.length ? `; ${bad.join(", ")}` : ", all healthy");
  return s("svg", { class: "map", viewBox: "0 60 1440 530", role: "img", "aria-label": summary },
    s("path", { class: "land", d: LAND }),
    network.place && placed.map((site) => site.open_requests > 0 && s("path", { class: "way", d: arc(network.place, site.place) })),
    recent.map((move) => at.has(move.from_site) && at.has(move.to_site) &&
      s("path", { class: "move", d: arc(at.get(move.from_site), at.get(move.to_site)) },
        s("title", null, `a stream moved from ${move.from_site} to ${move.to_site}: ${move.cause}`))),
    placed.map((site) => {
      const load = site.inflight / Math.max(1, site.max_inflight);
      return s("g", null,
        s("circle", { class: `halo ${site.state}`, cx: x(site.place), cy: y(site.place), r: 9 + 26 * Math.min(1, load) }),
        s("circle", { class: site.state, cx: x(site.place), cy: y(site.place), r: labelled ? 7 : 4 },
          s("title", null, `${site.name}, ${site.place.city}: ${site.state}, ${site.inflight} of ${site.max_inflight} requests`)),
        labelled && s("text", { x: x(site.place) + 11, y: y(site.place) + 6 }, site.name));
    }),
    network.place && network.name === "router" && s("rect", { class: "router", x: x(network.place) - 6, y: y(network.place) - 6, width: 12, height: 12 },
      s("title", null, `this router, ${network.place.city}`)));
}

function arc(from, to) {
  const [x1, y1, x2, y2] = [x(from), y(from), x(to), y(to)];
  const lift = 0.18 * Math.hypot(x2 - x1, y2 - y1);
  return `M${x1} ${y1}Q${(x1 + x2) / 2} ${(y1 + y2) / 2 - lift} ${x2} ${y2}`;
}
