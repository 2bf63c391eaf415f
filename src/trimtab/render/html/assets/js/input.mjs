/* Pointer, wheel and keys of a timeline, and what is under the pointer. */
import {element} from "./dom.mjs";
import {firstAfter, words} from "./scale.mjs";
import {AXIS_PX, BAD, LANE_PX} from "./sizes.mjs";
import {SWITCH, SYNC, VOID} from "./tracks.mjs";

/** @typedef {import("./timeline.mjs").Timeline} Timeline */

/** @param {Timeline} t */
export const listen = (t) => {
  new ResizeObserver(() => t.resized()).observe(t.place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { t.recolour(); t.later(); });
  t.view.addEventListener("scroll", () => t.later());
  t.view.addEventListener("keydown", (event) => onKey(t, event));
  t.canvas.addEventListener("wheel", (event) => onWheel(t, event), {passive: false});
  t.canvas.addEventListener("dblclick", (event) => t.zoom(event.shiftKey ? 1 / 2 : 2, t.time(event)));
  t.canvas.addEventListener("pointerdown", (event) => onDown(t, event));
  t.canvas.addEventListener("pointermove", (event) => onMove(t, event));
  for (const name of ["pointerup", "pointercancel"]) {
    t.canvas.addEventListener(name, (event) => onUp(t, event, name === "pointerup"));
  }
  t.canvas.addEventListener("pointerleave", () => { t.tip.hidden = true; });
  const there = (event) => {
    if (!(event.buttons & 1)) return;
    const box = t.over.getBoundingClientRect();
    const at = (event.clientX - box.left - t.left) / (t.right - t.left) * (t.end || 1);
    const half = (t.to - t.from) / 2;
    t.show(at - half, at + half);
  };
  t.over.addEventListener("pointerdown", (event) => { t.over.setPointerCapture(event.pointerId); there(event); });
  t.over.addEventListener("pointermove", there);
};

/** @param {Timeline} t */
const onKey = (t, event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const does = {
    ArrowLeft: () => t.pan(event.shiftKey ? -0.5 : -0.1), ArrowRight: () => t.pan(event.shiftKey ? 0.5 : 0.1),
    "+": () => t.zoom(1.5), "=": () => t.zoom(1.5), "-": () => t.zoom(1 / 1.5), 0: () => t.show(0, t.end),
    Home: () => t.show(0, t.to - t.from), End: () => t.show(t.end - (t.to - t.from), t.end),
    n: () => t.step(1), p: () => t.step(-1),
    Escape: () => { t.picked = null; t.said = ""; t.tip.hidden = true; t.later(); },
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!does) return;
  event.preventDefault();
  does();
};

/** @param {Timeline} t */
const onWheel = (t, event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    t.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0025)), t.time(event));
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    t.pan((event.deltaX || event.deltaY) / (t.right - t.left));
  }
};

/** @param {Timeline} t */
const onDown = (t, event) => {
  if (event.button) return;
  t.canvas.setPointerCapture(event.pointerId);
  t.pointers.set(event.pointerId, [event.clientX, event.clientY]);
  t.moved = 0;
};

/** @param {Timeline} t */
const onMove = (t, event) => {
  const before = t.pointers.get(event.pointerId);
  if (!before) { hover(t, event); return; }
  /** @type {[number, number]} */
  const now = [event.clientX, event.clientY];
  if (t.pointers.size === 2) {
    const other = [...t.pointers].find(([id]) => id !== event.pointerId)?.[1] || now;
    const apart = (a, b) => Math.max(Math.hypot(a[0] - b[0], a[1] - b[1]), 10);
    t.zoom(apart(now, other) / apart(before, other), t.time({clientX: (now[0] + other[0]) / 2}));
  } else {
    t.pan((before[0] - now[0]) / (t.right - t.left));
    if (event.pointerType === "mouse") t.view.scrollTop += before[1] - now[1];
  }
  t.moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
  t.pointers.set(event.pointerId, now);
  if (t.moved > 4) t.tip.hidden = true;
};

/** @param {Timeline} t */
const onUp = (t, event, ended) => {
  t.pointers.delete(event.pointerId);
  if (ended && t.moved <= 4) {
    const found = markAt(t, event);
    if (found) t.pick(found.mark, false);
    hover(t, event);
  }
};

/** @param {Timeline} t */
const hover = (t, event) => {
  const found = markAt(t, event), bar = found ? null : barAt(t, event);
  const lines = found ? markWords(t, found) : bar ? barWords(t, bar) : [];
  t.tip.hidden = !lines.length;
  if (!lines.length) return;
  t.tip.replaceChildren(...lines.filter(Boolean).map((line, at) => element(at ? "div" : "b", {}, line)));
  const place = t.place.getBoundingClientRect();
  const wide = t.tip.offsetWidth, x = event.clientX - place.left;
  t.tip.style.left = `${Math.max(0, Math.min(x + 14, place.width - wide - 4))}px`;
  t.tip.style.top = `${event.clientY - place.top + 16}px`;
};

/** @param {Timeline} t */
const markAt = (t, event) => {
  const box = t.canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const lane = t.lanes[Math.floor((y - AXIS_PX) / LANE_PX)];
  if (!lane || y < AXIS_PX || x < t.left - 8) return null;
  const near = t.marks.filter((mark) => mark[1] === lane[0] && Math.abs(t.x(mark[0]) - x) < 9);
  return near.length ? {mark: t.foremost(near), near} : null;
};

/** @param {Timeline} t */
const barAt = (t, event) => {
  const box = t.canvas.getBoundingClientRect();
  const y = event.clientY - box.top;
  if (y < t.head || event.clientX - box.left < t.left) return null;
  const at = y - t.head + t.view.scrollTop, moment = t.time(event);
  const near = 2 * (t.to - t.from) / (t.right - t.left);
  let node = t.tops.findLastIndex ? t.tops.findLastIndex((top) => top <= at) : -1;
  if (t.cpu.length && at >= t.cpuTop) node = -1;
  const gpu = node < 0 ? -1 : Math.floor((at - t.tops[node]) / t.row);
  if (node >= 0 && gpu >= t.nodes[node].gpus) return null;
  for (const track of t.tracks.values()) {
    if (!track.blocks.some(([top, bottom]) => top <= at && at < bottom)) continue;
    const found = firstAfter(track.ends, moment - near);
    if (found < track.starts.length && track.starts[found] <= moment + near) return {track, found, node, gpu};
  }
  return node < 0 ? null : {node, gpu};
};

/** @param {Timeline} t */
const markWords = (t, {mark, near}) => {
  const others = near.filter((one) => one !== mark), more = others.length - 4;
  return [mark[3], words(mark[0]), mark[4], ...others.slice(0, 4).map((one) => `${words(one[0])}: ${one[3]}`),
    more > 0 ? `and ${more} more` : ""];
};

/**
 * @param {Timeline} t
 * @param {{track?: any, found?: any, node: number, gpu: number}} bar
 */
const barWords = (t, {track, found, node, gpu}) => {
  const seat = node < 0 ? "" : `${t.nodes[node].name ? `${t.nodes[node].name}, ` : ""}GPU ${gpu}`;
  if (!track) return [seat, "idle or absent"];
  const look = track.looks[found], name = t.keys[track.keys[found]] || "?";
  const what = (look & 3) === SYNC ? "weight sync" : (look & 3) === SWITCH ? `${name}: switch` : name;
  const [start, end] = [track.starts[found], track.ends[found]];
  return [what, `${words(start)} to ${words(end)}: ${words(end - start)}`,
    `iteration ${track.numbers[found]}${look & VOID ? ", run again later" : ""}`, seat];
};
