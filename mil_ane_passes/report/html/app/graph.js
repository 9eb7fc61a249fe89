// The graph on a canvas: view, input, and the op under the cursor. Only the visible part is drawn.

const NO_GRAPH = { first: 0, size: 0, layers: [], lines: [], columns: 1, line: () => 0, width: 1, height: 1 };

const graph = {
  view: { x: 0, y: 0, k: 1 },
  laid: new Map(),
  cursor: -1,
  pointers: new Map(),

  start() {
    this.canvas = byId("canvas");
    this.pen = this.canvas.getContext("2d");
    this.listen();
    this.colours();
    when("theme", () => this.colours());
    when("side", () => this.open());
    when("function", () => this.open());
    when("chosen", (from) => this.follow(from));
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    byId("graph-function").addEventListener("change", (event) => showFunction(Number(event.target.value)));
    this.open();
  },

  listen() {
    const { canvas } = this;
    byId("zoom-in").addEventListener("click", () => this.zoom(1.4));
    byId("zoom-out").addEventListener("click", () => this.zoom(1 / 1.4));
    byId("zoom-fit").addEventListener("click", () => this.fit());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    ["pointerup", "pointercancel"].forEach((name) => canvas.addEventListener(name, (event) => this.up(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
  },

  colours() {
    this.ink = Object.fromEntries(
      [
        "page",
        "card",
        "line",
        "line-strong",
        "text",
        "soft",
        "ane",
        "cpu",
        "on-ane",
        "on-cpu",
        "ane-soft",
        "cpu-soft",
        "focus",
        "warn",
      ].map((name) => [name, theme.colour(name)]),
    );
    this.font = getComputedStyle(document.body).fontFamily;
    drawSoon(this);
  },

  open() {
    const { functions } = current();
    const box = byId("graph-function");
    byId("graph-function-box").hidden = functions.length < 2;
    box.replaceChildren(...functions.map((one, place) => el("option", { value: place }, one.name)));
    box.value = state.function;
    this.report = current();
    this.layout = this.laidOut();
    this.cursor = -1;
    const one = functions[state.function];
    this.canvas.setAttribute(
      "aria-label",
      one
        ? `Graph of ${one.name}: ${count(one.count, "op")} in ` +
            `${count(this.layout.layers.length, "layer")}, ${count(one.segments.length, "partition")}`
        : "Graph without functions",
    );
    this.resize();
    this.fit();
  },

  laidOut() {
    const key = `${state.side}/${state.function}`;
    const known = this.report.functions[state.function];
    if (!this.laid.has(key)) this.laid.set(key, known ? layoutOf(this.report, state.function, 2.4) : { ...NO_GRAPH });
    return this.laid.get(key);
  },

  resize() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const dense = devicePixelRatio || 1;
    this.size = { width, height, dense };
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    this.draw();
  },

  // View

  whole() {
    const { width, height } = this.size;
    return Math.min(1.1, (width - 40) / this.layout.width, (height - 50) / this.layout.height);
  },

  fit() {
    this.view.k = Math.max(1e-5, this.whole());
    this.centre(this.layout.width / 2, this.layout.height / 2);
    this.place();
  },

  centre(x, y) {
    const { k } = this.view;
    this.view.x = x - this.size.width / 2 / k;
    this.view.y = y - this.size.height / 2 / k;
    drawSoon(this);
  },

  /** Zooms by the factor `step` around a point of the canvas, which keeps its position. */
  zoom(step, x = this.size.width / 2, y = this.size.height / 2) {
    const { view } = this;
    const k = Math.min(3, Math.max(Math.min(this.whole(), 0.5) * 0.8, view.k * step));
    view.x += x / view.k - x / k;
    view.y += y / view.k - y / k;
    view.k = k;
    drawSoon(this);
    this.place();
  },

  pan(x, y) {
    this.view.x += x / this.view.k;
    this.view.y += y / this.view.k;
    drawSoon(this);
  },

  place(words = "") {
    byId("graph-place").textContent = words || `${Math.round(this.view.k * 100) || "under 1"} %`;
  },

  // Input

  wheel(event) {
    const meant = event.ctrlKey || event.metaKey || document.activeElement === this.canvas;
    if (!meant) {
      this.place("Click the graph, or hold Ctrl, to zoom with the wheel");
      return;
    }
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    this.zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY * lines)) * 0.0022), event.offsetX, event.offsetY);
  },

  down(event) {
    this.canvas.setPointerCapture?.(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.moved = this.pointers.size > 1 ? Infinity : 0;
  },

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.hover(event);
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const now = [event.offsetX, event.offsetY];
    this.pointers.set(event.pointerId, now);
    this.moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    if (!others.length) {
      if (this.moved > 4) this.pan(before[0] - now[0], before[1] - now[1]);
      return;
    }
    const [other] = others;
    const far = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1;
    this.zoom(far(now) / far(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    this.pan((before[0] - now[0]) / 2, (before[1] - now[1]) / 2);
  },

  up(event) {
    const mine = this.pointers.delete(event.pointerId);
    if (!mine || event.type !== "pointerup" || this.moved > 4) return;
    const row = this.at(event.offsetX, event.offsetY);
    if (row >= 0) this.pick(row);
  },

  hover(event) {
    const row = this.at(event.offsetX, event.offsetY);
    this.canvas.style.cursor = row >= 0 ? "pointer" : "";
    this.place(
      row < 0 ? "" : `${this.report.title(row)} · ${this.report.place(row)} · ${time(this.report.spent(row))}`,
    );
  },

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: [-60, 0], ArrowRight: [60, 0], ArrowUp: [0, -60], ArrowDown: [0, 60] };
    const { key } = event;
    if (key === "+" || key === "=") this.zoom(1.25);
    else if (key === "-" || key === "_") this.zoom(0.8);
    else if (key === "0") this.fit();
    else if (moves[key]) this.pan(...moves[key]);
    else if (key === "]" || key === "[") this.step(key === "]" ? 1 : -1);
    else if (key === "Enter" || key === " ") {
      if (this.cursor >= 0) this.pick(this.cursor);
      else this.step(1);
    } else return;
    event.preventDefault();
  },

  step(by) {
    const { first, size } = this.layout;
    if (!size) return;
    const from = this.cursor >= 0 ? this.cursor - first : by > 0 ? -1 : size;
    this.cursor = first + Math.max(0, Math.min(size - 1, from + by));
    this.show(this.cursor);
    const { report, cursor } = this;
    say(
      `${report.title(cursor)}, ${report.place(cursor)}, supported on the ANE: ${report.answer(cursor)}. Enter shows details.`,
    );
    this.place(`${report.title(cursor)} · ${report.place(cursor)}`);
  },

  pick(row) {
    this.cursor = row;
    choose({ kind: "op", row }, "graph");
    drawSoon(this);
  },

  /** Moves the view to an op that was chosen in another part of the page. */
  follow(from) {
    const { chosen } = state;
    if (!chosen || from === "graph" || from === "start") {
      drawSoon(this);
      return;
    }
    if (chosen.kind === "segment") this.span(chosen.first, chosen.last);
    else if (chosen.row !== null && chosen.row !== undefined) {
      this.cursor = chosen.row;
      this.show(chosen.row);
    }
  },

  show(row) {
    const [x, y] = this.spot(row - this.layout.first);
    if (this.view.k < 0.7) this.view.k = 0.8;
    this.centre(x + BOX.width / 2, y + BOX.height / 2);
    this.inside();
    this.place();
  },

  /** Limits the position of the view, so that as little as possible of it is outside the graph. */
  inside() {
    const { view, layout, size } = this;
    const kept = (at, room, extent) =>
      extent + 40 / view.k < room
        ? (extent - room) / 2
        : Math.max(-20 / view.k, Math.min(at, extent - room + 20 / view.k));
    view.x = kept(view.x, size.width / view.k, layout.width);
    view.y = kept(view.y, size.height / view.k, layout.height);
  },

  /** Shows a partition: all of it if it is in one line and readable, else its start. */
  span(first, last) {
    const { layout, size } = this;
    const [[x1, y1], [x2]] = [first, last].map((row) => this.spot(row - layout.first));
    const whole = layout.line(first - layout.first) === layout.line(last - layout.first);
    const wide = whole ? Math.abs(x2 - x1) + BOX.width : BOX.width;
    this.view.k = Math.max(0.45, Math.min(1, (size.width - 40) / wide));
    const middle = wide * this.view.k < size.width ? Math.min(x1, x2) + wide / 2 : x1 + size.width / this.view.k / 2.2;
    this.centre(middle, y1 + BOX.height / 2);
    this.inside();
    this.place();
  },
};
