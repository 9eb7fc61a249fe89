// The model before and after a rewrite, side by side: numbers, strips, and removed, new and moved ops and findings.

const changesView = {
  start() {
    if (!data.changes) return;
    byId("changes").hidden = false;
    byId("versus").replaceChildren(...reports.map((report, side) => this.side(report, side)));
    const { gone, new: made, moved, fixed, found } = data.changes;
    const [before, after] = reports;
    byId("changed").replaceChildren(
      this.group(
        "Fixed findings",
        fixed.map((place) => before.hits[place]),
        (one) => this.finding(one, 0),
      ),
      this.group(
        "New findings",
        found.map((place) => after.hits[place]),
        (one) => this.finding(one, 1),
      ),
      this.group("Removed ops", gone, (row) => this.op(row, 0)),
      this.group("New ops", made, (row) => this.op(row, 1)),
      this.group("Moved ops", moved, ([from, to]) => this.op(to, 1, `${before.place(from)} → ${after.place(to)}`)),
    );
  },

  side(report, side) {
    const name = side ? "After" : "Before";
    return el(
      "div",
      {},
      el("h3", {}, name, el("span", { class: "facts name" }, base(report.model))),
      el("table", { "aria-label": `${name}: summary` }, el("tbody", {}, ...this.lines(report, side))),
      ...report.functions.map((one, place) => this.strip(report, one, place)),
    );
  },

  /** Draws both sides on one scale: the faster one is shorter. */
  strip(report, one, place) {
    const total = (of) => of.segments.reduce((sum, segment) => sum + segment[3], 0);
    const longest = Math.max(...reports.flatMap(({ functions }) => functions).map(total));
    const strip = stripOf(report, one, place, false);
    strip.style.width = `${longest ? Math.max(12, (100 * total(one)) / longest) : 100}%`;
    const words = el("span", {}, "Function ", named(one.name), `, ${time(total(one))} estimated`);
    return el("div", {}, el("p", { class: "strip-name" }, words), strip);
  },

  lines(report, side) {
    const rows = [
      ["ops", (one) => one.summary.ops, (value) => value.toLocaleString("en"), 0],
      ["predicted on the ANE", share, percent, 1],
      ["segmenter's estimate on the ANE", (one) => one.summary.predicted_time_share, percent, 1],
      ["segmenter's total estimate", (one) => one.summary.est_ms, time, -1],
      ["latency", (one) => one.summary.latency_us, (value) => (value === null ? "–" : time(value / 1000)), -1],
      ["transitions", (one) => one.summary.transitions, (value) => value.toLocaleString("en"), -1],
      ["findings", (one) => one.hits.length, (value) => value.toLocaleString("en"), -1],
      ["bytes with padding", (one) => one.summary.padded_bytes, bytes, -1],
    ];
    return rows.map(([name, of, show, good]) => {
      const gain = side ? Math.sign(of(reports[1]) - of(reports[0])) * good : 0;
      const [style, word] = gain > 0 ? ["better", " (better)"] : gain < 0 ? ["worse", " (worse)"] : ["", ""];
      return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: style }, show(of(report)), word));
    });
  },

  group(name, items, build) {
    const head = el(
      "summary",
      {},
      el("span", { class: "group-title" }, el("b", {}, name)),
      el("span", { class: "group-side" }, el("b", {}, items.length.toLocaleString("en"))),
    );
    const box = el("details", { class: "group" }, head);
    head.addEventListener("click", () => {
      if (box.children.length > 1) return;
      const list = items.length ? stepped(items, 50, build) : el("p", { class: "note" }, "None.");
      box.append(list);
      if (items.length) roving(list, "button.item", { grow: list.grow });
    });
    return box;
  },

  /** Builds a button that chooses its op or finding on the given side (before or after). */
  item(side, what, ...children) {
    const go = () => {
      showSide(side);
      choose(what, "changes");
    };
    return el("button", { type: "button", class: "item", onclick: go }, ...children);
  },

  op(row, side, moved = "") {
    const report = reports[side];
    return this.item(
      side,
      { kind: "op", row },
      badge(report.onAne(row) ? "ane" : "cpu", report.place(row)),
      " ",
      el("span", { class: "what name" }, report.title(row)),
      el("span", { class: "why" }, [moved, report.kind(row)].filter(Boolean).join(" · ")),
    );
  },

  finding(finding, side) {
    return this.item(
      side,
      { kind: "finding", finding, row: finding.row },
      el("span", { class: "what" }, `${finding.of.code} ${finding.of.slug} `),
      named(text(finding.value)),
      el("span", { class: "why text" }, text(finding.reason)),
    );
  },
};
