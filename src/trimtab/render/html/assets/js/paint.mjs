/* Draws a timeline on its canvases; called by `Timeline` (timeline.mjs) alone. */
import {ticks, firstAfter, words} from "./scale.mjs";
import {AXIS_PX, BAD, GOOD, LANE_PX, NODE_PX} from "./sizes.mjs";
import {COLOURS, SWITCH, SYNC, VOID, columnShares, mergedBars} from "./tracks.mjs";

/** @typedef {import("./timeline.mjs").Timeline} Timeline */

/** @param {HTMLCanvasElement} canvas */
const penOf = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));

const JOIN_PX = 0.5, CROWDED_PX = 11, CROWD = 0.5;

/** @param {Timeline} t */
export const readColours = (t) => {
  const style = getComputedStyle(t.canvas);
  const read = (name) => style.getPropertyValue(`--tt-${name}`).trim();
  t.colour = {};
  for (const name of ["surface", "ink", "quiet", "grid", "idle", "line", "sync", "on-sync"]) t.colour[name] = read(name);
  for (let at = 0; at < COLOURS; at++) { t.colour[at] = read(at); t.colour[`on-${at}`] = read(`on-${at}`); }
  const page = getComputedStyle(document.documentElement);
  t.colour.bad = page.getPropertyValue("--warn").trim() || t.colour.ink;
  t.colour.good = page.getPropertyValue("--good").trim() || t.colour.ink;
  const small = document.createElement("canvas");
  small.width = small.height = 8;
  const pen = penOf(small);
  pen.strokeStyle = t.colour.surface;
  pen.lineWidth = 2.4;
  pen.beginPath();
  for (const at of [-8, 0, 8]) { pen.moveTo(at - 1, 9); pen.lineTo(at + 9, -1); }
  pen.stroke();
  t.hatch = penOf(t.canvas).createPattern(small, "repeat");
  t.overview = null;
};

/** @param {Timeline} t */
export const paint = (t) => {
  const pen = penOf(t.canvas);
  pen.setTransform(t.ratio, 0, 0, t.ratio, 0, 0);
  pen.clearRect(0, 0, t.width, t.tall);
  pen.font = `12px ${getComputedStyle(t.view).fontFamily}`;
  pen.textBaseline = "middle";
  t.drawn = 0;
  const scrolled = t.view.scrollTop;
  t.shift = t.head - scrolled;
  pen.save();
  pen.beginPath();
  pen.rect(t.left, t.head, t.right - t.left, t.tall - t.head);
  pen.clip();
  grid(t, pen, false);
  idle(t, pen);
  for (const track of t.tracks.values()) drawTrack(t, pen, track);
  heads(t, pen);
  through(t, pen);
  pen.restore();
  labels(t, pen);
  lanesAndAxis(t, pen);
  drawOverview(t);
  if (!t.said) t.where.textContent = t.whole ? `all of ${words(t.end)}` : `${words(t.from)} to ${words(t.to)}`;
  t.said = "";
};

/** @param {Timeline} t */
const idle = (t, pen) => {
  t.nodes.forEach((node, at) => {
    const top = t.tops[at] + t.shift, high = node.gpus * t.row;
    if (top > t.tall || top + high < t.head) return;
    pen.fillStyle = t.colour.idle;
    for (const [since, until] of node.lives) {
      const x0 = Math.max(t.x(since), t.left), x1 = Math.min(t.x(until === null ? t.end : until), t.right);
      if (x1 > x0) pen.fillRect(x0, top, x1 - x0, high);
    }
  });
  pen.strokeStyle = t.colour.grid;
  t.cpu.forEach((_, at) => {
    const x0 = Math.max(t.x(0), t.left - 1), x1 = Math.min(t.x(t.end), t.right + 1);
    pen.strokeRect(x0, t.cpuTop + at * (t.row + 2) + t.shift + 0.5, x1 - x0, t.row - 1);
  });
};

/** @param {Timeline} t */
const drawTrack = (t, pen, track) => {
  const blocks = track.blocks.filter(([top, bottom]) => bottom + t.shift > t.head && top + t.shift < t.tall);
  if (!blocks.length) return;
  const first = firstAfter(track.ends, t.from), past = firstAfter(track.starts, t.to), width = t.right - t.left;
  if (past - first > CROWD * width) { drawColumns(t, pen, track, blocks, first, past); return; }
  for (const bar of mergedBars(track, t.from, t.to, JOIN_PX * (t.to - t.from) / width)) drawBar(t, pen, blocks, ...bar);
};

