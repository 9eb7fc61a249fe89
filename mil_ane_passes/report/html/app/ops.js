// The table of ops, with search, filters and sorting. It is the text form of the graph.

const opsView = {
  start() {
    this.form = byId("filters");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => this.apply());
    this.form.addEventListener("reset", () => requestAnimationFrame(() => this.apply()));
    this.grid = new Grid(byId("ops-grid"), {
      label: "Ops",
      columns: this.columns(),
      none: "No op matches these filters.",
      select: (row) => choose({ kind: "op", row }, "ops"),
    });
    when("side", () => this.open());
    when("chosen", (from) => this.follow(from));
    this.open();
  },

  columns() {
    const now = current;
    return [
      { label: "#", width: "2.6rem", number: true, value: (row) => now().ops.index[row] },
      {
        label: "Op",
        width: "7.9rem",
        value: (row) => now().type(row),
        shown: (row) => `${"· ".repeat(now().ops.depth[row])}${now().type(row)}`,
      },
      { label: "Output", width: "minmax(6rem, 1fr)", value: (row) => now().output(row) },
      { label: "Type", width: "9.8rem", value: (row) => now().kind(row) },
      {
        label: "Runs on",
        width: "4.4rem",
        value: (row) => now().place(row),
        build: (row) => badge(now().onAne(row) ? "ane" : "cpu", now().place(row)),
      },
      {
        label: "Supported",
        width: "5.4rem",
        value: (row) => now().answer(row),
        build: (row) => answerText(now().answer(row)),
      },
      {
        label: "µs",
        width: "4.8rem",
        number: true,
        value: (row) => now().spent(row),
        shown: (row) => digits(now().spent(row) * 1000),
      },
      {
        label: "Codes",
        width: "6.7rem",
        value: (row) => now().codes(row).join(" "),
        shown: (row) => shortened(now().codes(row)),
      },
      { label: "Why", width: "minmax(6.5rem, 2fr)", value: (row) => now().reason(row) },
    ];
  },

  open() {
    const report = current();
    const kept = this.values?.() || {};
    const codes = [...new Set(report.hits.map((finding) => finding.of.code))].sort();
    const field = (label, control, wide) => el("label", { class: wide ? "wide" : null }, label, control);
    const options = (name, ...values) =>
      el("select", { name }, ...values.map(([value, shown]) => el("option", { value }, shown)));
    fill(
      this.form,
      field(
        "Search",
        el("input", { type: "search", name: "words", placeholder: "name, op, reason, origin", autocomplete: "off" }),
        true,
      ),
      field("Runs on", options("backend", ["", "either"], ["ANE", "ANE"], ["CPU", "CPU"])),
      field("ANE support", options("answer", ["", "any"], ["yes", "yes"], ["no", "no"], ["unknown", "unknown"])),
      field("Code", options("code", ["", "any"], ...codes.map((code) => [code, code]))),
      report.functions.length > 1
        ? field(
            "Function",
            options("function", ["", "all"], ...report.functions.map((one, place) => [place, one.name])),
          )
        : null,
      el("button", { type: "reset" }, "Clear"),
    );
    for (const [name, value] of Object.entries(kept))
      if (this.form.elements[name]) this.form.elements[name].value = value;
    this.hay = report.rows.map((row) =>
      [
        report.type(row),
        report.output(row),
        report.kind(row),
        report.reason(row),
        report.codes(row).join(" "),
        report.origin(row),
      ]
        .join("\n")
        .toLowerCase(),
    );
    this.apply();
  },

  values() {
    return Object.fromEntries(new FormData(this.form));
  },

  apply() {
    const report = current();
    const { words = "", backend, answer, code, function: inside = "" } = this.values();
    const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = report.rows.filter(
      (row) =>
        parts.every((part) => this.hay[row].includes(part)) &&
        (!backend || report.place(row) === backend) &&
        (!answer || report.answer(row) === answer) &&
        (!code || report.codes(row).includes(code)) &&
        (inside === "" || report.functionOf[row] === Number(inside)),
    );
    byId("ops-count").textContent =
      rows.length === report.size
        ? count(report.size, "op")
        : `${rows.length.toLocaleString("en")} of ${count(report.size, "op")}`;
    this.grid.show(rows);
  },

  /** Only the ops of `code`, from the details panel. */
  only(code) {
    this.form.reset();
    this.form.elements.code.value = code;
    this.apply();
    byId("ops").scrollIntoView();
    this.grid.box.focus();
  },

  follow(from) {
    if (from === "ops") return;
    const { chosen } = state;
    this.grid.reveal(chosen ? (chosen.kind === "segment" ? chosen.first : (chosen.row ?? null)) : null);
  },
};

/** Formats the first code and the number of further ones. */
const shortened = (codes) => (codes.length > 1 ? `${codes[0]} +${codes.length - 1}` : codes.join(""));

function answerText(answer) {
  return el("span", { class: `answer-${answer}` }, { yes: "✓ yes", no: "✕ no", unknown: "? unknown" }[answer]);
}
