// Experts in the live view of an engine with MoE offload: in which tier steps found their experts, and
// how often each layer needs each of its experts.

import { HeatMap, LineChart } from "./charts.js";
import { make } from "./dom.js";

const HELD = 128; // this bit of a heat byte: the expert is on the device
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
      "Where the experts of a step were",
      TIERS.map(([name, role]) => [name, role]),
      { top: 100, format: (value) => `${Math.round(value)} %` },
    );
    this.tiers.element.hidden = true;
    this.all = [this.tiers];
    this.maps = make("div", { class: "charts" }); // one per engine
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

  /** Updates the heat map of each engine that reports one. */
  takeHeat(replicas) {
    for (const { replica, expert_heat: rows } of replicas) {
      if (!rows.length) continue;
      if (!this.mapOf.has(replica)) {
        const map = new HeatMap(`Experts of engine ${replica}`, [
          ["on the device", "ours"],
          ["not on the device", "rival"],
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

/** Tiles: [value, label]. */
export function expertTiles(before, now, elapsed) {
  if (!isOffloaded(now)) return [];
  const waited = isOffloaded(before) ? now.experts.wait_us - before.experts.wait_us : 0;
  const waitedMs = Math.round(Math.max(0, waited) / 1000 / elapsed);
  return [
    [percent(now.experts.hits, needed(now.experts)), "experts found on the device"],
    [`${waitedMs} ms`, "wait for experts per second"],
  ];
}

export const EXPERT_HEAD = ["tier", "experts", "share"];

export function expertRows(stats) {
  if (!isOffloaded(stats)) return [];
  const all = needed(stats.experts);
  return TIERS.map(([name, , key]) => {
    const found = stats.experts[key] ?? 0;
    return [name, found.toLocaleString("en"), percent(found, all)];
  });
}
