// Builds web/dist from web/src: the same bytes wherever it runs, names by content, no source maps.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const LIMIT = 150 * 1024;
const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, "dist");

const options = {
  absWorkingDir: here,
  bundle: true,
  minify: true,
  write: false,
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
};
const script = await build({
  ...options,
  entryPoints: ["src/main.tsx"],
  format: "esm",
  jsx: "automatic",
  jsxImportSource: "preact",
  define: { "process.env.NODE_ENV": '"production"' },
});
const style = await build({ ...options, entryPoints: ["src/style.css"] });

// The licences ask that the notices stay with the code.
const packages = ["preact", "@preact/signals", "@preact/signals-core", "uplot", "marked", "dompurify"];
const notices = packages.map((name) => {
  const root = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  const text = readFileSync(join(root, "LICENSE"), "utf8").replaceAll("\r\n", "\n").trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
});

rmSync(dist, { recursive: true, force: true });
mkdirSync(join(dist, "assets"), { recursive: true });
const files = new Map();

function asset(name, ending, content) {
  const hash = createHash("sha256").update(content).digest("hex").slice(0, 8);
  const path = `assets/${name}-${hash}.${ending}`;
  files.set(path, Buffer.from(content));
  return path;
}

const paths = {
  SCRIPT: asset("page", "js", script.outputFiles[0].contents),
  STYLE: asset("page", "css", style.outputFiles[0].contents),
  ICON: asset("icon", "svg", readFileSync(join(here, "src/icon.svg"))),
};
files.set("assets/licenses.txt", Buffer.from(notices.join(`\n${"-".repeat(80)}\n\n`)));
const html = readFileSync(join(here, "src/index.html"), "utf8").replace(/%(\w+)%/g, (_, name) => paths[name]);
files.set("index.html", Buffer.from(html));

let total = 0;
for (const [path, content] of files) {
  writeFileSync(join(dist, path), content);
  const size = gzipSync(content, { level: 9 }).length;
  total += size;
  console.log(`${String(size).padStart(8)}  ${path}`);
}
console.log(`${String(total).padStart(8)}  bytes of gzip in all, of ${LIMIT}`);
if (total > LIMIT) {
  console.error("web/dist is larger than it may be");
  process.exit(1);
}
