import assert from 'node:assert/strict';
import { test } from 'node:test';

import { indexRange, labelled, places } from './page/bars.js';

const near = (left, right) => assert.ok(Math.abs(left - right) < 1e-9, `${left} is not ${right}`);

for (const [groups, series] of [[1, 1], [1, 3], [2, 1], [16, 2], [5, 4]]) {
  test(`${series} bars in each of ${groups} groups`, () => {
    const bars = places(groups, series);
    assert.equal(bars.length, series);
    const [least, most] = indexRange(groups, series);
    for (let group = 0; group < groups; group++) {
      const begin = bars[0].begins[group];
      const end = bars.at(-1).begins[group] + bars.at(-1).sizes[group];
      near((begin + end) / 2, (group - least) / (most - least));
      for (let bar = 1; bar < series; bar++)
        assert.ok(bars[bar].begins[group] >= bars[bar - 1].begins[group] + bars[bar - 1].sizes[group], 'they overlap');
      if (group > 0) assert.ok(begin > bars.at(-1).begins[group - 1] + bars.at(-1).sizes[group - 1], 'groups touch');
      assert.ok(begin >= 0 && end <= 1 + 1e-9, 'outside');
    }
  });
}

test('labels that have no room are left out', () => {
  assert.deepEqual(labelled(4, 160, 40), [0, 1, 2, 3]);
  assert.deepEqual(labelled(5, 100, 40), [0, 3]);
  assert.deepEqual(labelled(3, 10, 40), [0]);
  assert.deepEqual(labelled(3, 10, undefined), [0, 1, 2]);
});
