import assert from "node:assert/strict";
import {test} from "node:test";
import {FIRST_MS, LATEST_MS, after, longer} from "../../src/trimtab/render/html/assets/js/messages.mjs";

test("messages of one server are counted, those of another are not comparable", () => {
  assert.equal(after("a-7", "a-6"), 1);
  assert.equal(after("a-6", "a-7"), -1);
  assert.ok(Number.isNaN(after("b-1", "a-6")));
  assert.ok(Number.isNaN(after("a-1", "")));
});

test("pauses between tries grow to a limit", () => {
  let pause = FIRST_MS, before = 0;
  for (let again = 0; again < 30; again++) {
    assert.ok(pause >= before && pause <= LATEST_MS);
    [before, pause] = [pause, longer(pause)];
  }
  assert.equal(pause, LATEST_MS);
});