/** @param {Timeline} t */
const drawColumns = (t, pen, track, blocks, first, past) => {
  for (const [px, kind, busy, again] of columnShares(track, first, past, t.from, t.to, t.right - t.left)) {
    pen.fillStyle = t.colour[kind === COLOURS ? "sync" : kind];
    pen.globalAlpha = Math.max(busy, 0.2) * (again ? 0.35 : 1);
    for (const [top, bottom] of blocks) pen.fillRect(t.left + px, top + t.shift, 1, bottom - top);
    t.drawn += blocks.length;
  }
  pen.globalAlpha = 1;
};

/** @param {Timeline} t */
const drawBar = (t, pen, blocks, start, end, key, look, busy) => {
  const x0 = Math.max(t.x(start), t.left - 2), x1 = Math.min(t.x(end), t.right + 2);
  const wide = Math.max(x1 - x0, 0.35), kind = look & 3;
  const name = kind === SYNC ? "sync" : key % COLOURS;
  pen.fillStyle = t.colour[name];
  pen.globalAlpha = (busy < 0.995 ? Math.max(busy, 0.2) : 1) * (look & VOID ? 0.35 : 1);
  for (const [top, bottom] of blocks) pen.fillRect(x0, top + t.shift, wide, bottom - top);
  t.drawn += blocks.length;
  if (kind === SWITCH && wide > 3) {
    pen.fillStyle = t.hatch;
    for (const [top, bottom] of blocks) pen.fillRect(x0, top + t.shift, wide, bottom - top);
  }
  pen.globalAlpha = 1;
  if (wide > 5) {
    pen.fillStyle = t.colour.surface;
    for (const [top, bottom] of blocks) pen.fillRect(x1 - 0.5, top + t.shift, 1, bottom - top);
  }
  if (wide > 34 && kind !== SWITCH && !(look & VOID) && busy > 0.6 && t.row >= 12) {
    nameOf(t, pen, blocks, x0, x1, kind === SYNC ? "sync" : t.keys[key] || "?", t.colour[`on-${name}`]);
  }
};

/**
 * The name of a bar, drawn after the lines between rows.
 * @param {Timeline} t
 */
const nameOf = (t, pen, blocks, x0, x1, name, colour) => {
  const wide = t.widths.get(name) ?? pen.measureText(name).width;
  t.widths.set(name, wide);
  const [left, right] = [Math.max(x0, t.left), Math.min(x1, t.right)];
  if (wide + 10 > right - left) return;
  const [top, , , , bottom] = blocks[0];  // on rows of its first node: node names stand between nodes
  if (bottom + t.shift < t.head + t.row) return;
  const low = Math.max(top, -t.shift + t.head), high = Math.min(bottom, t.tall - t.shift);
  const middle = top + (Math.floor((low + high - 2 * top) / 2 / t.row) + 0.5) * t.row;
  t.names.push([(left + right) / 2, middle + t.shift, name, colour]);
};

/** @param {Timeline} t */
const heads = (t, pen) => {
  pen.fillStyle = t.colour.surface;
  t.nodes.forEach((node, at) => {
    const top = t.tops[at] + t.shift;
    if (top - NODE_PX > t.tall || top + node.gpus * t.row < t.head) return;
    if (t.named) pen.fillRect(t.left, top - NODE_PX, t.right - t.left, NODE_PX);
    for (let gpu = 1; gpu < node.gpus; gpu++) pen.fillRect(t.left, top + gpu * t.row - 0.5, t.right - t.left, 1);
  });
  pen.textAlign = "center";
  for (const [x, y, name, colour] of t.names) {
    pen.fillStyle = colour;
    pen.fillText(name, x, y + 0.5);
  }
  t.names = [];
};

