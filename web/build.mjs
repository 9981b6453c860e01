// Builds the files that servers send (penstock/serve/page/static/) from source/: one script and one
// style sheet that open the page, and others that are loaded on first use.
// `make page` runs it; with a folder as its argument it builds there.

import { createHash } from "node:crypto";
import { cp, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const source = join(here, "source");
const folder = process.argv[2] ?? join(here, "../penstock/serve/page/static");
// Long names that occur often in Temml, only as its own properties, and in no other file. A test
// compares what the result draws with what the published Temml draws.
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

/** marked creates an instance with its parser and renderers when it is loaded. The page draws
 * tokens itself, so only the code that makes tokens is kept: the classes before that instance. */
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
// Not a module: its frame has an opaque origin, which cannot load modules.
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

// Hashes of source and build: a test without these tools detects if only one of them was changed.
if (!process.argv[2]) {
  const record = { source: await hashes(source), static: await hashes(folder) };
  await writeFile(join(here, "built.json"), `${JSON.stringify(record, null, 1)}\n`);
}

/** Deletes the output of an earlier build, except licences. */
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
