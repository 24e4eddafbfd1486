import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { everyPanel } from './queries.mjs';
import { offSchema } from './schema.mjs';
import { offGrammar } from './traceql.mjs';

/** A generated board by its name, changed by a function. */
async function board(name, change) {
  const read = JSON.parse(await readFile(new URL(`../generated/${name}.json`, import.meta.url), 'utf8'));
  change(read);
  return { [name]: read };
}

function panel(of, title) {
  return everyPanel(of).find((one) => one.title === title);
}

test('TraceQL that the editor would underline', async () => {
  for (const [right, wrong] of [
    ['{ ', '{ && '],
    [' | select(', ' | selekt('],
    ['status = error', 'status == error'],
  ]) {
    const changed = await board('boards/kvobs-slow-loads', (of) => {
      const target = panel(of, 'Failed loads').targets[0];
      assert.ok(target.query.includes(right));
      target.query = target.query.replace(right, wrong);
    });
    const findings = offGrammar(changed);
    assert.equal(findings.length, 1, wrong);
    assert.match(findings[0], /^boards\/kvobs-slow-loads: Failed loads: no TraceQL from "/);
  }
});

/** Each change breaks one thing that the schema knows; the finding names the panel and the field. */
const BROKEN = [
  ['an option', (of) => (panel(of, 'Load duration by connector (p99; dashed: mean)').options.legend.calc = ['max']), /options: .*"calc"/],
  ['an option\'s value', (of) => (panel(of, 'Load duration by connector (p99; dashed: mean)').options.tooltip.mode = 'many'), /options: .*"many"/],
  ['a field', (of) => (panel(of, 'Load duration by connector (p99; dashed: mean)').fieldConfig.defaults.custom.lineWdith = 2), /fields: .*"lineWdith"/],
  ['a standard field', (of) => (panel(of, 'Firing alerts').fieldConfig.defaults.unitt = 's'), /fields: .*"unitt"/],
  ['a tile', (of) => (panel(of, 'Failure share').options.graphMod = 'none'), /options: .*"graphMod"/],
  ['a panel', (of) => (panel(of, 'Failure share').descripton = ''), /Failure share: .*"descripton"/],
  ['a variable', (of) => (of.templating.list[2].includeAl = true), /variable cluster: .*"includeAl"/],
  ['an annotation', (of) => (of.annotations.list[0].iconColour = 'red'), /annotation Alerts: .*"iconColour"/],
  ['a link', (of) => (of.links[0].keepTim = true), /the board: .*"keepTim"/],
];

for (const [what, change, finding] of BROKEN) {
  test(`the schema does not know ${what}`, async () => {
    const findings = offSchema(await board('boards/kvobs-overview', change));
    assert.equal(findings.length, 1, findings.join('\n'));
    assert.match(findings[0], finding);
  });
}

test('a panel whose options are not published may have none', async () => {
  const changed = await board('boards/kvobs-slow-loads', (of) => {
    panel(of, 'Trace of the chosen span').options.spanFilters = {};
  });
  const findings = offSchema(changed);
  assert.equal(findings.length, 1, findings.join('\n'));
  assert.match(findings[0], /Trace of the chosen span: options: /);
});

test('an override is checked by the path and the value of its field', async () => {
  const overridden = (path, value) =>
    board('boards/kvobs-overview', (of) => {
      const { overrides } = panel(of, 'Engines and connectors, worst first').fieldConfig;
      overrides[0].properties.push({ id: path, value });
    });
  assert.deepEqual(offSchema(await overridden('custom.cellOptions', { type: 'auto' })), []);
  for (const [path, value] of [
    ['custom.celOptions', { type: 'auto' }],
    ['custom.cellOptions', { type: 'automatic' }],
    ['custom.cellOptions.mode.x', 'basic'],
    ['decimal', 2],
    ['unit', 2],
  ]) {
    const findings = offSchema(await overridden(path, value));
    assert.equal(findings.length, 1, `${path}: ${findings.join('\n')}`);
    assert.ok(findings[0].includes(`worst first: override ${path}: `), findings[0]);
  }
});

/** What the command says of these files. */
function check(...paths) {
  const here = fileURLToPath(new URL('.', import.meta.url));
  return promisify(execFile)(process.execPath, ['check.mjs', ...paths], { cwd: here });
}

test('the command checks each board that it is given', async () => {
  const paths = ['kvobs-overview', 'kvobs-slow-loads'].map((uid) => `../generated/boards/${uid}.json`);
  const { stdout } = await check(...paths);
  assert.equal(stdout, '2 boards with 4 TraceQL queries: 0 findings\n');
});

test('the command names what it finds, and ends with 1', async (t) => {
  const folder = await mkdtemp(join(tmpdir(), 'boards-'));
  t.after(() => rm(folder, { recursive: true }));
  const [changed] = Object.values(await board('boards/kvobs-slow-loads', (of) => (of.refesh = '5s')));
  const path = join(folder, 'board.json');
  await writeFile(path, JSON.stringify(changed));
  await assert.rejects(check(path), ({ code, stdout, stderr }) => {
    assert.deepEqual([code, stdout], [1, '1 boards with 4 TraceQL queries: 1 findings\n']);
    return stderr.startsWith(`${path}: the board: `) && stderr.includes('"refesh"');
  });
});