/** @param {Timeline} t */
const through = (t, pen) => {
  for (const [began, ended] of t.moves) {
    const x0 = t.x(began), x1 = t.x(ended === null ? t.end : ended);
    if (x1 < t.left || x0 > t.right) continue;
    pen.globalAlpha = 0.16;
    pen.fillStyle = t.colour.ink;
    pen.fillRect(x0, t.head, Math.max(x1 - x0, 1), t.tall - t.head);
    pen.globalAlpha = 1;
  }
  pen.setLineDash([3, 3]);
  pen.lineWidth = 1;
  for (const mark of t.marks) {
    if (!mark[5] && mark !== t.picked) continue;
    const x = t.x(mark[0]);
    if (x < t.left || x > t.right) continue;
    pen.strokeStyle = mark === t.picked ? t.colour.ink : t.colour.quiet;
    pen.beginPath();
    pen.moveTo(x, t.head);
    pen.lineTo(x, t.tall);
    pen.stroke();
  }
  pen.setLineDash([]);
};

/** @param {Timeline} t */
const labels = (t, pen) => {
  pen.save();
  pen.beginPath();
  pen.rect(0, t.head, t.width, t.tall - t.head);
  pen.clip();
  pen.textAlign = "left";
  const font = pen.font;
  t.nodes.forEach((node, at) => {
    const top = t.tops[at] + t.shift;
    if (top - NODE_PX > t.tall || top + node.gpus * t.row < t.head) return;
    if (t.named) {
      pen.font = `600 ${font}`;
      pen.fillStyle = t.colour.ink;
      const name = cut(t, pen, node.name || "GPUs that no node was named for", t.width - 110);
      pen.fillText(name, 0, top - 8);
      const far = pen.measureText(name).width + 8;
      pen.font = font;
      pen.fillStyle = t.colour.quiet;
      pen.fillText(node.kind ? `${node.gpus} × ${node.kind}` : `${node.gpus} GPU${node.gpus === 1 ? "" : "s"}`, far, top - 8);
    }
    pen.fillStyle = t.colour.quiet;
    if (t.row >= 12) for (let gpu = 0; gpu < node.gpus; gpu++) pen.fillText(`GPU ${gpu}`, 0, top + (gpu + 0.5) * t.row);
  });
  pen.fillStyle = t.colour.quiet;
  t.cpu.forEach((name, at) => {
    pen.fillText(cut(t, pen, name, t.left - 6), 0, t.cpuTop + at * (t.row + 2) + t.row / 2 + t.shift);
  });
  pen.restore();
};

