// Drafts in the live view: tokens per step and request, and the acceptance rate by drafter and position.

import { LineChart, ShareChart } from "./charts.js";

const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "none yet");
const nameOf = ({ drafter, place }) => `${drafter} ${place}`;

export class DraftCharts {
  constructor() {
    this.all = [
      new LineChart("Tokens per step and request", [["tokens", "ours"]], {
        top: 2,
        format: (value) => value.toFixed(1),
      }),
      new ShareChart("Accepted drafts by drafter and position"),
    ];
    for (const chart of this.all) chart.element.hidden = true;
  }

  /** `before` and `now`: draft totals, or null for engines without a drafter. */
  compare(time, before, now) {
    for (const chart of this.all) chart.element.hidden = !now;
    if (!now || !before) return;
    const [tokens, right] = this.all;
    const decodes = now.num_decodes - before.num_decodes;
    tokens.push(time, [decodes > 0 ? (now.num_tokens - before.num_tokens) / decodes : null]);
    const known = new Map(before.counts.map((one) => [nameOf(one), one]));
    const shares = {};
    for (const one of now.counts) {
      const was = known.get(nameOf(one)) ?? { num_drafted: 0, num_accepted: 0 };
      const drafted = one.num_drafted - was.num_drafted;
      if (drafted > 0) shares[nameOf(one)] = (one.num_accepted - was.num_accepted) / drafted;
    }
    right.push(time, shares);
  }
}

/** Tiles: [value, label]. */
export function draftTiles(drafts) {
  if (!drafts) return [];
  const sum = (name) => drafts.counts.reduce((total, one) => total + one[name], 0);
  const { num_decodes: decodes, num_tokens: tokens } = drafts;
  const each = decodes ? (tokens / decodes).toFixed(2) : "none yet";
  return [
    [each, "tokens per step and request"],
    [percent(sum("num_accepted"), sum("num_drafted")), "accepted drafts"],
  ];
}

export const DRAFT_HEAD = ["drafter", "position", "drafts", "accepted", "rate"];

export function draftRows({ counts }) {
  return counts.map((one) => [
    one.drafter,
    one.place,
    one.num_drafted.toLocaleString("en"),
    one.num_accepted.toLocaleString("en"),
    percent(one.num_accepted, one.num_drafted),
  ]);
}
