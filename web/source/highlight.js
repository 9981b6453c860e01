// Syntax highlighting: the vendored tokenizer's tokens as spans. Loaded with the first complete code block.

import { make } from "./dom.js";

const ALIASES = {
  sh: "bash",
  shell: "bash",
  console: "bash",
  zsh: "bash",
  python: "py",
  python3: "py",
  javascript: "js",
  jsx: "js",
  mjs: "js",
  typescript: "ts",
  tsx: "ts",
  "c++": "c",
  cpp: "c",
  h: "c",
  cuda: "c",
  cs: "java",
  kotlin: "java",
  rust: "rs",
  golang: "go",
  yml: "yaml",
  dockerfile: "docker",
  makefile: "make",
  markdown: "md",
  svg: "xml",
  patch: "diff",
  jsonc: "json",
  jsonl: "json",
  htm: "html",
};
const MAX_CHARS = 60_000; // longer code is not highlighted
let loading = null;

async function load() {
  const { languages, tokenizeWith } = await import("./languages.js");
  const tokenize = (code, name, take) => tokenizeWith(code, languages[name], take, { languages });
  return { languages, tokenize };
}

/** Replaces the text of `element` by highlighted spans, asynchronously. */
export async function highlight(element, code, language) {
  const word = language.toLowerCase();
  const name = ALIASES[word] ?? word;
  if (!name || name === "plain" || code.length > MAX_CHARS) return;
  loading ??= load();
  const { languages, tokenize } = await loading;
  if (!Object.hasOwn(languages, name)) return;
  const spans = [];
  tokenize(
    code,
    name,
    (text, type) => text && spans.push(type ? make("span", { class: `hl-${type}` }, text) : text),
  );
  element.replaceChildren(...spans);
}
