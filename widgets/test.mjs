// Runs the tests with Node's own test runner. esbuild compiles them to JavaScript first, because the
// oldest supported Node does not read TypeScript.
import { spawnSync } from "node:child_process";
import { readdirSync, rmSync } from "node:fs";
import { build } from "esbuild";

const outdir = "node_modules/.tests";
rmSync(outdir, { recursive: true, force: true });
const entryPoints = readdirSync("test")
  .filter((name) => name.endsWith(".test.ts"))
  .map((name) => `test/${name}`);
await build({
  entryPoints,
  outdir,
  bundle: true,
  platform: "node",
  format: "esm",
  target: "node20",
  external: ["jsdom"],
  loader: { ".css": "empty" },
  outExtension: { ".js": ".mjs" },
  logLevel: "warning",
});
const files = readdirSync(outdir).filter((name) => name.endsWith(".mjs")).map((name) => `${outdir}/${name}`);
// A failed test leaves its panel's timer running, which keeps the process alive.
const ended = spawnSync(process.execPath, ["--test", ...files], { stdio: "inherit", timeout: 120_000 });
process.exit(ended.status ?? 1);
