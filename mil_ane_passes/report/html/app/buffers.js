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
        label: "Values",
        width: "7rem",
        number: true,
        value: (row) => list(row)[DENSE],
        shown: (row) => bytes(list(row)[DENSE]),
      },
      {
        label: "Rows filled",
        width: "7rem",
        number: true,
        value: (row) => list(row)[ROWS],
        shown: (row) => bytes(list(row)[ROWS]),
      },
      { label: "Times", width: "6rem", number: true, value: times, shown: (row) => `${times(row).toFixed(2)}×` },
      {
        label: "Filling",
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
    byId("buffers-words").textContent = wordsOf(buffers);
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

/** What filling costs in all, and the tensor with the most of it. */
function wordsOf(buffers) {
  const [VALUE, SHAPE, DENSE, ROWS] = [1, 2, 3, 4];
  const filling = (one) => one[ROWS] - one[DENSE];
  const worst = buffers.reduce((most, one) => (!most || filling(one) > filling(most) ? one : most), null);
  if (!worst || !filling(worst)) return "Here no row has to be filled.";
  const all = buffers.reduce((sum, one) => sum + filling(one), 0);
  const factor = worst[DENSE] ? `, ${(worst[ROWS] / worst[DENSE]).toFixed(1)} times as much` : "";
  return (
    `Here that adds ${bytes(all)}. The most of it, ${bytes(filling(worst))}, is for ${text(worst[VALUE])}: a tensor of ` +
    `${text(worst[SHAPE])} needs ${bytes(worst[DENSE])} and takes ${bytes(worst[ROWS])}${factor}.`
  );
}
