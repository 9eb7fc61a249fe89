// A sortable table. Only the visible rows are in the document, so ten thousand rows scroll as fast as ten.

const ROW = 30;
const SPARE = 8;
let grids = 0;

class Grid {
  /** `columns`: {label, width, number, value(row), build(row)}. Rows are sorted by `value`, which is also shown if there is no `build`. */
  constructor(host, { label, columns, select = () => {}, sorted = null, none = "Nothing to show." }) {
    Object.assign(this, { columns, select, sorted, none, rows: [], order: [], active: -1, chosen: null });
    this.id = `grid${grids++}`;
    this.shape = columns.map((column) => column.width).join(" ");
    this.body = el("div", { class: "grid-body", role: "rowgroup" });
    const least = columns.reduce((sum, { width }) => sum + Number(/[\d.]+/.exec(width)[0]), 0);
    const inner = el("div", { class: "grid-inner", role: "presentation" }, this.head(), this.body);
    inner.style.minWidth = `${least}rem`;
    this.box = el(
      "div",
      { class: "grid", role: "grid", tabindex: 0, "aria-label": label, "aria-colcount": columns.length },
      inner,
    );
    this.box.addEventListener("scroll", () => drawSoon(this));
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => drawSoon(this)).observe(this.box);
    host.replaceChildren(this.box);
  }

  head() {
    this.heads = this.columns.map((column, place) =>
      el(
        "div",
        { class: `cell${column.number ? " number" : ""}`, role: "columnheader", "aria-colindex": place + 1 },
        el("button", { type: "button", onclick: () => this.sort(place) }, column.label),
      ),
    );
    const row = el("div", { class: "grid-row", role: "row", "aria-rowindex": 1 }, ...this.heads);
    row.style.gridTemplateColumns = this.shape;
    return el("div", { class: "grid-head", role: "rowgroup" }, row);
  }

  show(rows) {
    this.rows = rows;
    this.arrange();
  }

  sort(place) {
    const [now, way] = this.sorted || [];
    const first = this.columns[place].number ? -1 : 1;
    this.sorted = now === place ? (way === first ? [place, -first] : null) : [place, first];
    this.arrange();
    const sorted = this.sorted
      ? `by ${this.columns[place].label}, ${this.sorted[1] > 0 ? "ascending" : "descending"}`
      : "as given";
    say(`Sorted ${sorted}`);
  }

  arrange() {
    this.heads.forEach((head, place) => {
      const way = this.sorted && this.sorted[0] === place ? this.sorted[1] : 0;
      head.setAttribute("aria-sort", way > 0 ? "ascending" : way < 0 ? "descending" : "none");
    });
    this.order = this.sorted ? this.inOrder(...this.sorted) : this.rows;
    this.places = new Map(this.order.map((row, place) => [row, place]));
    this.active = this.places.get(this.chosen) ?? (this.order.length ? 0 : -1);
    this.box.setAttribute("aria-rowcount", this.order.length + 1);
    this.body.style.height = `${this.order.length * ROW}px`;
    this.box.scrollTop = 0;
    this.reveal(this.chosen);
    this.draw();
  }

  inOrder(place, way) {
    const column = this.columns[place];
    const key = column.sort || column.value;
    const keyed = this.rows.map((row) => [key(row), row]);
    const less = column.number ? ([a], [b]) => (a ?? -1) - (b ?? -1) : ([a], [b]) => (a < b ? -1 : a > b ? 1 : 0);
    return keyed.sort((a, b) => way * less(a, b)).map(([, row]) => row);
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - SPARE);
    const last = Math.min(this.order.length, first + Math.ceil(this.box.clientHeight / ROW) + 2 * SPARE);
    const made = [];
    for (let place = first; place < last; place++) made.push(this.line(place));
    if (this.active >= 0 && (this.active < first || this.active >= last)) made.push(this.line(this.active));
    if (this.order.length) this.body.replaceChildren(...made);
    else
      this.body.replaceChildren(
        el("div", { class: "grid-none", role: "row" }, el("div", { role: "gridcell" }, this.none)),
      );
    this.body.style.minHeight = this.order.length ? "" : "3.5rem";
    this.mark();
  }

  line(place) {
    const row = this.order[place];
    const cells = this.columns.map((column, index) =>
      el(
        "div",
        {
          class: `cell${column.number ? " number" : ""}`,
          role: "gridcell",
          "aria-colindex": index + 1,
          title: column.build ? null : (column.shown?.(row) ?? column.value(row)),
        },
        column.build ? column.build(row) : String(column.shown?.(row) ?? column.value(row)),
      ),
    );
    const line = el(
      "div",
      {
        class: `grid-row${row === this.chosen ? " chosen" : ""}`,
        role: "row",
        id: `${this.id}r${place}`,
        "aria-rowindex": place + 2,
        "aria-selected": row === this.chosen,
        onclick: () => {
          this.active = place;
          this.pick();
        },
      },
      ...cells,
    );
    line.style.gridTemplateColumns = this.shape;
    line.style.transform = `translateY(${place * ROW}px)`;
    return line;
  }

  mark() {
    this.body.querySelector(".active")?.classList.remove("active");
    const line = this.active < 0 ? null : byId(`${this.id}r${this.active}`);
    if (line) line.classList.add("active");
    if (line) this.box.setAttribute("aria-activedescendant", line.id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  key(event) {
    if (event.target !== this.box || !this.order.length) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 2);
    const there = {
      ArrowDown: this.active + 1,
      ArrowUp: this.active - 1,
      PageDown: this.active + page,
      PageUp: this.active - page,
      Home: 0,
      End: this.order.length - 1,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") this.pick();
    else if (there === undefined) return;
    else this.go(Math.max(0, Math.min(this.order.length - 1, there)));
    event.preventDefault();
  }

  go(place) {
    this.active = place;
    const head = this.heads[0].offsetHeight;
    const top = place * ROW;
    const view = this.box.clientHeight - head;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + view) this.box.scrollTop = top + ROW - view;
    this.draw();
  }

  pick() {
    this.chosen = this.order[this.active];
    this.draw();
    this.select(this.chosen);
  }

  /** Scrolls to `row`, unless a filter hides it, and marks it. */
  reveal(row) {
    this.chosen = row;
    const place = row === null ? undefined : this.places?.get(row);
    if (place !== undefined) this.go(place);
    else this.draw();
  }
}
