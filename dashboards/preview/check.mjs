/**
 * Check boards by what Grafana publishes: TraceQL by the grammar of its editor, fields by the types of its schema.
 *
 *     node check.mjs ../generated/boards/*.json
 *
 * It prints each finding, and ends with 1 if there is one.
 */
import { readFile } from 'node:fs/promises';

import { offSchema } from './schema.mjs';
import { offGrammar, traceqlQueries } from './traceql.mjs';

const paths = process.argv.slice(2);
if (paths.length === 0) {
  console.error('No board was named. Use: node check.mjs BOARD.json...');
  process.exit(2);
}
const read = paths.map(async (path) => [path, JSON.parse(await readFile(path, 'utf8'))]);
const boards = Object.fromEntries(await Promise.all(read));
const findings = [...offGrammar(boards), ...offSchema(boards)];
for (const finding of findings) console.error(finding);
const queries = Object.values(boards).flatMap(traceqlQueries).length;
console.log(`${paths.length} boards with ${queries} TraceQL queries: ${findings.length} findings`);
process.exitCode = findings.length === 0 ? 0 : 1;
