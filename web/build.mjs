// Makes the files that servers send (penstock/serve/page/static/) from source/: one script and one
// style sheet to open the page with, and others that are loaded when they are first needed.
// `make page` runs it; with a folder as its argument it builds there.

import { createHash } from "node:crypto";
import { cp, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const source = join(here, "source");
const folder = process.argv[2] ?? join(here, "../penstock/serve/page/static");
// Long names that Temml has often, uses as nothing but properties of its own, and that no other file
// has. A test compares what it draws with what the published one does.
const INSIDE_TEMML = [
  "allowedInArgument",
  "allowedInMath",
  "allowedInText",
  "alwaysHandleSupSub",
  "argTypes",
  "callFunction",
  "consumeSpaces",
  "envClasses",
  "funcName",
  "gullet",
  "isFollowedByDelimiter",
  "mathmlBuilder",
  "numArgs",
  "numOptionalArgs",
  "parentIsSupSub",
  "parseExpression",
  "popToken",
  "prevAtomType",
  "scriptLevel",
];
const LATER = ["maths.js", "languages.js"]; // with the first formula, and with the first code
const BANNER = "/*! Built from web/source of Penstock. Licences of libraries: vendor/ */";

/** marked makes an instance of itself when it is loaded, which has its parser and its renderers. The
 * page draws tokens itself, so only what makes tokens is kept: before that instance are classes. */
const onlyLexer = {
  name: "only marked's lexer",
  setup(build) {
    build.onLoad({ filter: /marked\.esm\.js$/ }, async ({ path }) => {
      const text = await readFile(path, "utf8");
      const exports = text.match(/export\{(.*)\};/)[1].split(",");
      const names = Object.fromEntries(exports.map((one) => one.split(" as ").reverse()));
      const instance = text.search(new RegExp(`var \\w+=new ${names.Marked};`));
      if (instance < 0) throw new Error("marked has changed: its own instance was not found.");
      const kept = `export{${names.Lexer} as Lexer,${names.getDefaults} as getDefaults};`;
      return { contents: text.slice(0, instance) + kept };
    });
  },
};

const shared = {
  absWorkingDir: source,
  outdir: folder,
  minify: true,
  target: "es2023",
  charset: "utf8",
  legalComments: "none",
  banner: { js: BANNER, css: BANNER },
};
await clear();
const { metafile } = await esbuild.build({
  ...shared,
  entryPoints: ["app.js", "app.css"],
  bundle: true,
  splitting: true,
  format: "esm",
  external: LATER.map((name) => `./${name}`),
  chunkNames: "[name]-[hash]",
  plugins: [onlyLexer],
  metafile: true,
});
await esbuild.build({
  ...shared,
  entryPoints: LATER,
  bundle: true,
  format: "esm",
  mangleProps: new RegExp(`^(?:${INSIDE_TEMML.join("|")})$`),
});
// No module: its frame has an origin of its own, from which a module could not be loaded.
await esbuild.build({ ...shared, entryPoints: ["sandbox.js"] });
for (const name of ["sandbox.html", "icon.svg"]) await cp(join(source, name), join(folder, name));

const [, app] = Object.entries(metafile.outputs).find(([, one]) => one.entryPoint === "app.js");
const needed = app.imports.filter((one) => one.kind === "import-statement");
const preloads = needed.map(
  ({ path }) => `<link rel="modulepreload" href="page/${path.split("/").pop()}">\n`,
);
const index = await readFile(join(source, "index.html"), "utf8");
const opened = index.replace("</head>", () => `${preloads.join("")}</head>`);
await writeFile(join(folder, "index.html"), opened);

// What was built of what: a test without these tools sees whether one was changed without the other.
if (!process.argv[2]) {
  const record = { source: await hashes(source), static: await hashes(folder) };
  await writeFile(join(here, "built.json"), `${JSON.stringify(record, null, 1)}\n`);
}

/** What an earlier build made; licences stay. */
async function clear() {
  await mkdir(folder, { recursive: true });
  for (const name of await readdir(folder)) if (name !== "vendor") await rm(join(folder, name));
}

async function hashes(root) {
  const found = {};
  for (const entry of await readdir(root, { recursive: true, withFileTypes: true })) {
    if (!entry.isFile()) continue;
    const path = join(entry.parentPath, entry.name);
    found[relative(root, path)] = createHash("sha256").update(await readFile(path)).digest("hex");
  }
  return Object.fromEntries(Object.entries(found).sort());
}
