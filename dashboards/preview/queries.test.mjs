import assert from 'node:assert/strict';
import { createServer } from 'node:http';
import { test } from 'node:test';

import { Prometheus, interpolate, panelAnswers, seconds, variables } from './queries.mjs';

/** A Prometheus that gives the same answer to everything and keeps what it was asked. */
async function fake(t, data) {
  const asked = [];
  const server = createServer(async (request, response) => {
    let body = '';
    for await (const part of request) body += part;
    asked.push({ path: request.url, ...Object.fromEntries(new URLSearchParams(body)) });
    response.end(JSON.stringify(data));
  }).listen(0, '127.0.0.1');
  await new Promise((resolve) => server.once('listening', resolve));
  t.after(() => server.close());
  return { asked, prometheus: new Prometheus(`http://127.0.0.1:${server.address().port}/`) };
}

const EMPTY = { status: 'success', data: { resultType: 'matrix', result: [] } };

test('durations', () => {
  assert.equal(seconds('1h30m'), 5400);
  assert.equal(seconds('500ms'), 0.5);
  for (const wrong of ['', '15', '5 minutes', 'x5s']) assert.throws(() => seconds(wrong), /is no duration/);
});

test('variables in an expression', () => {
  const values = { job: '.+', child: ['cpu', 'n.ixl'], one: ['a'] };
  assert.equal(interpolate('x{job=~"$job",c=~"${child:regex}"}', values), 'x{job=~".+",c=~"(cpu|n\\\\.ixl)"}');
  assert.equal(interpolate('$one [[one]] ${one} $jobs $', values), 'a a a $jobs $');
});

test("a board's choices: the command line, the default, all", async () => {
  const list = [
    { name: 'job', type: 'query', includeAll: true, allValue: '.+', multi: true, current: { value: ['$__all'] } },
    { name: 'connector', type: 'query', includeAll: true, multi: true, current: { value: ['cpu'] } },
    { name: 'slo', type: 'custom', query: '0.5, 1' },
    { name: 'filters', type: 'adhoc' },
  ];
  const board = { uid: 'b', templating: { list } };
  assert.deepEqual(await variables(board, null, {}, {}), { job: '.+', connector: ['cpu'], slo: '0.5' });
  const chosen = { job: 'a,b', slo: '1' };
  assert.deepEqual(await variables(board, null, {}, chosen), { job: ['a', 'b'], connector: ['cpu'], slo: '1' });
  await assert.rejects(
    variables(board, null, {}, { jbo: 'a' }),
    /no variable "jbo"; it has job, connector, slo, filters/,
  );
});

test("the step is Grafana's: of the range and width, no less than the least interval, at its multiples", async (t) => {
  const { asked, prometheus } = await fake(t, EMPTY);
  const target = { refId: 'A', expr: 'rate(x[$__rate_interval]) / $__range_s' };
  const panel = {
    id: 1,
    gridPos: { w: 12 },
    targets: [target, { ...target, interval: '2m' }, { ...target, hide: true }],
  };
  await panelAnswers({ panels: [{ panels: [panel] }] }, {}, prometheus, { from: 1001, to: 4601 }, 15);
  assert.deepEqual(
    asked.sort((left, right) => left.step - right.step),
    [
      { path: '/api/v1/query_range', query: 'rate(x[60s]) / 3600', start: '990', end: '4590', step: '15' },
      { path: '/api/v1/query_range', query: 'rate(x[480s]) / 3600', start: '960', end: '4560', step: '120' },
    ],
  );
});

test('an error is part of the answer, and what is no Prometheus is named', async (t) => {
  const { prometheus } = await fake(t, { status: 'error', error: 'parse error' });
  const panel = { id: 7, targets: [{ refId: 'A', expr: '(' }] };
  const answers = await panelAnswers({ panels: [panel] }, {}, prometheus, { from: 0, to: 60 }, 15);
  assert.equal(answers[7][0].error, 'parse error');
  await assert.rejects(
    new Prometheus('http://127.0.0.1:1').ask('query', {}),
    /No Prometheus answers at http:\/\/127.0.0.1:1/,
  );
});

test('exemplars are thinned as Grafana thins them', async (t) => {
  const exemplar = (timestamp, value) => ({ timestamp, value: `${value}`, labels: {} });
  const near = Array.from({ length: 50 }, (_, index) => exemplar(30 + index / 100, 1 + index / 1000));
  const { prometheus } = await fake(t, {
    status: 'success',
    data: [{ exemplars: [...near, exemplar(31, 100), exemplar(70, 1)] }],
  });
  const panel = { id: 1, targets: [{ refId: 'A', expr: 'x', exemplar: true }] };
  const answers = await panelAnswers({ panels: [panel] }, {}, prometheus, { from: 0, to: 90 }, 15);
  const kept = answers[1][0].exemplars.map(({ value }) => value).sort((left, right) => left - right);
  assert.deepEqual(kept, [1, 1.049, 100]);
});
