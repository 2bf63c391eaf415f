/* The timeline of a run with zoom: rows are GPUs, grouped by node; above them lanes of events.

   A static page has a place and an element with the data as JSON:

     a div with data-run-timeline="ID", holding the still picture for pages without scripts in an element of class
     "still", and a script element of type application/json with that id

   A live page makes one itself, and adds increments:

     const timeline = new Timeline(place, data, {picked: (mark) => ...});
     timeline.add({tracks: [{rows, bars}], marks: [...], end: 93.5});

   Data (everything except `end` is optional, in `add` everything):
     keys    names of components, in the order of their colours; in `add`: all of them
     nodes   {name, kind, gpus, lives: [[since, until or null], ...]}; in `add`: all of them
     cpu     names of components on CPUs; in `add`: all of them
     lanes   [id, words] for each line of marks; in `add`: all of them
     tracks  {rows: [[node or -1 for cpu, first row, last row], ...], bars: [start, end, key, look, iteration, ...]}:
             rows with the same bars, and the bars in order, five numbers each; look is 0 run, 1 switch, 2 weight sync,
             plus 4 for work that was run again later. In `add`: bars to append, to the track of the same rows
     marks   [time, lane, kind, title, why, 1 if it goes through all rows, number]; in `add`: more of them
     moves   [began, ended or null, number]; in `add`: all of them
     shapes  an outline for each kind of mark, two units wide and high
     end     end of the timeline, in seconds
     open    whether it may continue: then the view follows the end, unless it was moved away

   Only the visible part is drawn, in one path for rows with the same bars; bars closer than half a pixel are merged. */
import {element} from "./dom.mjs";
import {listen} from "./input.mjs";
import {paint, readColours} from "./paint.mjs";
import {words} from "./scale.mjs";
import {AXIS_PX, BAD, LANE_PX, NODE_PX} from "./sizes.mjs";
import {appendBars, emptyTrack} from "./tracks.mjs";

const NARROW_PX = 560;
const HELP = "Arrows left and right move, plus and minus zoom, 0 shows all, Home and End go to the ends, " +
  "N and P go from mark to mark.";

/**
 * @typedef {[at: number, lane: string, kind: string, title: string, why: string, through: 0 | 1, number: number]} Mark
 * @typedef {{name: string, kind: string, gpus: number, lives: [since: number, until: number | null][]}} RunNode
 */

export class Timeline {
  /** @type {HTMLOutputElement} */ where;
  /** @type {HTMLCanvasElement} */ over;
  /** @type {HTMLCanvasElement} */ canvas;
  /** @type {HTMLElement} */ room;
  /** @type {HTMLElement} */ view;
  /** @type {HTMLElement} */ tip;
  /** @type {Record<string | number, string>} */ colour = {};
  /** @type {CanvasPattern | null} */ hatch = null;
  /** @type {Map<string, number>} */ widths = new Map();
  /** @type {[x: number, y: number, name: string, colour: string][]} */ names = [];

  /**
   * @param {HTMLElement} place
   * @param {any} data
   * @param {{picked?: (mark: Mark) => void}} options
   */
  constructor(place, data, options = {}) {
    this.place = place;
    this.options = options;
    /** @type {string[]} */ this.keys = [];
    /** @type {RunNode[]} */ this.nodes = [];
    /** @type {string[]} */ this.cpu = [];
    /** @type {[id: string, words: string][]} */ this.lanes = [];
    /** @type {Mark[]} */ this.marks = [];
    /** @type {[began: number, ended: number | null, number: number][]} */ this.moves = [];
    /** @type {Record<string, string>} */ this.shapes = {};
    /** @type {Record<string, Path2D>} */ this.paths = {};
    /** @type {Map<string, import("./tracks.mjs").Track>} */ this.tracks = new Map();
    /** @type {HTMLCanvasElement | null} */ this.overview = null;
    this.width = 0; this.left = 0; this.right = 0; this.head = 0; this.row = 0; this.high = 0; this.tall = 0;
    /** @type {number[]} */ this.tops = [];
    this.cpuTop = 0; this.ratio = 1; this.shift = 0; this.moved = 0;
    this.named = false; this.following = false; this.waiting = false;
    this.said = "";
    this.end = 0;
    this.open = false;
    this.from = 0; this.to = 1;
    this.whole = true;
    /** @type {Mark | null} */ this.picked = null;
    this.drawn = 0;
    /** @type {Map<number, [x: number, y: number]>} */ this.pointers = new Map();
    this.build();
    this.add(data);
    this.recolour();
    listen(this);
    place.classList.add("live");
    this.resized();
  }

