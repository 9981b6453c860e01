// Experts in the live view, where the device does not hold all of them: which tier had those that
// steps needed, and how much each layer needs each of its experts.

import { HeatMap, LineChart } from "./charts.js";
import { make } from "./dom.js";

const HELD = 128; // in a byte of heat: the device holds the expert
const TIERS = [
  ["on the device", "ours", "hits"],
  ["in RAM", "goal", "ram_hits"],
  ["in files", "rival", "disk_reads"],
];
const percent = (part, whole) =>
  whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "none yet";
const needed = (experts) => experts.hits + experts.misses;
const isOffloaded = (stats) => stats?.experts.hits !== undefined;

export class ExpertCharts {
  constructor() {
    this.tiers = new LineChart(
      "Where a step's experts were",
      TIERS.map(([name, role]) => [name, role]),
      { top: 100, format: (value) => `${Math.round(value)} %` },
    );
    this.tiers.element.hidden = true;
    this.all = [this.tiers];
    this.maps = make("div", { class: "charts" }); // one for each engine
    this.mapOf = new Map();
  }

  compare(time, before, now) {
    this.tiers.element.hidden = !isOffloaded(now);
    if (!isOffloaded(now) || !isOffloaded(before)) return;
    const since = (name) => (now.experts[name] ?? 0) - (before.experts[name] ?? 0);
    const all = since("hits") + since("misses");
    this.tiers.push(
      time,
      TIERS.map(([, , name]) => (all > 0 ? (100 * since(name)) / all : null)),
    );
  }

  /** The heat of each engine that has told one. */
  takeHeat(replicas) {
    for (const { replica, expert_heat: rows } of replicas) {
      if (!rows.length) continue;
      if (!this.mapOf.has(replica)) {
        const map = new HeatMap(`Experts of engine ${replica}`, [
          ["on the device", "ours"],
          ["below it", "rival"],
        ]);
        this.mapOf.set(replica, map);
        this.maps.append(map.element);
        this.all.push(map);
      }
      this.mapOf.get(replica).rows = rows.map((row) =>
        Array.from(atob(row), (one) => {
          const byte = one.charCodeAt(0);
          return { heat: (byte & (HELD - 1)) / (HELD - 1), role: byte & HELD ? "ours" : "rival" };
        }),
      );
    }
  }
}

/** For tiles: [value, what it is]. */
export function expertTiles(before, now, elapsed) {
  if (!isOffloaded(now)) return [];
  const waited = isOffloaded(before) ? now.experts.wait_us - before.experts.wait_us : 0;
  const waitedMs = Math.round(Math.max(0, waited) / 1000 / elapsed);
  return [
    [percent(now.experts.hits, needed(now.experts)), "of experts were on the device"],
    [`${waitedMs} ms`, "of a second steps wait for experts"],
  ];
}

export const EXPERT_HEAD = ["tier", "experts found", "share"];

export function expertRows(stats) {
  if (!isOffloaded(stats)) return [];
  const all = needed(stats.experts);
  return TIERS.map(([name, , key]) => {
    const found = stats.experts[key] ?? 0;
    return [name, found.toLocaleString("en"), percent(found, all)];
  });
}
