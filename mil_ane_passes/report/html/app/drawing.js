// How the graph is drawn: what is in view only, and less of it the further one is away.

Object.assign(graph, {
  // Geometry

  spot(at) {
    return [this.layout.layer[at] * BOX.across, this.layout.y[at]];
  },

  /** The row under a point of the canvas; -1 for none. */
  at(x, y) {
    const { view, layout } = this;
    const [wx, wy] = [view.x + x / view.k, view.y + y / view.k];
    const members = layout.layers[Math.floor(wx / BOX.across)] || [];
    const slack = view.k < 0.3 ? 6 / view.k : 0;
    if (wx % BOX.across > BOX.width + slack) return -1;
    const found = members.find((at) => wy >= layout.y[at] - slack && wy <= layout.y[at] + BOX.height + slack);
    return found === undefined ? -1 : layout.first + found;
  },

  // Drawing

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  },

  draw() {
    const { pen, size, layout, view } = this;
    const started = performance.now();
    pen.setTransform(size.dense, 0, 0, size.dense, 0, 0);
    pen.fillStyle = this.ink.page;
    pen.fillRect(0, 0, size.width, size.height);
    const from = Math.max(0, Math.floor(view.x / BOX.across));
    const to = Math.min(layout.layers.length - 1, Math.ceil((view.x + size.width / view.k) / BOX.across));
    this.edges(from, to);
    let drawn = 0;
    for (let depth = from; depth <= to; depth++) {
      for (const at of layout.layers[depth]) drawn += this.box(at);
    }
    this.band();
    this.last = { drawn, took: performance.now() - started };
    this.canvas.dataset.drawn = drawn;
    this.canvas.dataset.zoom = view.k.toPrecision(4);
    this.canvas.dataset.centre = `${Math.round(view.x + size.width / 2 / view.k)},${Math.round(view.y + size.height / 2 / view.k)}`;
  },

  edges(from, to) {
    const { pen, layout, view } = this;
    pen.strokeStyle = this.ink["line-strong"];
    pen.globalAlpha = 0.6;
    pen.lineWidth = Math.max(0.5, Math.min(1.5, view.k * 1.4));
    pen.beginPath();
    for (let depth = from; depth <= Math.min(to + 3, layout.layers.length - 1); depth++) {
      for (const at of layout.layers[depth]) layout.short[at].forEach((maker) => this.edge(maker, at));
    }
    for (const [maker, at] of layout.long) {
      if (layout.layer[at] >= from && layout.layer[maker] <= to) this.edge(maker, at);
    }
    pen.stroke();
    pen.globalAlpha = 1;
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

  /** One op; returns 1 if it is in view. */
  box(at) {
    const { pen, view, size, layout, report, ink } = this;
    const [x, y] = this.spot(at);
    const [left, top, wide] = [(x - view.x) * view.k, (y - view.y) * view.k, BOX.width * view.k];
    if (top > size.height || top + BOX.height * view.k < -8 || left > size.width || left + wide < 0) return 0;
    const row = layout.first + at;
    const ane = report.onAne(row);
    if (wide < 30) {
      const high = Math.max(ane ? 4 : 9, BOX.height * view.k * (ane ? 1 : 1.35));
      pen.fillStyle = ane ? ink.ane : ink.cpu;
      pen.fillRect(left, top + (BOX.height * view.k - high) / 2, Math.max(1.5, wide), high);
    } else this.card(row, left, top, wide, ane);
    if (row === this.cursor || (state.chosen && state.chosen.row === row)) this.ring(left, top, wide);
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
      wide - mark - 26 * view.k,
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
    if (report.found[row].length)
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

  ring(left, top, wide) {
    const { pen, view, ink } = this;
    pen.strokeStyle = ink.focus;
    pen.lineWidth = 2.5;
    pen.beginPath();
    pen.roundRect(left - 4, top - 4, Math.max(8, wide + 8), Math.max(12, BOX.height * view.k + 8), 7);
    pen.stroke();
  },

  /** A thin band below: the whole graph, its CPU ops, and the part in view. */
  band() {
    const { pen, size, layout, view, ink } = this;
    if (!layout.size || (view.x <= 0 && view.x + size.width / view.k >= layout.width)) return;
    const [high, top] = [6, size.height - 6];
    pen.fillStyle = ink.ane;
    pen.fillRect(0, top, size.width, high);
    pen.fillStyle = ink.cpu;
    layout.islands ??= layout.layers.map((members) => members.some((at) => !this.report.onAne(layout.first + at)));
    const step = size.width / layout.layers.length;
    layout.islands.forEach((cpu, depth) => cpu && pen.fillRect(depth * step, top - 3, Math.max(1.5, step), high + 3));
    pen.strokeStyle = ink.text;
    pen.lineWidth = 2;
    const scale = size.width / layout.width;
    pen.strokeRect(Math.max(1, view.x * scale), top - 5, Math.max(6, (size.width / view.k) * scale), high + 4);
  },
});