  /* ---- data ---- */
  add(part) {
    for (const name of ["keys", "nodes", "cpu", "lanes", "moves"]) if (part[name]) this[name] = part[name];
    if (part.shapes) {
      Object.assign(this.shapes, part.shapes);
      for (const [kind, outline] of Object.entries(part.shapes)) this.paths[kind] = new Path2D(outline);
    }
    for (const {rows, bars} of part.tracks || []) {
      const id = JSON.stringify(rows);
      if (!this.tracks.has(id)) this.tracks.set(id, emptyTrack(rows));
      appendBars(/** @type {import("./tracks.mjs").Track} */ (this.tracks.get(id)), bars);
    }
    if (part.marks) {
      this.marks.push(...part.marks);
      this.marks.sort((a, b) => a[0] - b[0]);
    }
    if (part.end !== undefined) this.end = Math.max(this.end, part.end);
    if (part.open !== undefined) this.open = part.open;
    this.overview = null;
    if (this.whole) [this.from, this.to] = [0, this.end || 1];
    else if (this.following) [this.from, this.to] = [this.end - (this.to - this.from), this.end];
    if (this.place.classList.contains("live")) this.layout();
    this.later();
  }

  /* ---- the page ---- */
  build() {
    const button = (label, says, does) => {
      const made = element("button", {type: "button", "aria-label": says, title: says}, label);
      made.addEventListener("click", does);
      return made;
    };
    this.where = element("output", {class: "rt-where", "aria-live": "polite"});
    const bar = element("div", {class: "rt-bar", role: "toolbar", "aria-label": "Timeline"},
      button("−", "Zoom out", () => this.zoom(1 / 2)),
      button("+", "Zoom in", () => this.zoom(2)),
      button("◂", "Earlier", () => this.pan(-0.5)),
      button("▸", "Later", () => this.pan(0.5)),
      button("All", "Show all", () => this.show(0, this.end)),
      button("‹ Mark", "Previous mark", () => this.step(-1)),
      button("Mark ›", "Next mark", () => this.step(1)),
      this.where);
    this.over = element("canvas", {class: "rt-over tt", "aria-hidden": "true"});
    this.canvas = element("canvas", {class: "rt-canvas tt", role: "img", "aria-label": "The run over time"});
    this.room = element("div", {class: "rt-room"}, this.canvas);
    this.view = element("div", {class: "rt-view", tabindex: "0", role: "application",
      "aria-roledescription": "timeline", "aria-label": `The run over time. ${HELP}`}, this.room);
    this.tip = element("div", {class: "rt-tip", role: "status", hidden: ""});
    const hint = element("p", {class: "rt-hint"}, "Drag to move, Ctrl and wheel or pinch to zoom. " + HELP);
    this.place.append(bar, this.over, this.view, this.tip, hint);
  }

  recolour() { readColours(this); }

  resized() {
    const width = this.view.clientWidth;
    if (!width || (width === this.width && this.ratio === devicePixelRatio)) return;
    this.width = width;
    this.layout();
    this.draw();
  }

