// What tensors take on the ANE beyond what they need.

const buffersView = {
  start() {
    const [FUNCTION, VALUE, SHAPE, DENSE, ROWS, WHOLE] = [0, 1, 2, 3, 4, 5];
    const list = (row) => current().buffers[row];
    const times = (row) => (list(row)[DENSE] ? list(row)[ROWS] / list(row)[DENSE] : 1);
    const columns = [
      { label: "Tensor", width: "minmax(11rem, 2fr)", value: (row) => text(list(row)[VALUE]) },
      { label: "Shape", width: "minmax(9rem, 1fr)", value: (row) => text(list(row)[SHAPE]) },
      {
        label: "Needed",
        width: "7rem",
        number: true,
        value: (row) => list(row)[DENSE],
        shown: (row) => bytes(list(row)[DENSE]),
      },
      {
        label: "Padded",
        width: "7rem",
        number: true,
        value: (row) => list(row)[ROWS],
        shown: (row) => bytes(list(row)[ROWS]),
      },
      { label: "Factor", width: "6rem", number: true, value: times, shown: (row) => `${times(row).toFixed(2)}×` },
      {
        label: "Wasted",
        width: "7rem",
        number: true,
        value: (row) => list(row)[ROWS] - list(row)[DENSE],
        shown: (row) => bytes(list(row)[ROWS] - list(row)[DENSE]),
      },
      {
        label: "Buffer",
        width: "7rem",
        number: true,
        value: (row) => list(row)[WHOLE],
        shown: (row) => bytes(list(row)[WHOLE]),
      },
    ];
    if (reports.some((report) => report.functions.length > 1)) {
      columns.splice(2, 0, { label: "Function", width: "8rem", value: (row) => text(list(row)[FUNCTION]) });
    }
    this.grid = new Grid(byId("buffers-grid"), {
      label: "Buffers",
      columns,
      sorted: [columns.length - 2, -1],
      none: "No tensor of a fixed shape.",
      select: (row) => this.choose(row),
    });
    when("side", () => this.show());
    this.show();
  },

  show() {
    const { buffers, summary: sums } = current();
    byId("buffers-count").textContent =
      `${count(buffers.length, "tensor")}: ${bytes(sums.dense_bytes)} needed, ${bytes(sums.padded_bytes)} as buffers`;
    this.grid.show(buffers.map((_, row) => row));
  },

  /** The op that makes the tensor; a function's input has none. */
  choose(row) {
    const report = current();
    const [inside, value] = report.buffers[row];
    const made = report.rows.find(
      (one) => report.ops.output[one] === value && report.functions[report.functionOf[one]].name === text(inside),
    );
    if (made !== undefined) choose({ kind: "op", row: made }, "buffers");
    else say(`${text(value)} is made by no op: an input, or a further output of one.`);
  },
};
