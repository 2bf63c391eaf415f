/* Bars of rows that do the same, in order of time, and which of them can be told apart at a zoom. */
import {firstAfter} from "./scale.mjs";

export const COLOURS = 8;
export const SWITCH = 1, SYNC = 2, VOID = 4;  // looks of a bar; 0 is work

/**
 * @typedef {[node: number, first: number, last: number]} RowRange node -1 is for components on CPUs
 * @typedef {[top: number, bottom: number, node: number, last: number, firstBottom: number]} Block
 * @typedef {{rows: RowRange[], starts: number[], ends: number[], keys: number[], looks: number[], numbers: number[],
 *   blocks: Block[]}} Track
 */

/**
 * A track without bars.
 * @param {RowRange[]} rows
 * @returns {Track}
 */
export const emptyTrack = (rows) => ({rows, starts: [], ends: [], keys: [], looks: [], numbers: [], blocks: []});

/**
 * Appends bars (start, end, key, look, iteration, ...); what overlaps the bar before it is cut, or left out.
 * @param {Track} track
 * @param {number[]} bars
 */
export const appendBars = (track, bars) => {
  let free = track.ends.length ? track.ends[track.ends.length - 1] : 0;
  for (let at = 0; at + 4 < bars.length; at += 5) {
    const start = Math.max(bars[at], free);
    if (bars[at + 1] <= start) continue;
    track.starts.push(start);
    track.ends.push(free = bars[at + 1]);
    track.keys.push(bars[at + 2]);
    track.looks.push(bars[at + 3]);
    track.numbers.push(bars[at + 4]);
  }
};

/**
 * Bars of a visible range. Those closer than `join` are merged: the name is that of most work, the last number the busy share.
 * @param {Track} track
 * @param {number} from
 * @param {number} to
 * @param {number} join seconds
 * @returns {Generator<[start: number, end: number, key: number, look: number, busy: number]>}
 */
export function* mergedBars({starts, ends, keys, looks}, from, to, join) {
  let at = firstAfter(ends, from);
  while (at < starts.length && starts[at] < to) {
    const start = starts[at];
    let end = ends[at], key = keys[at], look = looks[at], work = end - start, most = work;
    /** @type {Map<number, number> | null} */
    let shares = null;
    at += 1;
    while (at < starts.length && starts[at] - end < join) {
      const same = keys[at] === key && looks[at] === look;
      if (!same && end - start >= join) break;
      if (!same || shares) {
        shares = shares || new Map([[key * 8 + look, work]]);
        const kind = keys[at] * 8 + looks[at], sum = (shares.get(kind) || 0) + ends[at] - starts[at];
        shares.set(kind, sum);
        if (sum > most) { most = sum; key = keys[at]; look = looks[at]; }
      }
      work += ends[at] - starts[at];
      end = ends[at];
      at += 1;
      if (end > to) break;
    }
    yield [start, end, key, look, work / (end - start)];
  }
}

/**
 * Where there are more bars than pixels: per pixel the component with most work (COLOURS: weight sync), and its busy share.
 * @param {Track} track
 * @param {number} first bar
 * @param {number} past the last bar
 * @param {number} from
 * @param {number} to
 * @param {number} width pixels of the range
 * @returns {Generator<[pixel: number, kind: number, busy: number, again: boolean]>}
 */
export function* columnShares({starts, ends, keys, looks}, first, past, from, to, width) {
  const wide = Math.ceil(width), scale = width / (to - from), kinds = COLOURS + 1;
  const work = new Float32Array(wide * kinds), again = new Float32Array(wide);
  for (let at = first; at < past; at++) {
    const a = Math.max((starts[at] - from) * scale, 0), b = Math.min((ends[at] - from) * scale, wide);
    const kind = (looks[at] & 3) === SYNC ? COLOURS : keys[at] % COLOURS;
    for (let px = Math.floor(a); px < b; px++) {
      const part = Math.min(b, px + 1) - Math.max(a, px);
      work[px * kinds + kind] += part;
      if (looks[at] & VOID) again[px] += part;
    }
  }
  for (let px = 0; px < wide; px++) {
    let most = 0, sum = 0;
    for (let kind = 0; kind < kinds; kind++) {
      sum += work[px * kinds + kind];
      if (work[px * kinds + kind] > work[px * kinds + most]) most = kind;
    }
    if (sum >= 0.01) yield [px, most, Math.min(sum, 1), again[px] > sum / 2];
  }
}