  /* Position of every row from the top. */
  layout() {
    this.left = this.width < NARROW_PX ? 66 : 104;
    this.right = this.width - 3;
    this.head = AXIS_PX + LANE_PX * this.lanes.length + 2;
    const rows = this.nodes.reduce((sum, node) => sum + node.gpus, 0);
    this.row = rows <= 12 ? 22 : rows <= 32 ? 16 : rows <= 96 ? 12 : 10;
    const named = this.nodes.length > 1 || Boolean(this.nodes[0] && this.nodes[0].name);
    let y = 0;
    this.tops = this.nodes.map((node) => {
      y += named ? NODE_PX : 6;
      const top = y;
      y += node.gpus * this.row;
      return top;
    });
    this.named = named;
    if (this.cpu.length) y += 12;
    this.cpuTop = y;
    y += this.cpu.length * (this.row + 2) + 4;
    this.high = this.head + y;
    const tall = Math.min(this.high, Math.max(360, Math.floor(innerHeight * 0.72)));
    this.view.style.height = `${tall}px`;
    this.room.style.height = `${this.high}px`;
    this.tall = tall;
    this.ratio = devicePixelRatio || 1;
    this.sized(this.canvas, this.width, tall);
    this.sized(this.over, this.width, 30);
    this.overview = null;
    for (const track of this.tracks.values()) track.blocks = this.blocks(track.rows);
  }

  sized(canvas, width, height) {
    canvas.width = Math.round(width * this.ratio);
    canvas.height = Math.round(height * this.ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }

  /* Top and bottom of rows that are drawn in one path; node heads are painted over it. */
  blocks(rows) {
    const found = [];
    for (const [node, first, last] of rows) {
      const step = node < 0 ? this.row + 2 : this.row;
      const top = (node < 0 ? this.cpuTop : this.tops[node]) + first * step;
      const bottom = node < 0 ? top + this.row : (this.tops[node] + (last + 1) * this.row);
      const before = found[found.length - 1];
      if (before && node > 0 && before[2] === node - 1 && before[3] === this.nodes[node - 1].gpus - 1 && first === 0) {
        [before[1], before[2], before[3]] = [bottom, node, last];
      } else found.push([top, bottom, node, last, bottom]);
    }
    return found;
  }

  /* ---- visible range ---- */
  x(seconds) { return this.left + (seconds - this.from) * (this.right - this.left) / (this.to - this.from); }

  time(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.from + (event.clientX - box.left - this.left) * (this.to - this.from) / (this.right - this.left);
  }

  show(from, to) {
    const all = this.end || 1;
    const span = Math.min(Math.max(to - from, all * 1e-6, 1e-5), all);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - span / 2, 0), all - span);
    this.to = this.from + span;
    this.whole = span >= all * (1 - 1e-9);
    this.following = this.open && this.to >= all * (1 - 1e-9);
    this.later();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min((this.to - this.from) / factor, this.end || 1);
    const part = (at - this.from) / (this.to - this.from);
    this.show(at - part * span, at + (1 - part) * span);
  }

  pan(part) {
    const by = part * (this.to - this.from);
    const kept = Math.min(Math.max(by, -this.from), (this.end || 1) - this.to);
    this.show(this.from + kept, this.to + kept);
  }

  /* Select the next mark in either direction. */
  step(way) {
    const marks = this.marks.filter((mark) => mark[2] !== "saved");
    if (!marks.length) return;
    const edge = way > 0 ? this.from : this.to, after = marks.findIndex((mark) => mark[0] >= edge);
    const next = after < 0 ? marks.length : after;
    const now = this.picked ? marks.indexOf(this.picked) : way > 0 ? next - 1 : next;
    this.pick(marks[Math.min(Math.max(now + way, 0), marks.length - 1)], true);
  }

  pick(mark, go) {
    this.picked = mark;
    if (go) {
      const half = Math.min(this.to - this.from, (this.end || 1) / 4) / 2;
      if (mark[0] < this.from || mark[0] > this.to || this.whole) this.show(mark[0] - half, mark[0] + half);
    }
    const said = `${words(mark[0])}: ${mark[3]}${mark[4] ? `. ${mark[4]}` : ""}`;
    this.say(said);
    if (this.options.picked) this.options.picked(mark);
    this.later();
  }

  say(text) {
    this.said = text;
    this.where.textContent = text;
  }

  /* The mark that represents several marks in one place. */
  foremost(marks) {
    return marks.find((mark) => mark === this.picked) || marks.find((mark) => BAD.has(mark[2])) ||
      marks.find((mark) => mark[5]) || marks.find((mark) => mark[2] !== "saved") || marks[0];
  }

  /* ---- drawing ---- */
  later() {
    if (this.waiting || !this.width) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() { paint(this); }
}
