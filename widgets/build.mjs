// Bundles src/main.ts into nbdist/panel/static/panel.{js,css}: one self-contained module, because
// anywidget passes a single string to the front end. `--watch` rebuilds; `--dev` builds the dev page.
import { build, context } from "esbuild";

const watch = process.argv.includes("--watch");
const shared = { bundle: true, target: "es2022", logLevel: "warning" };
const panel = {
  ...shared,
  entryPoints: { panel: "src/main.ts" },
  outdir: "../nbdist/panel/static",
  format: "esm",
  minify: !watch,
  legalComments: "inline",
};
const page = {
  ...shared,
  entryPoints: { dev: "dev/dev.ts" },
  outdir: "dev/out",
  format: "iife", // a plain script, so that the page also opens from a file
};

if (process.argv.includes("--dev")) {
  await build(page);
} else if (watch) {
  await (await context(panel)).watch();
} else {
  await build(panel);
}
