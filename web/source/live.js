// The live view: the last two minutes of the server, from one event per second.

import { HistogramChart, LineChart } from "./charts.js";
import { count, make, seconds } from "./dom.js";
import { DRAFT_HEAD, DraftCharts, draftRows, draftTiles } from "./live_drafts.js";
import { EXPERT_HEAD, ExpertCharts, expertRows, expertTiles } from "./live_experts.js";
import { events } from "./server.js";

const RETRY_MS = 2000;
const share = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "none yet");
const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e9 ? 2 : 1)} GB`;
const MISSED = "missed_tokens_";
const REASONS = {
  no_prefix: "prefix not seen before",
  no_checkpoint: "pages cached, but no state checkpoint",
  evicted: "evicted from the cache",
  partial_page: "after the last full page",
  disabled: "prefix cache is off",
};

export class LiveView {
  constructor(element) {
    Object.assign(this, { element, before: null, controller: null });
    this.tiles = make("ul", { class: "tiles" });
    this.note = make("p", { class: "hint", role: "status" }, "Waiting for data …");
    this.charts = {
      speed: new LineChart(
        "Tokens per second",
        [
          ["generated", "ours"],
          ["prompt", "rival"],
        ],
        { top: 10 },
      ),
      requests: new LineChart(
        "Requests",
        [
          ["running", "ours"],
          ["waiting", "rival"],
        ],
        { top: 4 },
      ),
      cache: new LineChart(
        "Cache in use",
        [
          ["pages", "ours"],
          ["state slots", "goal"],
        ],
        { top: 100, format: (value) => `${Math.round(value)} %` },
      ),
      first: new HistogramChart("Time to first token", seconds),
      between: new HistogramChart("Inter-token latency", seconds),
      memory: new LineChart("Memory in use", [["fullest device", "ours"]], {
        top: 100,
        format: (value) => `${Math.round(value)} %`,
      }),
    };
    this.drafts = new DraftCharts();
    this.experts = new ExpertCharts();
    this.tables = make("div", { class: "charts" });
    const charts = [...Object.values(this.charts), ...this.drafts.all, ...this.experts.all];
    element.replaceChildren(
      make(
        "div",
        { class: "page" },
        make("h2", {}, "Live"),
        this.note,
        this.tiles,
        make("div", { class: "charts" }, ...charts.map((chart) => chart.element)),
        this.experts.maps,
        this.tables,
      ),
    );
    addEventListener("resize", () => this.draw());
  }

  setActive(isActive) {
    if (isActive && !this.controller) this.watch();
    else if (!isActive) {
      this.controller?.abort();
      this.controller = null;
    }
  }

  async watch() {
    const controller = (this.controller = new AbortController());
    while (!controller.signal.aborted) {
      try {
        for await (const event of events("live", {
          signal: controller.signal,
          endsWithDone: false,
        }))
          this.take(event);
      } catch (error) {
        if (error.name === "AbortError") return;
        this.note.textContent = `${error.message} Retrying.`;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  take(now) {
    const before = this.before;
    this.before = now;
    this.note.textContent = now.failure ? `The engine failed: ${now.failure}` : describe(now);
    // A restarted server counts from zero.
    if (before && now.generated_tokens >= before.generated_tokens && now.time > before.time)
      this.compare(before, now);
    this.experts.takeHeat(now.replicas);
    this.drawTables(now);
    this.draw();
  }

  compare(before, now) {
    const elapsed = now.time - before.time;
    const generated = (now.generated_tokens - before.generated_tokens) / elapsed;
    const prompts = (now.prompt_tokens - before.prompt_tokens) / elapsed;
    const { time, stats } = now;
    this.charts.speed.push(time, [generated, prompts]);
    for (const [chart, name] of [
      ["first", "first_token_s"],
      ["between", "inter_token_s"],
    ]) {
      this.charts[chart].bounds = now[name].bounds;
      this.charts[chart].push(time, newValues(before[name], now[name]));
    }
    if (!stats) return;
    const used = usage(stats);
    this.charts.requests.push(time, [stats.num_running, stats.num_waiting]);
    this.charts.cache.push(time, [100 * used.pages, 100 * used.slots]);
    const full = now.replicas.map((one) => one.memory_used / (one.memory_total || 1));
    this.charts.memory.push(time, [100 * Math.max(...full)]);
    this.drafts.compare(time, before.stats?.drafts, stats.drafts);
    this.experts.compare(time, before.stats, stats);
    const tile = ([value, about]) => make("li", {}, make("b", {}, value), make("span", {}, about));
    const tiles = [
      [count(generated), "generated tokens per second"],
      [count(prompts), "prompt tokens per second"],
      [String(stats.num_running), "running requests"],
      [String(stats.num_waiting), "waiting requests"],
      [share(used.pages, 1), "KV cache pages in use"],
      [share(used.slots, 1), "state slots in use"],
      [share(...hitRate(stats.prefix)), "prompt tokens from the prefix cache"],
      [count(stats.num_preemptions), "preemptions"],
      ...draftTiles(stats.drafts),
      ...expertTiles(before.stats, stats, elapsed),
    ];
    this.tiles.replaceChildren(...tiles.map(tile));
  }

  drawTables(now) {
    const { stats } = now;
    const table = (title, head, rows) =>
      make(
        "figure",
        {},
        make("figcaption", {}, title),
        make(
          "div",
          { class: "scroll", tabIndex: 0, role: "region", "aria-label": title },
          make(
            "table",
            {},
            make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))),
            make(
              "tbody",
              {},
              ...rows.map((row) =>
                make("tr", {}, ...row.map((cell) => make("td", {}, String(cell)))),
              ),
            ),
          ),
        ),
      );
    const parts = [
      table(
        "Engines",
        ["engine", "state", "requests", "memory in use", "restarts", "last problem"],
        now.replicas.map((one) => [
          one.replica,
          one.state,
          one.requests,
          one.memory_total
            ? `${gigabytes(one.memory_used)} of ${gigabytes(one.memory_total)}`
            : "unknown",
          one.restarts,
          one.problem ?? "none",
        ]),
      ),
    ];
    if (stats) {
      const missed = Object.entries(stats.prefix)
        .filter(([name, n]) => name.startsWith(MISSED) && n > 0)
        .map(([name, n]) => [
          count(n),
          REASONS[name.slice(MISSED.length)] ?? name.slice(MISSED.length).replaceAll("_", " "),
        ]);
      parts.push(
        table(
          "Computed prompt tokens by reason",
          ["tokens", "reason"],
          missed.length ? missed : [["0", "none computed yet"]],
        ),
      );
      parts.push(
        table(
          "Prefix cache and sessions",
          ["item", "count"],
          [
            [
              "pages in use",
              `${count(stats.num_pages - 1 - stats.num_free_pages)} of ${count(stats.num_pages - 1)}`,
            ],
            [
              "state slots in use",
              `${count(stats.num_slots - 1 - stats.num_free_slots)} of ${count(stats.num_slots - 1)}`,
            ],
            ["prompts with a cache hit", hitsOf(stats.prefix)],
            ["state checkpoints", count(stats.num_checkpoints)],
            ["evicted checkpoints", count(stats.prefix.evicted_checkpoints ?? 0)],
            ["evicted pages", count(stats.prefix.evicted_pages ?? 0)],
            ["sessions", count(stats.num_sessions)],
          ],
        ),
      );
      if (stats.drafts) parts.push(table("Drafts", DRAFT_HEAD, draftRows(stats.drafts)));
      const tiers = expertRows(stats);
      if (tiers.length) parts.push(table("Experts by tier", EXPERT_HEAD, tiers));
    }
    parts[0].classList.add("wide");
    this.tables.replaceChildren(...parts);
  }

  draw() {
    for (const charts of [Object.values(this.charts), this.drafts.all, this.experts.all])
      for (const chart of charts) chart.draw();
  }
}

function describe({ engine, model, phase }) {
  if (!engine) return `The model is still loading: ${phase?.name ?? "starting"}.`;
  return (
    `${model} on ${engine.device}, ${engine.dtype}: ${gigabytes(engine.weight_bytes)} of weights, ` +
    `${gigabytes(engine.cache_bytes)} of cache, up to ${count(engine.max_rows)} concurrent requests.`
  );
}

/** Fractions in use. One page and one slot are reserved for padding. */
function usage(stats) {
  const part = (free, all) => (all > 1 ? 1 - free / (all - 1) : 0);
  return {
    pages: part(stats.num_free_pages, stats.num_pages),
    slots: part(stats.num_free_slots, stats.num_slots),
  };
}

function hitsOf(prefix) {
  const misses = Object.entries(prefix).filter(([name]) => name.startsWith("miss_"));
  const looked = misses.reduce((sum, [, n]) => sum + n, prefix.hit ?? 0);
  return `${count(prefix.hit ?? 0)} of ${count(looked)}`;
}

function hitRate(prefix) {
  const reused = prefix.tokens_reused ?? 0;
  const missed = Object.entries(prefix).reduce(
    (sum, [name, n]) => sum + (name.startsWith(MISSED) ? n : 0),
    0,
  );
  return [reused, reused + missed];
}

/** New values per bucket, from two snapshots of cumulative counts. */
export function newValues(before, now) {
  const since = now.counts.map((n, place) => n - before.counts[place]);
  return since.map((n, place) => n - (since[place - 1] ?? 0));
}
