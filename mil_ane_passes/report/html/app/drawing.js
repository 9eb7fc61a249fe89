// Drawing of the graph: only the visible part, with less detail at a smaller zoom.

const MANY = 1500; // number of ops from which the graph is cached as a picture: drawing them takes more than a frame
const MOST_PIXELS = 8e6; // most pixels of this picture, 32 MB: browsers limit the memory of a canvas
const EDGE = 24;

Object.assign(graph, {
  // Geometry

  spot(at) {
    const { layer, columns, y } = this.layout;
    return [(layer[at] % columns) * BOX.across, y[at]];
  },

  /** Returns the row at a point of the canvas; -1 if no op is there. */
  at(x, y) {
    const { view, layout } = this;
    const [wx, wy] = [view.x + x / view.k, view.y + y / view.k];
    const slack = view.k < 0.3 ? 6 / view.k : 0;
    const column = Math.floor(wx / BOX.across);
    const line = layout.lines.find(({ top, height }) => wy >= top - slack && wy <= top + height + slack);
    if (!line || column < 0 || column >= layout.columns || wx % BOX.across > BOX.width + slack) return -1;
    const members = layout.layers[line.from + column] || [];
    const far = (at) => Math.abs(wy - layout.y[at] - BOX.height / 2);
    const nearest = members.reduce((best, at) => (best < 0 || far(at) < far(best) ? at : best), -1);
    return nearest >= 0 && far(nearest) <= BOX.height / 2 + slack ? layout.first + nearest : -1;
  },

  // Drawing

  draw() {
    const { pen, size, view } = this;
    const started = performance.now();
    const picture = this.picture();
    pen.setTransform(size.dense, 0, 0, size.dense, 0, 0);
    pen.fillStyle = this.ink.page;
    pen.fillRect(0, 0, size.width, size.height);
    const drawn = picture ? this.lay(picture) : this.paint();
    this.last = { drawn, took: performance.now() - started };
    this.canvas.dataset.drawn = drawn;
    this.canvas.dataset.zoom = view.k.toPrecision(4);
    this.canvas.dataset.centre = `${Math.round(view.x + size.width / 2 / view.k)},${Math.round(view.y + size.height / 2 / view.k)}`;
  },

  /** Draws the visible part; returns the number of visible ops. */
  paint() {
    const seen = this.inView();
    this.edges(seen);
    let drawn = 0;
    for (const { layers } of seen) {
      for (const members of layers) for (const at of members) drawn += this.box(at);
    }
    return drawn;
  },

  /** Returns the whole graph as a picture, which is reused until the zoom changes; null for few ops or a large picture. */
  picture() {
    const { layout, view, size } = this;
    const [width, height] = [layout.width * view.k + 2 * EDGE, layout.height * view.k + 2 * EDGE];
    const pixels = width * height * size.dense ** 2;
    if (layout.size < MANY || BOX.width * view.k >= 30 || pixels > MOST_PIXELS) return null;
    const key = [view.k, size.dense];
    const known = this.kept;
    if (known && known.layout === layout && known.ink === this.ink && String(known.key) === String(key)) return known;
    const canvas = document.createElement("canvas");
    canvas.width = Math.ceil(width * size.dense);
    canvas.height = Math.ceil(height * size.dense);
    const here = { pen: this.pen, view: this.view, size: this.size };
    this.pen = canvas.getContext("2d");
    this.pen.setTransform(size.dense, 0, 0, size.dense, 0, 0);
    this.view = { x: -EDGE / view.k, y: -EDGE / view.k, k: view.k };
    this.size = { width, height, dense: size.dense };
    this.plain = true;
    const drawn = this.paint();
    this.plain = false;
    Object.assign(this, here);
    this.kept = { layout, ink: this.ink, key, canvas, drawn };
    return this.kept;
  },

  /** Draws the visible part of the picture, aligned to pixels, and marks the chosen op. */
  lay({ canvas, drawn }) {
    const { pen, view, size, layout } = this;
    const snap = (value) => Math.round(value * size.dense) / size.dense;
    const [left, top] = [snap(-view.x * view.k - EDGE), snap(-view.y * view.k - EDGE)];
    pen.drawImage(canvas, left, top, canvas.width / size.dense, canvas.height / size.dense);
    for (const row of new Set([this.cursor, state.chosen?.row ?? -1])) {
      const at = row - layout.first;
      if (at < 0 || at >= layout.size) continue;
      const [x, y] = this.spot(at);
      this.ring(row, (x - view.x) * view.k, (y - view.y) * view.k, BOX.width * view.k);
    }
    return drawn;
  },

  /** Returns the visible lines, each with its visible layers. */
  inView() {
    const { layout, view, size } = this;
    const first = Math.max(0, Math.floor(view.x / BOX.across));
    const last = Math.ceil((view.x + size.width / view.k) / BOX.across);
    const [top, bottom] = [view.y, view.y + size.height / view.k];
    return layout.lines.flatMap((line, place) =>
      line.top + line.height < top - BOX.line || line.top > bottom + BOX.line
        ? []
        : [{ place, layers: layout.layers.slice(line.from + first, Math.min(line.to, line.from + last + NEAR)) }],
    );
  },

  edges(seen) {
    const { pen, layout, view } = this;
    pen.strokeStyle = this.ink["line-strong"];
    pen.globalAlpha = 0.65;
    pen.lineWidth = Math.max(0.5, Math.min(1.5, view.k * 1.4));
    pen.beginPath();
    for (const { place, layers } of seen) {
      for (const members of layers) for (const at of members) this.edgesOf(at);
      for (const [maker, at] of layout.long[place]) this.edge(maker, at);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  },

  /** Draws the edges to ops in the same line; an edge from or to another line is a short stub. */
  edgesOf(at) {
    const { pen, layout, view } = this;
    layout.short[at].forEach((maker) => this.edge(maker, at));
    if (!layout.comes[at] && !layout.goes[at]) return;
    const [x, y] = this.spot(at);
    const middle = (y + BOX.height / 2 - view.y) * view.k;
    const stub = (from, to) => {
      pen.moveTo((from - view.x) * view.k, middle);
      pen.lineTo((to - view.x) * view.k, middle);
    };
    if (layout.comes[at]) stub(x - 16, x);
    if (layout.goes[at]) stub(x + BOX.width, x + BOX.width + 16);
  },

  edge(maker, at) {
    const { pen, view, layout } = this;
    const [x1, y1] = this.spot(maker);
    const [x2, y2] = this.spot(at);
    const [ax, ay] = [(x1 + BOX.width - view.x) * view.k, (y1 + BOX.height / 2 - view.y) * view.k];
    const [bx, by] = [(x2 - view.x) * view.k, (y2 + BOX.height / 2 - view.y) * view.k];
    pen.moveTo(ax, ay);
    const span = layout.layer[at] - layout.layer[maker];
    if (view.k < 0.12) {
      pen.lineTo(bx, by);
      return;
    }
    const bow = span > 1 && Math.abs(y1 - y2) < BOX.down ? (34 + 7 * Math.min(span, 14)) * view.k : 0;
    const pull = Math.min((bx - ax) / 2, 90 * view.k);
    pen.bezierCurveTo(ax + pull, ay - bow, bx - pull, by - bow, bx, by);
  },

  /** Draws one op; returns 1 if it is visible. */
  box(at) {
    const { pen, view, size, layout, report, ink } = this;
    const [x, y] = this.spot(at);
    const [left, top, wide] = [(x - view.x) * view.k, (y - view.y) * view.k, BOX.width * view.k];
    if (top > size.height || top + BOX.height * view.k < -8 || left > size.width || left + wide < 0) return 0;
    const row = layout.first + at;
    const ane = report.onAne(row);
    if (wide < 30) {
      const high = Math.max(ane ? 3 : 5, BOX.height * view.k * (ane ? 1 : 1.6));
      pen.fillStyle = ane ? ink.ane : ink.cpu;
      pen.fillRect(left, top + (BOX.height * view.k - high) / 2, Math.max(1.5, wide), high);
    } else this.card(row, left, top, wide, ane);
    if (!this.plain && (row === this.cursor || (state.chosen && state.chosen.row === row))) this.ring(row, left, top, wide);
    return 1;
  },

  card(row, left, top, wide, ane) {
    const { pen, view, report, ink } = this;
    const high = BOX.height * view.k;
    const mark = 20 * view.k;
    pen.fillStyle = ink[ane ? "ane-soft" : "cpu-soft"];
    pen.strokeStyle = ink[ane ? "ane" : "cpu"];
    pen.lineWidth = 1;
    pen.setLineDash(ane ? [] : [5 * view.k, 3 * view.k]);
    pen.beginPath();
    pen.roundRect(left, top, wide, high, 5 * view.k);
    pen.fill();
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = ink[ane ? "ane" : "cpu"];
    pen.beginPath();
    pen.roundRect(left, top, mark, high, [5 * view.k, 0, 0, 5 * view.k]);
    pen.fill();
    if (view.k < 0.4) return;
    this.words(
      ane ? "A" : "C",
      left + mark / 2,
      top + high / 2,
      12,
      700,
      ink[ane ? "on-ane" : "on-cpu"],
      mark,
      "center",
    );
    this.words(
      report.type(row),
      left + mark + 7 * view.k,
      top + 13 * view.k,
      12.5,
      650,
      ink.text,
      wide - mark - 36 * view.k,
    );
    this.words(
      report.output(row),
      left + mark + 7 * view.k,
      top + 27 * view.k,
      10.5,
      400,
      ink.soft,
      wide - mark - 12 * view.k,
    );
    if (report.found[row].some((finding) => data.severities[finding.severity].fails))
      this.words("▲", left + wide - 9 * view.k, top + 12 * view.k, 10, 400, ink.warn, mark, "center");
  },

  words(words, x, y, points, weight, colour, room, align = "left") {
    const { pen, view } = this;
    pen.font = `${weight} ${points * view.k}px ${this.font}`;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    pen.fillStyle = colour;
    const fits = Math.max(1, Math.floor(room / (points * view.k * 0.55)));
    pen.fillText(words.length > fits ? `${words.slice(0, fits - 1)}…` : words, x, y);
  },

  ring(row, left, top, wide) {
    const { pen, view, ink } = this;
    if (row === this.cursor || this.cursor < 0) this.canvas.dataset.ring = `${row},${Math.round(left + wide / 2)},${Math.round(top + (BOX.height * view.k) / 2)}`;
    pen.strokeStyle = ink.focus;
    pen.lineWidth = 2.5;
    pen.beginPath();
    pen.roundRect(left - 4, top - 4, Math.max(8, wide + 8), Math.max(12, BOX.height * view.k + 8), 7);
    pen.stroke();
  },
});