/** @param {Timeline} t */
const cut = (t, pen, text, room) => {
  if (pen.measureText(text).width <= room) return text;
  let kept = text;
  while (kept.length > 1 && pen.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return `${kept}…`;
};

/** @param {Timeline} t */
const grid = (t, pen, labelled) => {
  const most = Math.max(2, Math.floor((t.right - t.left) / 88));
  let free = t.left;
  pen.textAlign = "center";
  for (const [value, label] of ticks(t.from, t.to, most)) {
    const x = t.x(value);
    if (!labelled) {
      pen.fillStyle = t.colour.grid;
      pen.fillRect(x - 0.5, t.head, 1, t.tall - t.head);
      continue;
    }
    const half = pen.measureText(label).width / 2;
    const middle = Math.max(Math.min(x, t.right - half), t.left + half);
    if (middle - half < free) continue;
    pen.fillStyle = t.colour.quiet;
    pen.fillText(label, middle, 8);
    free = middle + half + 6;
  }
};

/** @param {Timeline} t */
const lanesAndAxis = (t, pen) => {
  grid(t, pen, true);
  t.lanes.forEach(([id, label], at) => {
    const y = AXIS_PX + at * LANE_PX + LANE_PX / 2;
    pen.textAlign = "left";
    pen.fillStyle = t.colour.quiet;
    pen.fillText(cut(t, pen, label, t.left - 6), 0, y);
    pen.fillStyle = t.colour.grid;
    pen.fillRect(t.left, y - 0.5, t.right - t.left, 1);
    if (id === "moves") spans(t, pen, y);
    glyphs(t, pen, id, y);
  });
};

/** @param {Timeline} t */
const spans = (t, pen, y) => {
  for (const [began, ended] of t.moves) {
    const x0 = Math.max(t.x(began), t.left), x1 = Math.min(t.x(ended === null ? t.end : ended), t.right);
    if (x1 < t.left || x0 > t.right) continue;
    pen.fillStyle = t.colour.line;
    pen.fillRect(x0, y - 4, Math.max(x1 - x0, 1), 8);
  }
};

/**
 * Marks; overlapping ones as one, with their count.
 * @param {Timeline} t
 */
const glyphs = (t, pen, lane, y) => {
  let group = [];
  const put = () => {
    if (!group.length) return;
    const worst = t.foremost(group);
    const x = t.x(group[0][0]);
    pen.save();
    pen.translate(x, y);
    pen.scale(5, 5);
    pen.fillStyle = BAD.has(worst[2]) ? t.colour.bad : GOOD.has(worst[2]) ? t.colour.good : t.colour.ink;
    if (t.paths[worst[2]]) pen.fill(t.paths[worst[2]]);
    pen.restore();
    if (worst === t.picked) {
      pen.strokeStyle = t.colour.ink;
      pen.strokeRect(x - 8, y - 8, 16, 16);
    }
    if (group.length > 1 && worst[2] !== "saved") {
      const beyond = x + 18 > t.right;
      pen.textAlign = beyond ? "right" : "left";
      pen.font = pen.font.replace("12px", "10px");
      pen.fillStyle = t.colour.quiet;
      pen.fillText(String(group.length), beyond ? x - 7 : x + 7, y - 4);
      pen.font = pen.font.replace("10px", "12px");
    }
    t.drawn += 1;
    group = [];
  };
  for (const mark of t.marks) {
    if (mark[1] !== lane || mark[0] < t.from || mark[0] > t.to) continue;
    if (group.length && t.x(mark[0]) - t.x(group[0][0]) > (group.length > 1 ? CROWDED_PX + 8 : CROWDED_PX)) put();
    group.push(mark);
  }
  put();
};

/**
 * GPU utilisation over the whole run, and the visible range.
 * @param {Timeline} t
 */
const drawOverview = (t) => {
  const high = 30, wide = Math.max(1, Math.floor(t.right - t.left)), all = t.end || 1;
  if (!t.overview) {
    const sums = t.keys.map(() => new Float64Array(wide));
    const rows = t.nodes.reduce((sum, node) => sum + node.gpus, 0) || 1;
    for (const track of t.tracks.values()) {
      const weight = track.rows.reduce((sum, [node, first, last]) => sum + (node < 0 ? 0 : last - first + 1), 0);
      if (!weight) continue;
      for (let at = 0; at < track.starts.length; at++) {
        const [a, b] = [track.starts[at] / all * wide, track.ends[at] / all * wide];
        const sum = sums[track.keys[at]];
        for (let px = Math.floor(a); sum && px < Math.min(Math.ceil(b), wide); px++) {
          sum[px] += weight * (Math.min(b, px + 1) - Math.max(a, px)) / rows;
        }
      }
    }
    t.overview = paintedOverview(t, sums, wide, high);
  }
  const pen = penOf(t.over);
  pen.setTransform(t.ratio, 0, 0, t.ratio, 0, 0);
  pen.clearRect(0, 0, t.width, high);
  pen.drawImage(t.overview, t.left, 0, wide, high);
  const [x0, x1] = [t.left + t.from / all * wide, t.left + t.to / all * wide];
  pen.globalAlpha = 0.7;
  pen.fillStyle = t.colour.surface;
  pen.fillRect(t.left, 0, x0 - t.left, high);
  pen.fillRect(x1, 0, t.left + wide - x1, high);
  pen.globalAlpha = 1;
  pen.strokeStyle = t.colour.ink;
  pen.lineWidth = 1.5;
  pen.strokeRect(x0 + 0.75, 0.75, Math.max(x1 - x0 - 1.5, 2), high - 1.5);
  pen.lineWidth = 1;
};

/**
 * Cached until data, size or colours change.
 * @param {Timeline} t
 */
const paintedOverview = (t, sums, wide, high) => {
  const painted = document.createElement("canvas"), pen = penOf(painted);
  painted.width = wide;
  painted.height = high * 2;
  pen.scale(1, 2);
  pen.fillStyle = t.colour.idle;
  pen.fillRect(0, 0, wide, high);
  for (let px = 0; px < wide; px++) {
    let y = high;
    sums.forEach((sum, key) => {
      const tall = Math.min(sum[px], 1) * high;
      if (tall < 0.2) return;
      pen.fillStyle = t.colour[key % COLOURS];
      pen.fillRect(px, y - tall, 1, tall);
      y -= tall;
    });
  }
  return painted;
};
