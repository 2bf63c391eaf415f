/* The timeline of a run with zoom: rows are GPUs, grouped by node; above them lanes of events.

   A static page has a place and an element with the data as JSON:

     a div with data-run-timeline="ID", holding the still picture for pages without scripts in an element of class
     "still", and a script element of type application/json with that id

   A live page makes one itself, and adds increments:

     const timeline = trimtabTimeline.make(place, data, {picked: (mark) => ...});
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
(() => {
  "use strict";
  const COLOURS = 8, JOIN_PX = 0.5, AXIS_PX = 20, LANE_PX = 20, NODE_PX = 19, NARROW_PX = 560, CROWDED_PX = 11, CROWD = 0.5;
  const RUN = 0, SWITCH = 1, SYNC = 2, VOID = 4;
  const BAD = new Set(["lost", "evicted", "rollback"]), GOOD = new Set(["joined", "arrived"]);
  const HELP = "Arrows left and right move, plus and minus zoom, 0 shows all, Home and End go to the ends, " +
    "N and P go from mark to mark.";

  const words = (seconds) => {
    if (seconds < 0) return "-" + words(-seconds);
    if (seconds === 0) return "0 s";
    if (seconds < 0.9995) {
      const [factor, unit] = seconds >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
      return `${+(seconds * factor).toPrecision(3)} ${unit}`;
    }
    if (seconds < 599.95) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    if (seconds < 7199.5) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
    const minutes = Math.round(seconds / 60);
    return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  };

  /* Round times between two moments, with labels in one unit. */
  const ticks = (from, to, most) => {
    const least = (to - from) / Math.max(1, most);
    let step = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((s) => s >= least);
    if (least < 30 || !step) {
      const power = 10 ** Math.floor(Math.log10(least));
      step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= least * (1 - 1e-9));
    }
    const [size, unit] = step >= 3600 ? [3600, "h"] : step >= 60 ? [60, "min"] : [1, "s"];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    const found = [];
    for (let at = Math.ceil(from / step - 1e-9); at * step <= to + 1e-9 * step && found.length < 400; at++) {
      const value = at * step;
      found.push([value, at === 0 ? "0" : `${(value / size).toFixed(Math.min(digits, 9))} ${unit}`]);
    }
    return found;
  };

  /* The first of the sorted values that is more than a moment. */
  const firstAfter = (values, moment) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > moment) high = middle; else low = middle + 1;
    }
    return low;
  };

  const element = (name, attributes = {}, ...inside) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };

  class Timeline {
    constructor(place, data, options = {}) {
      this.place = place;
      this.options = options;
      this.keys = []; this.nodes = []; this.cpu = []; this.lanes = []; this.marks = []; this.moves = [];
      this.shapes = {}; this.paths = {};
      this.tracks = new Map();
      this.end = 0;
      this.open = false;
      this.from = 0; this.to = 1;
      this.whole = true;
      this.picked = null;
      this.drawn = 0;
      this.pointers = new Map();
      this.build();
      this.add(data);
      this.recolour();
      this.listen();
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
      for (const {rows, bars} of part.tracks || []) this.append(rows, bars);
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

    append(rows, bars) {
      const id = JSON.stringify(rows);
      if (!this.tracks.has(id)) {
        this.tracks.set(id, {rows, starts: [], ends: [], keys: [], looks: [], numbers: [], blocks: []});
      }
      const track = this.tracks.get(id);
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

    listen() {
      new ResizeObserver(() => this.resized()).observe(this.place);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.recolour(); this.later(); });
      this.view.addEventListener("scroll", () => this.later());
      this.view.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("wheel", (event) => this.wheel(event), {passive: false});
      this.canvas.addEventListener("dblclick", (event) => this.zoom(event.shiftKey ? 1 / 2 : 2, this.time(event)));
      this.canvas.addEventListener("pointerdown", (event) => this.down(event));
      this.canvas.addEventListener("pointermove", (event) => this.move(event));
      for (const name of ["pointerup", "pointercancel"]) {
        this.canvas.addEventListener(name, (event) => this.up(event, name === "pointerup"));
      }
      this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      const there = (event) => {
        if (!(event.buttons & 1)) return;
        const box = this.over.getBoundingClientRect();
        const at = (event.clientX - box.left - this.left) / (this.right - this.left) * (this.end || 1);
        const half = (this.to - this.from) / 2;
        this.show(at - half, at + half);
      };
      this.over.addEventListener("pointerdown", (event) => { this.over.setPointerCapture(event.pointerId); there(event); });
      this.over.addEventListener("pointermove", there);
    }

    recolour() {
      const style = getComputedStyle(this.canvas);
      const read = (name) => style.getPropertyValue(`--tt-${name}`).trim();
      this.colour = {};
      for (const name of ["surface", "ink", "quiet", "grid", "idle", "line", "sync", "on-sync"]) this.colour[name] = read(name);
      for (let at = 0; at < COLOURS; at++) { this.colour[at] = read(at); this.colour[`on-${at}`] = read(`on-${at}`); }
      const page = getComputedStyle(document.documentElement);
      this.colour.bad = page.getPropertyValue("--warn").trim() || this.colour.ink;
      this.colour.good = page.getPropertyValue("--good").trim() || this.colour.ink;
      const small = document.createElement("canvas");
      small.width = small.height = 8;
      const pen = small.getContext("2d");
      pen.strokeStyle = this.colour.surface;
      pen.lineWidth = 2.4;
      pen.beginPath();
      for (const at of [-8, 0, 8]) { pen.moveTo(at - 1, 9); pen.lineTo(at + 9, -1); }
      pen.stroke();
      this.hatch = this.canvas.getContext("2d").createPattern(small, "repeat");
      this.overview = null;
    }

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
      const named = this.nodes.length > 1 || (this.nodes[0] && this.nodes[0].name);
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

    /* ---- input ---- */

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const does = {
        ArrowLeft: () => this.pan(event.shiftKey ? -0.5 : -0.1), ArrowRight: () => this.pan(event.shiftKey ? 0.5 : 0.1),
        "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5), 0: () => this.show(0, this.end),
        Home: () => this.show(0, this.to - this.from), End: () => this.show(this.end - (this.to - this.from), this.end),
        n: () => this.step(1), p: () => this.step(-1),
        Escape: () => { this.picked = null; this.said = ""; this.tip.hidden = true; this.later(); },
      }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!does) return;
      event.preventDefault();
      does();
    }

    wheel(event) {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0025)), this.time(event));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.pan((event.deltaX || event.deltaY) / (this.right - this.left));
      }
    }

    down(event) {
      if (event.button) return;
      this.canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
      this.moved = 0;
    }

    move(event) {
      const before = this.pointers.get(event.pointerId);
      if (!before) { this.hover(event); return; }
      const now = [event.clientX, event.clientY];
      if (this.pointers.size === 2) {
        const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const apart = (a, b) => Math.max(Math.hypot(a[0] - b[0], a[1] - b[1]), 10);
        this.zoom(apart(now, other) / apart(before, other), this.time({clientX: (now[0] + other[0]) / 2}));
      } else {
        this.pan((before[0] - now[0]) / (this.right - this.left));
        if (event.pointerType === "mouse") this.view.scrollTop += before[1] - now[1];
      }
      this.moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
      this.pointers.set(event.pointerId, now);
      if (this.moved > 4) this.tip.hidden = true;
    }

    up(event, ended) {
      this.pointers.delete(event.pointerId);
      if (ended && this.moved <= 4) {
        const found = this.markAt(event);
        if (found) this.pick(found.mark, false);
        this.hover(event);
      }
    }

    markAt(event) {
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const lane = this.lanes[Math.floor((y - AXIS_PX) / LANE_PX)];
      if (!lane || y < AXIS_PX || x < this.left - 8) return null;
      const near = this.marks.filter((mark) => mark[1] === lane[0] && Math.abs(this.x(mark[0]) - x) < 9);
      return near.length ? {mark: this.foremost(near), near} : null;
    }

    /* The mark that represents several marks in one place. */
    foremost(marks) {
      return marks.find((mark) => mark === this.picked) || marks.find((mark) => BAD.has(mark[2])) ||
        marks.find((mark) => mark[5]) || marks.find((mark) => mark[2] !== "saved") || marks[0];
    }

    barAt(event) {
      const box = this.canvas.getBoundingClientRect();
      const y = event.clientY - box.top;
      if (y < this.head || event.clientX - box.left < this.left) return null;
      const at = y - this.head + this.view.scrollTop, moment = this.time(event);
      const near = 2 * (this.to - this.from) / (this.right - this.left);
      let node = this.tops.findLastIndex ? this.tops.findLastIndex((top) => top <= at) : -1;
      if (this.cpu.length && at >= this.cpuTop) node = -1;
      const gpu = node < 0 ? -1 : Math.floor((at - this.tops[node]) / this.row);
      if (node >= 0 && gpu >= this.nodes[node].gpus) return null;
      for (const track of this.tracks.values()) {
        if (!track.blocks.some(([top, bottom]) => top <= at && at < bottom)) continue;
        const found = firstAfter(track.ends, moment - near);
        if (found < track.starts.length && track.starts[found] <= moment + near) return {track, found, node, gpu};
      }
      return node < 0 ? null : {node, gpu};
    }

    hover(event) {
      const found = this.markAt(event), bar = found ? null : this.barAt(event);
      const lines = found ? this.markWords(found) : bar ? this.barWords(bar) : [];
      this.tip.hidden = !lines.length;
      if (!lines.length) return;
      this.tip.replaceChildren(...lines.filter(Boolean).map((line, at) => element(at ? "div" : "b", {}, line)));
      const place = this.place.getBoundingClientRect();
      const wide = this.tip.offsetWidth, x = event.clientX - place.left;
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, place.width - wide - 4))}px`;
      this.tip.style.top = `${event.clientY - place.top + 16}px`;
    }

    markWords({mark, near}) {
      const others = near.filter((one) => one !== mark), more = others.length - 4;
      return [mark[3], words(mark[0]), mark[4], ...others.slice(0, 4).map((one) => `${words(one[0])}: ${one[3]}`),
        more > 0 ? `and ${more} more` : ""];
    }

    barWords({track, found, node, gpu}) {
      const seat = node < 0 ? "" : `${this.nodes[node].name ? `${this.nodes[node].name}, ` : ""}GPU ${gpu}`;
      if (!track) return [seat, "idle or absent"];
      const look = track.looks[found], name = this.keys[track.keys[found]] || "?";
      const what = (look & 3) === SYNC ? "weight sync" : (look & 3) === SWITCH ? `${name}: switch` : name;
      const [start, end] = [track.starts[found], track.ends[found]];
      return [what, `${words(start)} to ${words(end)}: ${words(end - start)}`,
        `iteration ${track.numbers[found]}${look & VOID ? ", run again later" : ""}`, seat];
    }

    /* ---- drawing ---- */

    later() {
      if (this.waiting || !this.width) return;
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    }

    draw() {
      const pen = this.canvas.getContext("2d");
      pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      pen.clearRect(0, 0, this.width, this.tall);
      pen.font = `12px ${getComputedStyle(this.view).fontFamily}`;
      pen.textBaseline = "middle";
      this.drawn = 0;
      const scrolled = this.view.scrollTop;
      this.shift = this.head - scrolled;
      pen.save();
      pen.beginPath();
      pen.rect(this.left, this.head, this.right - this.left, this.tall - this.head);
      pen.clip();
      this.grid(pen, false);
      this.idle(pen);
      for (const track of this.tracks.values()) this.track(pen, track);
      this.heads(pen);
      this.through(pen);
      pen.restore();
      this.labels(pen);
      this.lanesAndAxis(pen);
      this.drawOverview();
      if (!this.said) this.where.textContent = this.whole ? `all of ${words(this.end)}` : `${words(this.from)} to ${words(this.to)}`;
      this.said = "";
    }

    idle(pen) {
      this.nodes.forEach((node, at) => {
        const top = this.tops[at] + this.shift, high = node.gpus * this.row;
        if (top > this.tall || top + high < this.head) return;
        pen.fillStyle = this.colour.idle;
        for (const [since, until] of node.lives) {
          const x0 = Math.max(this.x(since), this.left), x1 = Math.min(this.x(until === null ? this.end : until), this.right);
          if (x1 > x0) pen.fillRect(x0, top, x1 - x0, high);
        }
      });
      pen.strokeStyle = this.colour.grid;
      this.cpu.forEach((_, at) => {
        const x0 = Math.max(this.x(0), this.left - 1), x1 = Math.min(this.x(this.end), this.right + 1);
        pen.strokeRect(x0, this.cpuTop + at * (this.row + 2) + this.shift + 0.5, x1 - x0, this.row - 1);
      });
    }

    track(pen, track) {
      const blocks = track.blocks.filter(([top, bottom]) => bottom + this.shift > this.head && top + this.shift < this.tall);
      if (!blocks.length) return;
      const join = JOIN_PX * (this.to - this.from) / (this.right - this.left);
      const {starts, ends, keys, looks} = track;
      let at = firstAfter(ends, this.from);
      const past = firstAfter(starts, this.to);
      if (past - at > CROWD * (this.right - this.left)) { this.columns(pen, track, blocks, at, past); return; }
      while (at < starts.length && starts[at] < this.to) {
        /* Bars that cannot be told apart are merged: the name is that of most work, the opacity the busy share. */
        const start = starts[at];
        let end = ends[at], key = keys[at], look = looks[at], work = end - start, most = work, shares = null;
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
          if (end > this.to) break;
        }
        this.bar(pen, blocks, start, end, key, look, work / (end - start));
      }
    }

    /* More bars than pixels: per pixel the component with most work, the opacity its busy share. */
    columns(pen, track, blocks, first, past) {
      const {starts, ends, keys, looks} = track, wide = Math.ceil(this.right - this.left);
      const scale = (this.right - this.left) / (this.to - this.from), kinds = COLOURS + 1;
      const work = new Float32Array(wide * kinds), void_ = new Float32Array(wide);
      for (let at = first; at < past; at++) {
        const a = Math.max((starts[at] - this.from) * scale, 0), b = Math.min((ends[at] - this.from) * scale, wide);
        const kind = (looks[at] & 3) === SYNC ? COLOURS : keys[at] % COLOURS;
        for (let px = Math.floor(a); px < b; px++) {
          const part = Math.min(b, px + 1) - Math.max(a, px);
          work[px * kinds + kind] += part;
          if (looks[at] & VOID) void_[px] += part;
        }
      }
      for (let px = 0; px < wide; px++) {
        let most = 0, sum = 0;
        for (let kind = 0; kind < kinds; kind++) {
          sum += work[px * kinds + kind];
          if (work[px * kinds + kind] > work[px * kinds + most]) most = kind;
        }
        if (sum < 0.01) continue;
        pen.fillStyle = this.colour[most === COLOURS ? "sync" : most];
        pen.globalAlpha = Math.max(Math.min(sum, 1), 0.2) * (void_[px] > sum / 2 ? 0.35 : 1);
        for (const [top, bottom] of blocks) pen.fillRect(this.left + px, top + this.shift, 1, bottom - top);
        this.drawn += blocks.length;
      }
      pen.globalAlpha = 1;
    }

    bar(pen, blocks, start, end, key, look, busy) {
      const x0 = Math.max(this.x(start), this.left - 2), x1 = Math.min(this.x(end), this.right + 2);
      const wide = Math.max(x1 - x0, 0.35), kind = look & 3;
      const name = kind === SYNC ? "sync" : key % COLOURS;
      pen.fillStyle = this.colour[name];
      pen.globalAlpha = (busy < 0.995 ? Math.max(busy, 0.2) : 1) * (look & VOID ? 0.35 : 1);
      for (const [top, bottom] of blocks) pen.fillRect(x0, top + this.shift, wide, bottom - top);
      this.drawn += blocks.length;
      if (kind === SWITCH && wide > 3) {
        pen.fillStyle = this.hatch;
        for (const [top, bottom] of blocks) pen.fillRect(x0, top + this.shift, wide, bottom - top);
      }
      pen.globalAlpha = 1;
      if (wide > 5) {
        pen.fillStyle = this.colour.surface;
        for (const [top, bottom] of blocks) pen.fillRect(x1 - 0.5, top + this.shift, 1, bottom - top);
      }
      if (wide > 34 && kind !== SWITCH && !(look & VOID) && busy > 0.6 && this.row >= 12) {
        this.named_(pen, blocks, x0, x1, kind === SYNC ? "sync" : this.keys[key] || "?", this.colour[`on-${name}`]);
      }
    }

    /* The name of a bar, drawn after the lines between rows. */
    named_(pen, blocks, x0, x1, name, colour) {
      const widths = this.widths || (this.widths = new Map());
      if (!widths.has(name)) widths.set(name, pen.measureText(name).width);
      const [left, right] = [Math.max(x0, this.left), Math.min(x1, this.right)];
      if (widths.get(name) + 10 > right - left) return;
      const [top, , , , bottom] = blocks[0];  // on rows of its first node: node names stand between nodes
      if (bottom + this.shift < this.head + this.row) return;
      const low = Math.max(top, -this.shift + this.head), high = Math.min(bottom, this.tall - this.shift);
      const middle = top + (Math.floor((low + high - 2 * top) / 2 / this.row) + 0.5) * this.row;
      (this.names || (this.names = [])).push([(left + right) / 2, middle + this.shift, name, colour]);
    }

    heads(pen) {
      pen.fillStyle = this.colour.surface;
      this.nodes.forEach((node, at) => {
        const top = this.tops[at] + this.shift;
        if (top - NODE_PX > this.tall || top + node.gpus * this.row < this.head) return;
        if (this.named) pen.fillRect(this.left, top - NODE_PX, this.right - this.left, NODE_PX);
        for (let gpu = 1; gpu < node.gpus; gpu++) pen.fillRect(this.left, top + gpu * this.row - 0.5, this.right - this.left, 1);
      });
      pen.textAlign = "center";
      for (const [x, y, name, colour] of this.names || []) {
        pen.fillStyle = colour;
        pen.fillText(name, x, y + 0.5);
      }
      this.names = null;
    }

    through(pen) {
      for (const [began, ended] of this.moves) {
        const x0 = this.x(began), x1 = this.x(ended === null ? this.end : ended);
        if (x1 < this.left || x0 > this.right) continue;
        pen.globalAlpha = 0.16;
        pen.fillStyle = this.colour.ink;
        pen.fillRect(x0, this.head, Math.max(x1 - x0, 1), this.tall - this.head);
        pen.globalAlpha = 1;
      }
      pen.setLineDash([3, 3]);
      pen.lineWidth = 1;
      for (const mark of this.marks) {
        if (!mark[5] && mark !== this.picked) continue;
        const x = this.x(mark[0]);
        if (x < this.left || x > this.right) continue;
        pen.strokeStyle = mark === this.picked ? this.colour.ink : this.colour.quiet;
        pen.beginPath();
        pen.moveTo(x, this.head);
        pen.lineTo(x, this.tall);
        pen.stroke();
      }
      pen.setLineDash([]);
    }

    labels(pen) {
      pen.save();
      pen.beginPath();
      pen.rect(0, this.head, this.width, this.tall - this.head);
      pen.clip();
      pen.textAlign = "left";
      const font = pen.font;
      this.nodes.forEach((node, at) => {
        const top = this.tops[at] + this.shift;
        if (top - NODE_PX > this.tall || top + node.gpus * this.row < this.head) return;
        if (this.named) {
          pen.font = `600 ${font}`;
          pen.fillStyle = this.colour.ink;
          const name = this.cut(pen, node.name || "GPUs that no node was named for", this.width - 110);
          pen.fillText(name, 0, top - 8);
          const far = pen.measureText(name).width + 8;
          pen.font = font;
          pen.fillStyle = this.colour.quiet;
          pen.fillText(node.kind ? `${node.gpus} × ${node.kind}` : `${node.gpus} GPU${node.gpus === 1 ? "" : "s"}`, far, top - 8);
        }
        pen.fillStyle = this.colour.quiet;
        if (this.row >= 12) for (let gpu = 0; gpu < node.gpus; gpu++) pen.fillText(`GPU ${gpu}`, 0, top + (gpu + 0.5) * this.row);
      });
      pen.fillStyle = this.colour.quiet;
      this.cpu.forEach((name, at) => {
        pen.fillText(this.cut(pen, name, this.left - 6), 0, this.cpuTop + at * (this.row + 2) + this.row / 2 + this.shift);
      });
      pen.restore();
    }

    cut(pen, text, room) {
      if (pen.measureText(text).width <= room) return text;
      let kept = text;
      while (kept.length > 1 && pen.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
      return `${kept}…`;
    }

    grid(pen, labelled) {
      const most = Math.max(2, Math.floor((this.right - this.left) / 88));
      let free = this.left;
      pen.textAlign = "center";
      for (const [value, label] of ticks(this.from, this.to, most)) {
        const x = this.x(value);
        if (!labelled) {
          pen.fillStyle = this.colour.grid;
          pen.fillRect(x - 0.5, this.head, 1, this.tall - this.head);
          continue;
        }
        const half = pen.measureText(label).width / 2;
        const middle = Math.max(Math.min(x, this.right - half), this.left + half);
        if (middle - half < free) continue;
        pen.fillStyle = this.colour.quiet;
        pen.fillText(label, middle, 8);
        free = middle + half + 6;
      }
    }

    lanesAndAxis(pen) {
      this.grid(pen, true);
      this.lanes.forEach(([id, label], at) => {
        const y = AXIS_PX + at * LANE_PX + LANE_PX / 2;
        pen.textAlign = "left";
        pen.fillStyle = this.colour.quiet;
        pen.fillText(this.cut(pen, label, this.left - 6), 0, y);
        pen.fillStyle = this.colour.grid;
        pen.fillRect(this.left, y - 0.5, this.right - this.left, 1);
        if (id === "moves") this.spans(pen, y);
        this.glyphs(pen, id, y);
      });
    }

    spans(pen, y) {
      for (const [began, ended] of this.moves) {
        const x0 = Math.max(this.x(began), this.left), x1 = Math.min(this.x(ended === null ? this.end : ended), this.right);
        if (x1 < this.left || x0 > this.right) continue;
        pen.fillStyle = this.colour.line;
        pen.fillRect(x0, y - 4, Math.max(x1 - x0, 1), 8);
      }
    }

    /* Marks; overlapping ones as one, with their count. */
    glyphs(pen, lane, y) {
      let group = [];
      const put = () => {
        if (!group.length) return;
        const worst = this.foremost(group);
        const x = this.x(group[0][0]);
        pen.save();
        pen.translate(x, y);
        pen.scale(5, 5);
        pen.fillStyle = BAD.has(worst[2]) ? this.colour.bad : GOOD.has(worst[2]) ? this.colour.good : this.colour.ink;
        if (this.paths[worst[2]]) pen.fill(this.paths[worst[2]]);
        pen.restore();
        if (worst === this.picked) {
          pen.strokeStyle = this.colour.ink;
          pen.strokeRect(x - 8, y - 8, 16, 16);
        }
        if (group.length > 1 && worst[2] !== "saved") {
          const beyond = x + 18 > this.right;
          pen.textAlign = beyond ? "right" : "left";
          pen.font = pen.font.replace("12px", "10px");
          pen.fillStyle = this.colour.quiet;
          pen.fillText(String(group.length), beyond ? x - 7 : x + 7, y - 4);
          pen.font = pen.font.replace("10px", "12px");
        }
        this.drawn += 1;
        group = [];
      };
      for (const mark of this.marks) {
        if (mark[1] !== lane || mark[0] < this.from || mark[0] > this.to) continue;
        if (group.length && this.x(mark[0]) - this.x(group[0][0]) > (group.length > 1 ? CROWDED_PX + 8 : CROWDED_PX)) put();
        group.push(mark);
      }
      put();
    }

    /* GPU utilisation over the whole run, and the visible range. */
    drawOverview() {
      const high = 30, wide = Math.max(1, Math.floor(this.right - this.left)), all = this.end || 1;
      if (!this.overview) {
        const sums = this.keys.map(() => new Float64Array(wide));
        const rows = this.nodes.reduce((sum, node) => sum + node.gpus, 0) || 1;
        for (const track of this.tracks.values()) {
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
        this.overview = this.paintedOverview(sums, wide, high);
      }
      const pen = this.over.getContext("2d");
      pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      pen.clearRect(0, 0, this.width, high);
      pen.drawImage(this.overview, this.left, 0, wide, high);
      const [x0, x1] = [this.left + this.from / all * wide, this.left + this.to / all * wide];
      pen.globalAlpha = 0.7;
      pen.fillStyle = this.colour.surface;
      pen.fillRect(this.left, 0, x0 - this.left, high);
      pen.fillRect(x1, 0, this.left + wide - x1, high);
      pen.globalAlpha = 1;
      pen.strokeStyle = this.colour.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x0 + 0.75, 0.75, Math.max(x1 - x0 - 1.5, 2), high - 1.5);
      pen.lineWidth = 1;
    }

    /* Cached until data, size or colours change. */
    paintedOverview(sums, wide, high) {
      const painted = document.createElement("canvas"), pen = painted.getContext("2d");
      painted.width = wide;
      painted.height = high * 2;
      pen.scale(1, 2);
      pen.fillStyle = this.colour.idle;
      pen.fillRect(0, 0, wide, high);
      for (let px = 0; px < wide; px++) {
        let y = high;
        sums.forEach((sum, key) => {
          const tall = Math.min(sum[px], 1) * high;
          if (tall < 0.2) return;
          pen.fillStyle = this.colour[key % COLOURS];
          pen.fillRect(px, y - tall, 1, tall);
          y -= tall;
        });
      }
      return painted;
    }
  }

  globalThis.trimtabTimeline = {make: (place, data, options) => new Timeline(place, data, options)};

  for (const place of document.querySelectorAll("[data-run-timeline]")) {
    const data = JSON.parse(document.getElementById(place.dataset.runTimeline).textContent);
    const row = (mark) => document.getElementById(`e${mark[6]}`);
    const picked = (mark) => {
      for (const old of document.querySelectorAll("tr.picked")) old.classList.remove("picked");
      const found = row(mark);
      if (!found) return;
      found.classList.add("picked");
      const scroll = found.closest(".scroll");
      if (scroll) scroll.scrollTop = found.offsetTop - scroll.clientHeight / 3;
    };
    const timeline = trimtabTimeline.make(place, data, {picked});
    trimtabTimeline.first = trimtabTimeline.first || timeline;
    for (const mark of data.marks || []) {
      const cell = row(mark) && row(mark).querySelector("td");
      if (!cell) continue;
      const button = element("button", {type: "button", class: "rt-at", title: "Show in the timeline"}, cell.textContent);
      button.addEventListener("click", () => {
        timeline.pick(mark, true);
        place.scrollIntoView({block: "nearest"});
      });
      cell.replaceChildren(button);
    }
  }
})();
