// Colours for code: the vendored tokenizer's pieces as spans. Loaded when the first code block is complete.

import { make } from "./dom.js";

const NAMES = [
  "bash",
  "c",
  "css",
  "diff",
  "docker",
  "go",
  "html",
  "ini",
  "java",
  "js",
  "jsdoc",
  "json",
  "lua",
  "make",
  "md",
  "plain",
  "py",
  "regex",
  "rs",
  "sql",
  "todo",
  "toml",
  "ts",
  "uri",
  "xml",
  "yaml",
];
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
const MAX_CHARS = 60_000; // longer code is shown plain rather than late
let loading = null;

async function load() {
  const [{ tokenizeWith }, ...found] = await Promise.all([
    import("./vendor/highlight/tokenize.js"),
    ...NAMES.map((name) => import(`./vendor/highlight/${name}.js`)),
  ]);
  const languages = Object.fromEntries(NAMES.map((name, place) => [name, found[place].default]));
  return (code, name, take) => tokenizeWith(code, languages[name], take, { languages });
}

/** Replaces the text of `element`, soon. */
export async function highlight(element, code, language) {
  const word = language.toLowerCase();
  const name = ALIASES[word] ?? word;
  if (!NAMES.includes(name) || name === "plain" || code.length > MAX_CHARS) return;
  loading ??= load();
  const tokenize = await loading;
  const spans = [];
  tokenize(
    code,
    name,
    (text, type) => text && spans.push(type ? make("span", { class: `hl-${type}` }, text) : text),
  );
  element.replaceChildren(...spans);
}
