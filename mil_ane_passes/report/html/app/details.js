// The panel with the details of the chosen op, finding or partition.

const FIRST = 3;

const details = {
  start() {
    this.body = byId("details-body");
    byId("details-close").addEventListener("click", () => this.close());
    byId("details").addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    when("chosen", (from) => this.show(from));
    this.show();
  },

  close() {
    byId("details").classList.remove("open");
    this.from?.isConnected && this.from.focus();
  },

  /** Opens the panel. In a narrow window it covers the page, so it is not opened for the initial choice. */
  show(from) {
    const { chosen } = state;
    const panel = byId("details");
    panel.classList.toggle("open", Boolean(chosen) && from !== "start");
    panel.scrollTop = 0;
    this.from = document.activeElement;
    const parts = !chosen
      ? [
          el(
            "p",
            { class: "lone" },
            "Choose a finding, a partition or an op. Its predicted placement, the reason, the evidence and the fixes are shown here.",
          ),
        ]
      : chosen.kind === "segment"
        ? this.segment(chosen)
        : this.op(chosen);
    fill(this.body, ...parts);
    if (chosen && from !== "start") say(this.words(chosen));
  },

  words({ kind, row, finding, ...piece }) {
    const report = current();
    if (kind === "segment") return `Chosen partition: ${pieceText(piece)}. Details are shown.`;
    const about =
      row === null || row === undefined ? text(finding.value) : `${report.title(row)}, ${report.place(row)}`;
    return `${finding ? `${finding.of.code} ${finding.of.slug}, ` : "Op "}${about}. Details are shown.`;
  },

  // Ops and findings

  op({ row, finding }) {
    if (row === null || row === undefined)
      return [this.heading(text(finding.type), text(finding.value)), this.finding(finding, true)];
    const report = current();
    const others = report.found[row].filter((one) => one !== finding);
    const shown = [...(finding ? [finding] : []), ...others];
    const [main, ...rest] = shown;
    return [
      this.heading(report.type(row), report.output(row)),
      this.facts(report, row, new Set(shown.map((one) => text(one.reason)))),
      main ? this.finding(main, main === finding) : null,
      ...rest.slice(0, 12).map((one) => this.folded(one)),
      report.answer(row) === "yes" ? this.accepted(report, row) : null,
      this.costs(report, row),
      this.latency(report, row),
      this.attributes(report, row),
      this.weights(report, row),
      this.mil(report, row),
      this.around(report, row),
    ];
  },

  heading(type, name) {
    return el("div", { class: "title" }, el("h3", {}, type), el("p", { class: "mono name" }, name));
  },

  facts(report, row, explained) {
    const pairs = [
      ["Runs on", [badge(report.onAne(row) ? "ane" : "cpu", report.place(row)), " predicted"]],
      ["ANE support", [answerText(report.answer(row))]],
      ["Type", [named(report.kind(row))]],
    ];
    if (report.reason(row) && !explained.has(report.reason(row))) pairs.push(["Why", [report.reason(row)]]);
    if (stays(report, row))
      pairs.push(["Placed", ["on the CPU, as a transition would cost more than it saves"]]);
    if (report.told.has(row)) pairs.push(["Measured", [measuredText(report, row)]]);
    if (report.functions.length > 1) pairs.push(["Function", [named(report.functions[report.functionOf[row]].name)]]);
    if (report.origin(row)) pairs.push(["Origin", [named(report.origin(row))]]);
    return this.pairs(pairs);
  },

  pairs(pairs) {
    return el(
      "dl",
      { class: "pairs" },
      ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, ...value)]),
    );
  },

  finding(finding, chosen) {
    const rule = finding.of;
    const heading = `${rule.code} ${rule.slug}`;
    return el(
      "section",
      { class: `finding${chosen ? " chosen" : ""}`, "aria-label": heading },
      el("h3", {}, codeLink(rule), ` ${rule.slug}`),
      el("p", { class: "says text" }, text(finding.reason)),
      finding.message >= 0
        ? el("div", {}, el("h4", {}, "Message of Core ML"), el("blockquote", {}, text(finding.message)))
        : null,
      ...this.fix(finding.remedy),
      this.pairs([
        ...(finding.near ? [["Kind", ["a near miss: the rule does not apply"]]] : []),
        ...(finding.refuses
          ? [
              [
                "Off the ANE",
                [finding.sure ? "yes, by this rule" : "unknown: between measured sizes that pass and measured sizes that fail"],
              ],
            ]
          : []),
        ...(finding.near ? [] : [["Severity", [data.severities[finding.severity].title.toLowerCase()]]]),
        ["Confidence", [rule.confidence]],
        ...(finding.origin >= 0 ? [["Origin", [named(text(finding.origin))]]] : []),
      ]),
      this.covered(finding),
      this.evidence("Evidence", finding.evidence || rule.evidence),
    );
  },

  /** Builds a folded box for another finding about the same op: its title, and the details on demand. */
  folded(finding) {
    const head = el(
      "summary",
      {},
      el("b", {}, `${finding.of.code} ${finding.of.slug}`),
      el("span", { class: "text" }, ` ${text(finding.reason)}`),
    );
    const box = el("details", { class: "further" }, head);
    head.addEventListener("click", () => box.children.length > 1 || box.append(this.finding(finding, false)));
    return box;
  },

  fix(fix) {
    if (!fix) return [];
    const commands = fix.commands.map((one) => commandBox(one));
    return [
      commands.length ? el("h4", {}, "Fix") : null,
      fix.pass ? el("p", {}, el("code", {}, fix.pass), ` · ${fix.how}`) : null,
      ...commands,
      fix.advice ? el("div", {}, el("h4", {}, "Advice"), el("p", { class: "text" }, fix.advice)) : null,
    ];
  },

  covered(finding) {
    if (finding.covers.length < 2) return null;
    const some = finding.covers.slice(0, 8);
    return el(
      "div",
      {},
      el("h4", {}, `Applies to ${count(finding.covers.length, "op")}`),
      this.links(some),
      el(
        "button",
        { type: "button", class: "quiet", onclick: () => opsView.only(finding.of.code) },
        `All ops of ${finding.of.code} in the table`,
      ),
    );
  },

  evidence(title, sources) {
    if (!sources.length) return null;
    const list = (some) => el("ul", { class: "evidence" }, ...some.map((source) => this.source(source)));
    const more = sources.slice(FIRST);
    const fold = more.length
      ? el("details", { class: "more-evidence" }, el("summary", {}, count(more.length, "more source")), list(more))
      : null;
    return el("div", {}, el("h4", {}, title), list(sources.slice(0, FIRST)), fold);
  },

  source({ says, source, kind, chip, os, date }) {
    const who = `${kind[0].toUpperCase()}${kind.slice(1)}: ${source}. `;
    const where = `${chip || "Chip not stated"}, ${os || "OS not stated"}, ${date || "date not stated"}.`;
    return el("li", {}, el("span", { class: "text" }, says), el("span", { class: "who" }, who + where));
  },

  accepted(report, row) {
    const seen = report.accepted.filter((one) => one.types.includes(report.type(row))).map((one) => one.source);
    return this.evidence("Evidence of support on the ANE", seen);
  },

  costs(report, row) {
    const of = [report.ops.est_ane, report.ops.est_bnns, report.ops.est_classic];
    const lines = ENGINES.map((name, engine) =>
      el(
        "tr",
        { class: report.ops.engine[row] === engine ? "taken" : null },
        el("th", { scope: "row" }, name, report.ops.engine[row] === engine ? " (predicted)" : ""),
        el("td", {}, of[engine][row] === null ? "unsupported" : time(of[engine][row])),
      ),
    );
    const guess = report.ops.guess[row] ? ", a guess: this kind of op was not measured" : "";
    return el(
      "table",
      { class: "costs" },
      el("caption", {}, `Estimate of Core ML's segmenter on M4 (decides placement)${guess}`),
      el("tbody", {}, ...lines),
    );
  },

  latency(report, row) {
    const spent = report.ops.latency_us[row];
    if (spent === null) return null;
    return el("p", { class: "note" }, `Latency: ${time(spent / 1000)}, ${text(report.ops.latency_term[row])}`);
  },

  attributes(report, row) {
    const listed = pairsOf(report.ops.attributes[row]);
    if (!listed.length) return null;
    const shown = listed.map(([name, value]) => [text(name), [el("span", { class: "mono name" }, text(value))]]);
    return el("div", {}, el("h4", {}, "Attributes"), this.pairs(shown));
  },

  weights(report, row) {
    const listed = pairsOf(report.ops.weights[row]);
    if (!listed.length) return null;
    const some = listed.slice(0, 12).map(([name, place]) => this.weight(text(name), report.weights[place]));
    const more = listed.length - some.length;
    return el(
      "div",
      { class: "weights" },
      el("h4", {}, listed.length > 1 ? "Weights" : "Weight"),
      ...some,
      more > 0 ? el("p", { class: "note" }, `${more.toLocaleString("en")} more are not listed.`) : null,
    );
  },

  weight(name, weight) {
    const { statistics: found, sampled } = weight;
    const pairs = [
      [name, [named(text(weight.type))]],
      ["Size", [weightSize(weight)]],
    ];
    if (weight.compressed >= 0) pairs.push(["Compression", [text(weight.compressed).replaceAll("_", " ")]]);
    if (found) {
      pairs.push(
        ["Range", [found.min === null ? "no finite value" : `${number(found.min)} to ${number(found.max)}`]],
        ["Mean", [`${number(found.mean)}, deviation ${number(found.std)}`]],
        ["Zeros", [percent(100 * found.zeros)]],
      );
      if (found.nonfinite) pairs.push(["Inf or NaN", [percent(100 * found.nonfinite)]]);
    }
    const words = found
      ? sampled && `Computed from a sample of ${sampled.toLocaleString("en")} values.`
      : weight.compressed >= 0
        ? "No statistics: the values are compressed."
        : "No statistics: the values are not numbers, or the report's limit on read weights was reached.";
    return el("div", { class: "weight" }, this.pairs(pairs), words ? el("p", { class: "facts" }, words) : null);
  },

  mil(report, row) {
    return el(
      "div",
      {},
      el("h4", {}, "MIL"),
      el("pre", { tabindex: 0, "aria-label": "MIL text" }, report.ops.mil[row]),
    );
  },

  around(report, row) {
    const [from, to] = [report.ops.reads[row], report.readers[row]];
    return el(
      "div",
      {},
      from.length ? el("h4", {}, "Reads") : null,
      from.length ? this.links(from.slice(0, 12)) : null,
      to.length ? el("h4", {}, "Users") : null,
      to.length ? this.links(to.slice(0, 12)) : null,
    );
  },

  links(rows) {
    const report = current();
    return el(
      "div",
      { class: "links" },
      ...rows.map((row) =>
        el(
          "button",
          {
            type: "button",
            onclick: () => {
              choose({ kind: "op", row }, "details");
              byId("details").focus({ preventScroll: true });
            },
          },
          `${report.onAne(row) ? "A" : "C"} · ${report.title(row)}`,
        ),
      ),
    );
  },

  // Partitions

  segment(piece) {
    const report = current();
    const rows = report.rows.slice(piece.first, piece.last + 1);
    const [short, long] = BACKENDS[piece.backend];
    const kinds = tally(rows.map((row) => report.type(row)))
      .slice(0, 8)
      .map(([name, many]) => `${many} ${name}`);
    const reasons = tally(
      rows
        .filter((row) => !report.onAne(row) && !stays(report, row) && report.reason(row))
        .map((row) => report.reason(row)),
    );
    const idleOps = staying(report, rows);
    if (idleOps) reasons.unshift(["Supported on the ANE, but a transition costs more than it saves", idleOps]);
    const why =
      piece.backend === "ane" || !reasons.length
        ? null
        : el(
            "div",
            {},
            el("h4", {}, "Why ops are on the CPU"),
            el(
              "ul",
              { class: "evidence" },
              ...reasons
                .slice(0, 6)
                .map(([reason, many]) => el("li", { class: "text" }, `${reason} (${count(many, "op")})`)),
            ),
          );
    return [
      el("div", { class: "title" }, el("h3", {}, badge(piece.backend, short), ` ${long} partition`)),
      this.pairs([
        ["Ops", [`${count(rows.length, "op")}${piece.segments > 1 ? ` in ${piece.segments} partitions` : ""}`]],
        ["Time", [`${time(piece.ms)} estimated, without transitions`]],
        ["Kinds", [kinds.join(", ")]],
      ]),
      why,
      el(
        "div",
        {},
        el("h4", {}, rows.length > 12 ? "First and last ops" : "Ops"),
        this.links(rows.length > 12 ? [...rows.slice(0, 6), ...rows.slice(-6)] : rows),
      ),
    ];
  },
};

function measuredText(report, row) {
  const [preferred, takes, cost] = report.told.get(row);
  const words = [preferred ? `on the ${preferred.toUpperCase()}` : "device not reported"];
  if (takes !== null) words.push(takes ? "supported on the ANE" : "unsupported on the ANE");
  if (cost !== null) words.push(`${percent(100 * cost)} of the cost`);
  return `${words.join(", ")} (${report.measured.where})`;
}

function tally(words) {
  const counts = new Map();
  words.forEach((word) => counts.set(word, (counts.get(word) || 0) + 1));
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/** Converts [a, b, c, d] to [[a, b], [c, d]]. */
const pairsOf = (flat) =>
  Array.from({ length: flat.length / 2 }, (_, place) => [flat[2 * place], flat[2 * place + 1]]);

const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

function weightSize({ bytes: stored, dense }) {
  if (!dense) return bytes(stored);
  return `${bytes(stored)} instead of ${bytes(dense)}`;
}
