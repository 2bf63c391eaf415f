import assert from "node:assert/strict";
import {test} from "node:test";
import {COLOURS, SYNC, VOID, appendBars, columnShares, emptyTrack, mergedBars}
  from "../../src/trimtab/render/html/assets/js/tracks.mjs";

const track = (...bars) => {
  const made = emptyTrack([[0, 0, 3]]);
  appendBars(made, bars.flatMap(([start, end, key = 0, look = 0, number = 1]) => [start, end, key, look, number]));
  return made;
};

test("a bar that overlaps the one before it is cut, and one within it is left out", () => {
  const made = track([0, 4], [2, 6], [3, 5], [6, 7]);
  assert.deepEqual([made.starts, made.ends], [[0, 4, 6], [4, 6, 7]]);
});

test("appending goes on where the track ends", () => {
  const made = track([0, 4]);
  appendBars(made, [3, 5, 1, 0, 2]);
  assert.deepEqual([made.starts, made.ends, made.keys], [[0, 4], [4, 5], [0, 1]]);
});

test("bars further apart than what can be told apart stay single", () => {
  const bars = [...mergedBars(track([0, 1, 0], [2, 3, 1]), 0, 10, 0.5)];
  assert.deepEqual(bars, [[0, 1, 0, 0, 1], [2, 3, 1, 0, 1]]);
});

test("merged bars have the name of most work, and their busy share", () => {
  const [[start, end, key, , busy], ...more] = [...mergedBars(track([0, 0.1, 0], [0.2, 0.5, 1], [0.6, 0.7, 0]), 0, 10, 1)];
  assert.deepEqual([start, end, key, more.length], [0, 0.7, 1, 0]);
  assert.ok(Math.abs(busy - 0.5 / 0.7) < 1e-9);
});

test("merging loses no time and no work, at any zoom", () => {
  let seed = 7;
  const random = () => (seed = seed * 16807 % 2147483647) / 2147483647;
  for (let round = 0; round < 50; round++) {
    const bars = [];
    for (let at = 0, bar = 0; bar < 40; bar++) { at += random(); bars.push([at, at += random(), Math.floor(random() * 3)]); }
    const made = track(...bars), work = made.ends.reduce((sum, end, at) => sum + end - made.starts[at], 0);
    let last = -1, found = 0;
    for (const [start, end, , , busy] of mergedBars(made, 0, 1e9, random() * 2)) {
      assert.ok(start >= last && end > start && busy > 0 && busy <= 1 + 1e-9);
      found += (end - start) * busy;
      last = end;
    }
    assert.ok(Math.abs(found - work) < 1e-6);
  }
});

test("a range shows the bars that reach into it, and no others", () => {
  const bars = [...mergedBars(track([0, 1], [2, 3], [4, 5], [6, 7]), 2.5, 4.5, 0.1)];
  assert.deepEqual(bars.map(([start]) => start), [2, 4]);
});

test("a column has the component with most work in it, and says what was run again", () => {
  const made = track([0, 0.4, 0], [0.4, 1, 1], [1, 1.5, 2, SYNC], [2, 3, 0, VOID]);
  const columns = [...columnShares(made, 0, 4, 0, 4, 4)];
  assert.deepEqual(columns.map(([px, kind, , again]) => [px, kind, again]), [[0, 1, false], [1, COLOURS, false], [2, 0, true]]);
  assert.ok(Math.abs(columns[1][2] - 0.5) < 1e-6);
});
