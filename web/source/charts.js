// Canvas charts of the last two minutes: lines, histograms as shaded columns, and heat maps.

import { make } from "./dom.js";

export const SPAN_S = 120;
const LEFT = 52,
  BOTTOM = 18,
  TOP = 8,
  RIGHT = 4;
const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

class Chart {
  constructor(title, key = []) {
    this.points = []; // [time, values]
    this.canvas = make("canvas", { role: "img", "aria-label": title });
    this.title = title;
    const marks = key.map(([name, role]) => {
      const mark = make("i");
      mark.style.background = `var(--${role})`;
      return make("span", {}, mark, name);
    });
    this.element = make(
      "figure",
      {},
      make("figcaption", {}, title),
      this.canvas,
      make("div", { class: "key" }, ...marks),
    );
  }

  push(time, values) {
    this.points.push([time, values]);
    while (this.points[0][0] < time - SPAN_S) this.points.shift();
  }

  /** Clears the canvas and scales it to CSS pixels. */
  begin() {
    const { canvas } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return null;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.font = `11px ${colour("font")}`;
    pen.fillStyle = colour("quiet");
    const now = this.points.at(-1)?.[0] ?? 0;
    const x = (time) => LEFT + ((time - now + SPAN_S) / SPAN_S) * (width - LEFT - RIGHT);
    pen.textAlign = "center";
    for (const ago of [120, 60, 0]) {
      const place = Math.min(width - 14, Math.max(LEFT + 18, x(now - ago)));
      pen.fillText(ago ? `${ago} s ago` : "now", place, height - 4);
    }
    pen.textAlign = "right";
    return { pen, width, height, x, bottom: height - BOTTOM };
  }
}

export class LineChart extends Chart {
  /** `series`: [name, color role]; `top`: the minimum of the upper end of the axis. */
  constructor(title, series, { top = 1, format = (value) => value.toLocaleString("en") } = {}) {
    super(title, series);
    Object.assign(this, { series, top, format });
  }

  draw() {
    const area = this.begin();
    if (!area) return;
    const { pen, width, x, bottom } = area;
    const most = niceCeiling(
      Math.max(this.top, ...this.points.flatMap(([, values]) => values.filter(Number.isFinite))),
    );
    const y = (value) => bottom - (value / most) * (bottom - TOP);
    for (const share of [0, 0.5, 1]) {
      pen.fillText(this.format(most * share), LEFT - 6, y(most * share) + 4);
      pen.strokeStyle = colour("hair");
      pen.beginPath();
      pen.moveTo(LEFT, y(most * share));
      pen.lineTo(width - RIGHT, y(most * share));
      pen.stroke();
    }
    this.series.forEach(([, role], place) => {
      pen.strokeStyle = colour(role);
      pen.lineWidth = 1.75;
      pen.lineJoin = "round";
      pen.beginPath();
      for (const [time, values] of this.points)
        if (Number.isFinite(values[place])) pen.lineTo(x(time), y(values[place]));
      pen.stroke();
    });
    const last = this.points.at(-1)?.[1] ?? [];
    const said = this.series.map(([name], place) => `${name} ${this.format(last[place] ?? 0)}`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

/** Columns are seconds, rows are buckets; the shade is the share of values in a bucket. */
export class HistogramChart extends Chart {
  constructor(title, format) {
    super(title);
    this.format = format;
    this.bounds = [];
  }

  draw() {
    const area = this.begin();
    if (!area) return;
    const { pen, width, x, bottom } = area;
    const rows = this.bounds.length + 1;
    const height = (bottom - TOP) / rows;
    this.bounds.forEach((bound, place) => {
      if (place % 3 === 0)
        pen.fillText(this.format(bound), LEFT - 6, bottom - (place + 1) * height + 4);
    });
    const column = Math.max(2, (width - LEFT - RIGHT) / SPAN_S);
    pen.fillStyle = colour("ours");
    for (const [time, counts] of this.points) {
      const total = counts.reduce((sum, n) => sum + n, 0);
      counts.forEach((n, row) => {
        if (!n) return;
        pen.globalAlpha = 0.15 + 0.85 * (n / total);
        pen.fillRect(x(time) - column, bottom - (row + 1) * height, column + 0.5, height - 0.5);
      });
    }
    pen.globalAlpha = 1;
  }
}

/** Columns are seconds, rows are names; the shade is a share between 0 and 1. */
export class ShareChart extends Chart {
  draw() {
    const area = this.begin();
    if (!area) return;
    const { pen, width, x, bottom } = area;
    const names = [...new Set(this.points.flatMap(([, shares]) => Object.keys(shares)))];
    names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const height = (bottom - TOP) / Math.max(4, names.length);
    const column = Math.max(2, (width - LEFT - RIGHT) / SPAN_S);
    const said = names.map((name, row) => {
      const top = TOP + row * height;
      pen.fillStyle = colour("quiet");
      pen.fillText(name, LEFT - 6, top + height / 2 + 4);
      pen.fillStyle = colour("ours");
      let last = 0;
      for (const [time, shares] of this.points) {
        if (shares[name] === undefined) continue;
        last = shares[name];
        pen.globalAlpha = 0.08 + 0.92 * last;
        pen.fillRect(x(time) - column, top, column + 0.5, height - 1);
      }
      pen.globalAlpha = 1;
      return `${name} ${Math.round(100 * last)} %`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

/** Current state: rows are layers, columns are experts; the shade is how often the layer needs one. */
export class HeatMap extends Chart {
  constructor(title, key) {
    super(title, key);
    this.rows = []; // rows of {heat, role}
    this.element.classList.add("wide");
    this.element.append(
      make("p", { class: "hint" }, "Rows are layers, columns are experts; a stronger color means needed more often."),
    );
  }

  draw() {
    const { canvas, rows } = this;
    const width = canvas.clientWidth;
    if (!width || !rows.length) return;
    const height = Math.max(4, Math.min(14, Math.floor(420 / rows.length)));
    canvas.style.height = `${rows.length * height}px`;
    canvas.width = width * devicePixelRatio;
    canvas.height = rows.length * height * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    const most = rows.flat().reduce((found, { heat }) => Math.max(found, heat), 0) || 1;
    const roles = { ours: colour("ours"), rival: colour("rival") };
    let held = 0;
    rows.forEach((row, layer) => {
      const column = width / row.length;
      row.forEach(({ heat, role }, expert) => {
        held += role === "ours";
        pen.fillStyle = roles[role];
        pen.globalAlpha = (role === "ours" ? 0.12 : 0) + 0.88 * (heat / most);
        pen.fillRect(expert * column, layer * height, Math.max(1, column - 0.5), height - 1);
      });
    });
    const all = rows.reduce((sum, row) => sum + row.length, 0);
    const said = `${rows.length} layers; ${held} of ${all} experts are on the device`;
    canvas.setAttribute("aria-label", `${this.title}: ${said}`);
  }
}

export function niceCeiling(value) {
  const scale = 10 ** Math.floor(Math.log10(value));
  return (
    [1, 2, 4, 6, 8, 10].map((digit) => digit * scale).find((one) => one >= value * 0.999) ?? value
  );
}
