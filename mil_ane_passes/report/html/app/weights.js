// The table of stored weights, with their formats, and the totals by format.

const weightsView = {
  start() {
    const [FUNCTION, VALUE, SHAPE, FORMAT, STORED, DENSE, READER] = [0, 1, 2, 3, 4, 5, 6];
    const list = (row) => current().storage.weights[row];
    const columns = [
      { label: "Weight", width: "minmax(11rem, 2fr)", value: (row) => text(list(row)[VALUE]) },
      { label: "Shape", width: "minmax(9rem, 1fr)", value: (row) => text(list(row)[SHAPE]) },
      { label: "Format", width: "minmax(9rem, 1fr)", value: (row) => text(list(row)[FORMAT]) },
      { label: "Read by", width: "minmax(9rem, 1fr)", value: (row) => text(list(row)[READER]) },
      {
        label: "Stored",
        width: "7rem",
        number: true,
        value: (row) => list(row)[STORED],
        shown: (row) => bytes(list(row)[STORED]),
      },
      {
        label: "Unpacked",
        width: "7rem",
        number: true,
        value: (row) => list(row)[DENSE],
        shown: (row) => bytes(list(row)[DENSE]),
      },
    ];
    if (reports.some((report) => report.functions.length > 1)) {
      columns.splice(1, 0, { label: "Function", width: "8rem", value: (row) => text(list(row)[FUNCTION]) });
    }
    this.grid = new Grid(byId("weights-grid"), {
      label: "Weights",
      columns,
      sorted: [columns.length - 2, -1],
      none: "The model has no weights.",
      select: (row) => this.choose(row),
    });
    when("side", () => this.show());
    this.show();
  },

  show() {
    const { storage } = current();
    byId("weights-count").textContent =
      `${count(storage.weights.length, "weight")}: ${bytes(storage.stored)} stored, ${bytes(storage.dense)} unpacked`;
    byId("weights-words").textContent = [
      ...storage.formats.map(([name, many, stored]) => `${name}: ${count(many, "weight")}, ${bytes(stored)}.`),
      storage.duplicates,
      `Values that are live at once, in program order, occupy at most ${bytes(storage.peak)} (computed from the ` +
        "layout on the ANE).",
    ].join(" ");
    this.grid.show(storage.weights.map((_, row) => row));
  },

  /** Chooses the first op that reads the weight. */
  choose(row) {
    const report = current();
    const [inside, value] = report.storage.weights[row];
    const reads = (one) => pairsOf(report.ops.weights[one]).some(([, place]) => report.weights[place].name === value);
    const reader = report.rows.find((one) => report.functions[report.functionOf[one]].name === text(inside) && reads(one));
    if (reader !== undefined) choose({ kind: "op", row: reader }, "weights");
    else say(`${text(value)} is read by no op of the table.`);
  },
};
