// The newest state of the network, from the feed. Its size is limited, however long the tab stays open.

import { byName } from "./words.js";

const MAX_SECONDS = 300, MAX_MOVES = 100, MAX_DECISIONS = 200;

export const network = { name: "", place: null, version: "", at: 0, sites: [], samples: [], moves: [], decisions: [], num_moves: 0 };
const rows = new Map();
const watchers = new Set();
let source = null, isDown = false;

export const watch = (watcher) => { watchers.add(watcher); return () => watchers.delete(watcher); };

export function connect(onState, onFirst) {
  source?.close();
  let isFirst = true;
  source = new EventSource("page/feed");
  source.addEventListener("whole", (event) => { rows.clear(); network.moves = []; network.decisions = []; take(JSON.parse(event.data), true); onState("live"); if (isFirst) onFirst(); isFirst = false; refill(); });
  source.addEventListener("second", (event) => take(JSON.parse(event.data), false));
  source.onerror = () => {
    isDown = true;
    onState(source.readyState === EventSource.CLOSED ? "closed" : "lost");
  };
  source.onopen = () => { isDown = false; };
}

export const disconnect = () => source?.close();

function take(data, isWhole) {
  if (isWhole) Object.assign(network, { name: data.name, place: data.place, version: data.version });
  network.at = data.at;
  for (const site of data.sites) rows.set(site.name, site);
  for (const name of data.gone) rows.delete(name);
  if (data.sites.length || data.gone.length) network.sites = [...rows.values()].sort(byName);
  if (data.sample) network.samples = [...network.samples, data.sample].slice(-MAX_SECONDS);
  const moves = data.moves.map((move) => ({ ...move, seen_ms: isWhole ? -1e9 : performance.now() }));
  network.moves = [...network.moves, ...moves].slice(-MAX_MOVES);
  network.num_moves = network.moves.at(-1)?.number ?? network.num_moves;
  network.decisions = [...network.decisions, ...data.decisions].slice(-MAX_DECISIONS);
  if (!isDown && !document.hidden) for (const watcher of watchers) watcher();
}

async function refill() {
  network.samples = (await history("5m")) ?? network.samples;
}

export async function history(range) {
  const answer = await fetch(`page/history?range=${range}`);
  return answer.ok ? (await answer.json()).samples : null;
}

export function models() {
  // Return every model of the network: its name, and its state at each site.
  const found = new Map();
  for (const site of network.sites) {
    for (const model of site.models) {
      if (!found.has(model.name)) found.set(model.name, { name: model.name, at: [] });
      found.get(model.name).at.push({ site: site.name, ...model });
    }
  }
  return [...found.values()].sort(byName);
}
