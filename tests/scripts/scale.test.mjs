import assert from "node:assert/strict";
import {test} from "node:test";
import {firstAfter, ticks, words} from "../../src/trimtab/render/html/assets/js/scale.mjs";

test("seconds are said in the unit that fits", () => {
  const said = [[0, "0 s"], [2.5e-6, "2.5 µs"], [0.0125, "12.5 ms"], [0.9999, "1.0 s"], [59.94, "59.9 s"], [599.96, "10 min 00 s"],
    [754, "12 min 34 s"], [7199.4, "119 min 59 s"], [7200, "2 h 00 min"], [-3, "-3.0 s"]];
  for (const [seconds, text] of said) assert.equal(words(seconds), text);
});

test("ticks are round, in order, within the range and no more than wanted", () => {
  for (const span of [0.003, 0.7, 4, 61, 590, 4000, 90000, 4e6]) {
    for (const from of [0, span * 0.37, span * 11]) {
      const found = ticks(from, from + span, 8), times = found.map(([at]) => at);
      assert.ok(found.length >= 1 && found.length <= 9, `${span} has ${found.length}`);
      assert.deepEqual(times, [...times].sort((a, b) => a - b));
      assert.ok(times.every((at) => at >= from - span * 1e-6 && at <= from + span * (1 + 1e-6)));
      assert.equal(new Set(found.map(([, label]) => label)).size, found.length, "labels differ");
    }
  }
});

test("the first value after a moment is that of a plain search", () => {
  const values = [1, 1, 2, 5, 5, 9];
  for (let at = 0; at < 11; at += 0.5) {
    const plain = values.findIndex((value) => value > at);
    assert.equal(firstAfter(values, at), plain < 0 ? values.length : plain);
  }
});
