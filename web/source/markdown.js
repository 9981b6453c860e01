// Markdown as elements. marked splits the text into tokens, each of which becomes an element here. Nothing is
// ever parsed as HTML: tags in a model's output are shown as text.

import { copyText, button, make } from "./dom.js";
import { highlight } from "./highlight.js";
import { Lexer, getDefaults } from "marked";

function blockMath(text) {
  const found = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])(?:\n|$)/.exec(text);
  return found ? { type: "blockMath", raw: found[0], text: found[1] ?? found[2] } : undefined;
}

function inlineMath(text) {
  // A price such as $5 is no formula: no space inside the dollar signs, no digit after them.
  const found =
    /^(?:\$\$([^$]+?)\$\$|\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\(([^]+?)\\\)|\\\[([^]+?)\\\])/.exec(
      text,
    );
  if (!found) return undefined;
  const isBlock = found[1] !== undefined || found[4] !== undefined;
  return {
    type: isBlock ? "blockMath" : "inlineMath",
    raw: found[0],
    text: found.slice(1).find(Boolean),
  };
}

// In marked's own format: tokenizers, and where a token may start.
const options = {
  ...getDefaults(),
  extensions: {
    block: [blockMath],
    startBlock: [(text) => text.match(/\$\$|\\\[/)?.index],
    inline: [inlineMath],
    startInline: [(text) => text.match(/\$|\\\(|\\\[/)?.index],
  },
};

const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  reg: "®",
  hellip: "…",
  mdash: "—",
  ndash: "–",
  times: "×",
  middot: "·",
  rarr: "→",
  larr: "←",
  le: "≤",
  ge: "≥",
  ne: "≠",
  deg: "°",
  euro: "€",
};
const decoded = (text) =>
  text.replace(/&(?:#x([0-9a-f]{1,6})|#(\d{1,7})|(\w{2,8}));/gi, (whole, hex, decimal, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = parseInt(hex ?? decimal, hex ? 16 : 10);
    return code && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });

/** The URL if opening it cannot run code, or null: such links are shown as text. */
export function safeAddress(href) {
  try {
    const url = new URL(href, "https://relative.invalid/");
    const isKnown =
      ["https:", "http:", "mailto:"].includes(url.protocol) && url.hostname !== "relative.invalid";
    return isKnown || url.protocol === "mailto:" ? url.href : null;
  } catch {
    return null;
  }
}

let maths = null;
async function drawMath(element, source, isBlock) {
  maths ??= import("./maths.js");
  try {
    const { treeOf } = await maths;
    element.replaceChildren(treeOf(source, isBlock).toNode());
  } catch {
    element.classList.add("math-source"); // the source is already its text
  }
}

function mathElement(token) {
  const isBlock = token.type === "blockMath";
  const element = make(
    isBlock ? "div" : "span",
    { class: isBlock ? "math-block" : "math" },
    token.raw.trim(),
  );
  drawMath(element, token.text.trim(), isBlock);
  return element;
}

function codeOf(token, isComplete) {
  const language = (token.lang ?? "").split(/\s/)[0].slice(0, 30);
  const code = make("code", {}, token.text);
  if (isComplete && language) highlight(code, token.text, language);
  const copy = button("Copy", (event) => copyText(token.text, event.currentTarget), {
    class: "quiet",
  });
  const head = make("figcaption", {}, make("span", {}, language || "text"), copy);
  return make("figure", { class: "code" }, head, make("pre", { tabIndex: 0 }, code));
}

function tableOf(token) {
  const cells = (row, tag) =>
    row.map((cell, place) =>
      make(
        tag,
        { class: token.align[place] && `to-${token.align[place]}` },
        ...inline(cell.tokens),
      ),
    );
  const head = make("thead", {}, make("tr", {}, ...cells(token.header, "th")));
  const body = make("tbody", {}, ...token.rows.map((row) => make("tr", {}, ...cells(row, "td"))));
  return make(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" },
    make("table", {}, head, body),
  );
}

function listOf(token, isComplete) {
  const items = token.items.map((item) => {
    const box = item.task
      ? make("input", {
          type: "checkbox",
          checked: item.checked,
          disabled: true,
          "aria-label": "Done",
        })
      : null;
    return make(
      "li",
      {},
      box,
      ...blocks(
        item.tokens.filter((one) => one.type !== "checkbox"),
        isComplete,
        item.loose,
      ),
    );
  });
  const first = token.ordered && token.start !== 1 ? { start: token.start } : {};
  return make(token.ordered ? "ol" : "ul", first, ...items);
}

function linkOf(token) {
  const inside =
    token.type === "image" ? [`[image: ${token.text || token.href}]`] : inline(token.tokens);
  const href = safeAddress(token.href);
  if (!href) return make("span", {}, ...inside);
  return make(
    "a",
    { href, target: "_blank", rel: "noopener noreferrer nofollow", title: token.title ?? href },
    ...inside,
  );
}

function inline(tokens = []) {
  return tokens.flatMap((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return [make(token.type, {}, ...inline(token.tokens))];
      case "codespan":
        return [make("code", {}, token.text)];
      case "br":
        return [make("br")];
      case "link":
      case "image":
        return [linkOf(token)];
      case "inlineMath":
      case "blockMath":
        return [mathElement(token)];
      case "html":
        return [/^<br\s*\/?>$/i.test(token.raw) ? make("br") : token.raw];
      default:
        return token.tokens ? inline(token.tokens) : [decoded(token.text ?? token.raw)];
    }
  });
}

function blocks(tokens, isComplete = true, isLoose = true) {
  return tokens.flatMap((token) => {
    switch (token.type) {
      case "space":
      case "def":
        return [];
      case "heading":
        return [make(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens))];
      case "paragraph":
        return [make("p", {}, ...inline(token.tokens))];
      case "text":
        return isLoose && token.tokens ? [make("p", {}, ...inline(token.tokens))] : inline([token]);
      case "code":
        return [codeOf(token, isComplete)];
      case "blockquote":
        return [make("blockquote", {}, ...blocks(token.tokens, isComplete))];
      case "list":
        return [listOf(token, isComplete)];
      case "table":
        return [tableOf(token)];
      case "hr":
        return [make("hr")];
      case "html":
        return [make("p", { class: "as-written" }, token.raw.trimEnd())];
      case "blockMath":
        return [mathElement(token)];
      default:
        return [make("p", {}, ...inline([token]))];
    }
  });
}

/** Renders a growing text: blocks that can no longer change are kept, only the last ones are rebuilt. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.settled = 0; // characters of the blocks that are kept
    this.numElements = 0;
    this.element.replaceChildren();
  }

  show(written, isComplete = true) {
    const text = written.replace(/\r\n?/g, "\n"); // as marked normalizes line ends
    const tokens = new Lexer(options).lex(text.slice(this.settled));
    const numSettled = isComplete ? tokens.length : Math.max(0, tokens.length - 2);
    while (this.element.childNodes.length > this.numElements) this.element.lastChild.remove();
    const stay = blocks(tokens.slice(0, numSettled));
    this.element.append(...stay, ...blocks(tokens.slice(numSettled), false));
    this.numElements += stay.length;
    for (const token of tokens.slice(0, numSettled)) this.settled += token.raw.length;
  }
}
