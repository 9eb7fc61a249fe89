// The table of tensors with the memory that padding adds on the ANE.

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
        label: "Rows padded",
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
      none: "No tensor has a fixed shape.",
      select: (row) => this.choose(row),
    });
    when("side", () => this.show());
    this.show();
  },

  show() {
    const { buffers, summary: sums } = current();
    byId("buffers-count").textContent =
      `${count(buffers.length, "tensor")}: ${bytes(sums.dense_bytes)}, padded ${bytes(sums.padded_bytes)}`;
    byId("buffers-words").textContent = wordsOf(buffers);
    this.grid.show(buffers.map((_, row) => row));
  },

  /** Chooses the op that computes the tensor; a function's input has no op. */
  choose(row) {
    const report = current();
    const [inside, value] = report.buffers[row];
    const made = report.rows.find(
      (one) => report.ops.output[one] === value && report.functions[report.functionOf[one]].name === text(inside),
    );
    if (made !== undefined) choose({ kind: "op", row: made }, "buffers");
    else say(`${text(value)} has no row in the table of ops: it is an input, or not the first output of its op.`);
  },
};

/** Describes the total size of the padding, and the tensor with the largest padding. */
function wordsOf(buffers) {
  const [VALUE, SHAPE, DENSE, ROWS] = [1, 2, 3, 4];
  const filling = (one) => one[ROWS] - one[DENSE];
  const worst = buffers.reduce((most, one) => (!most || filling(one) > filling(most) ? one : most), null);
  if (!worst || !filling(worst)) return "In this model, no row is padded.";
  const all = buffers.reduce((sum, one) => sum + filling(one), 0);
  const factor = worst[DENSE] ? `, ${(worst[ROWS] / worst[DENSE]).toFixed(1)} times its size` : "";
  return (
    `In this model, padding of rows adds ${bytes(all)}. The largest part, ${bytes(filling(worst))}, is for ` +
    `${text(worst[VALUE])}: a tensor of ${text(worst[SHAPE])} has ${bytes(worst[DENSE])} and occupies ` +
    `${bytes(worst[ROWS])}${factor}.`
  );
}
