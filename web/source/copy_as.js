// The page's requests as code: curl, Python, JavaScript.

import { button, byId, copyText, make } from "./dom.js";
import { apiKey, base } from "./server.js";

const shellQuoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const indented = (text, by) => text.replaceAll("\n", `\n${" ".repeat(by)}`);

function asPython(value, depth = 0) {
  const pad = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value))
    return value.length
      ? `[\n${value.map((one) => pad + asPython(one, depth + 1)).join(",\n")},\n${end}]`
      : "[]";
  if (typeof value !== "object") return JSON.stringify(value);
  const fields = Object.entries(value).map(
    ([name, one]) => `${pad}${JSON.stringify(name)}: ${asPython(one, depth + 1)}`,
  );
  return fields.length ? `{\n${fields.join(",\n")},\n${end}}` : "{}";
}

/** Code by language. The API key is an environment variable, so that it is not pasted somewhere. */
export function asCode(path, body) {
  const url = new URL(path, base).href;
  const data = JSON.stringify(body, null, 2);
  const key = apiKey() !== "";
  const wait = body.stream ? " -N" : "";
  return {
    curl:
      `curl${wait} ${url} \\\n  -H 'Content-Type: application/json' \\\n` +
      (key ? `  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\\n` : "") +
      `  -d ${shellQuoted(data)}\n`,
    Python:
      `import json\nimport os\nimport urllib.request\n\nbody = ${asPython(body)}\n` +
      `headers = {"Content-Type": "application/json"}\n` +
      (key ? `headers["Authorization"] = "Bearer " + os.environ["PENSTOCK_API_KEY"]\n` : "") +
      `request = urllib.request.Request(\n    ${JSON.stringify(url)}, json.dumps(body).encode(), headers\n)\n` +
      `with urllib.request.urlopen(request) as answer:\n    for line in answer:\n        print(line.decode(), end="")\n`,
    JavaScript:
      `const headers = { "Content-Type": "application/json" };\n` +
      (key ? `headers.Authorization = "Bearer " + process.env.PENSTOCK_API_KEY;\n` : "") +
      `const body = ${data};\nconst answer = await fetch(${JSON.stringify(url)}, {\n  method: "POST", headers, ` +
      `body: JSON.stringify(body),\n});\nfor await (const piece of answer.body.pipeThrough(new TextDecoderStream()))\n` +
      `  console.log(${indented("piece", 2)});\n`,
  };
}

export function showCopyAs(path, body) {
  const dialog = byId("copy-dialog");
  const code = asCode(path, body);
  const shown = make("pre", { tabIndex: 0 });
  let current = "curl";
  const choose = (name) => {
    current = name;
    shown.textContent = code[name];
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === name));
  };
  const tabs = Object.keys(code).map((name) => button(name, () => choose(name)));
  const copy = button("Copy", (event) => copyText(code[current], event.currentTarget), {
    class: "primary",
  });
  dialog.replaceChildren(
    make("h2", {}, "Request as code"),
    make("div", { class: "row" }, ...tabs),
    shown,
    make(
      "div",
      { class: "row end" },
      copy,
      button("Close", () => dialog.close()),
    ),
  );
  choose("curl");
  dialog.showModal();
}
