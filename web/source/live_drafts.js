// Drafts in the live view: how many tokens a step brings, and how many drafts are right, by drafter
// and place.

import { LineChart, ShareChart } from "./charts.js";

const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "none yet");
const nameOf = ({ drafter, place }) => `${drafter} ${place}`;

export class DraftCharts {
  constructor() {
    this.all = [
      new LineChart("Tokens a step brings a request", [["tokens", "ours"]], {
        top: 2,
        format: (value) => value.toFixed(1),
      }),
      new ShareChart("Drafts that were right, by drafter and place"),
    ];
    for (const chart of this.all) chart.element.hidden = true;
  }

  /** `before` and `now`: totals of an engine that drafts, or null. */
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

/** For tiles: [value, what it is]. */
export function draftTiles(drafts) {
  if (!drafts) return [];
  const sum = (name) => drafts.counts.reduce((total, one) => total + one[name], 0);
  const { num_decodes: decodes, num_tokens: tokens } = drafts;
  const each = decodes ? (tokens / decodes).toFixed(2) : "none yet";
  return [
    [each, "tokens a step brought a request"],
    [percent(sum("num_accepted"), sum("num_drafted")), "of drafts were right"],
  ];
}

export const DRAFT_HEAD = ["drafter", "place", "drafted", "right", "share"];

export function draftRows({ counts }) {
  return counts.map((one) => [
    one.drafter,
    one.place,
    one.num_drafted.toLocaleString("en"),
    one.num_accepted.toLocaleString("en"),
    percent(one.num_accepted, one.num_drafted),
  ]);
}
