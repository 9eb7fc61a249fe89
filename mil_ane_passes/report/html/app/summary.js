// The head of the page: the model, the prediction, and its evidence.

const base = (path) =>
  path
    .replace(/[\\/]+$/, "")
    .split(/[\\/]/)
    .pop();
const share = (report) => report.summary.predicted_share;
const factor = (report) => (report.summary.dense_bytes ? report.summary.padded_bytes / report.summary.dense_bytes : 1);

/** Formats our estimate of the run time with its range. It is not the segmenter's estimate, which decides placement. */
function latencyTile({ latency_us: middle, latency_low_us: low, latency_high_us: high }) {
  if (middle === null) return ["latency", "–"];
  return [`latency (${time(low / 1000)} to ${time(high / 1000)})`, time(middle / 1000)];
}

function tilesOf(report) {
  const { summary } = report;
  return [
    ["of ops on the ANE", percent(share(report))],
    ["of the segmenter's estimate on the ANE", percent(summary.predicted_time_share)],
    ["estimate of Core ML's segmenter (decides placement)", time(summary.est_ms)],
    latencyTile(summary),
    ["transitions", summary.transitions.toLocaleString("en")],
    ["findings", report.hits.length.toLocaleString("en")],
    ["memory with padding, relative to unpadded", `${factor(report).toFixed(2)}×`],
  ];
}

function verdict(report) {
  const { ops, predicted_on_ane: on, transitions, ane_unknown: unknown } = report.summary;
  const support = report.support ? `; ${report.support}` : "";
  if (!ops) return ["This program has no ops.", ""];
  const what =
    on === ops
      ? `All ${ops.toLocaleString("en")} ops are predicted to run on the ANE`
      : on === 0
        ? `None of ${count(ops, "op")} is predicted to run on the ANE`
        : `${on.toLocaleString("en")} of ${count(ops, "op")} are predicted to run on the ANE, with ${count(transitions, "transition")}`;
  const open = unknown ? " For an op that was not measured on this target, the nearest evidence is used." : "";
  return [`${what}${support}.`, `${report.cause}${idle(report)}${open}`.trim()];
}

/** Describes ops that are supported on the ANE, but predicted to run on the CPU. */
const stays = (report, row) => !report.onAne(row) && report.answer(row) === "yes" && report.ops.est_ane[row] !== null;
const staying = (report, rows) => rows.filter((row) => stays(report, row)).length;

function idle(report) {
  const many = staying(report, report.rows);
  const cpu = report.size - report.summary.predicted_on_ane;
  if (!many) return "";
  if (many === cpu) return " All ops on the CPU are supported on the ANE, but moving them there costs more than it saves.";
  return ` Of the ops on the CPU, ${many.toLocaleString("en")} ${many === 1 ? "is" : "are"} supported on the ANE, but moving ${many === 1 ? "it" : "them"} there costs more than it saves.`;
}

function basisText(report) {
  const { measured } = report;
  const ran = measured
    ? `The report also shows Core ML's measurement on ${measured.where}.`
    : "The model was not run.";
  return (
    `${ran} Support on the ANE is inferred from published measurements and reports, which each finding cites. ` +
    "Times of ops and partitions are predictions of the estimate of Core ML's segmenter on an M4, whatever the target; " +
    `this estimate decides placement and is not a run time. ${latencyBasis(report)} ` +
    "The placement on a device may differ with chip, system and model."
  );
}

const latencyBasis = ({ latency }) => (latency ? `Estimated ${latency}.` : "");

const summary = {
  start() {
    const several = reports.length > 1;
    byId("sides").hidden = !several;
    if (several)
      byId("sides").replaceChildren(
        ...["Before", "After"].map((name, side) =>
          el("button", { type: "button", onclick: () => showSide(side) }, name),
        ),
      );
    byId("foot").textContent =
      `Made by ${data.tool} ${data.version}. This file is self-contained and does not use the network.`;
    when("side", () => this.show());
    this.show();
  },

  show() {
    const report = current();
    fill(byId("model"), named(base(report.model)));
    const chips = data.chips.length && data.target !== "all" ? ` (${data.chips.join(", ")})` : "";
    byId("facts").textContent = `Target ${data.target}${chips} · ${report.model}`;
    byId("basis").textContent = basisText(report);
    this.measured(report);
    this.network(report);
    [byId("verdict").textContent, byId("further").textContent] = verdict(report);
    byId("tiles").replaceChildren(
      ...tilesOf(report).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
    [...byId("sides").children].forEach((button, side) => button.setAttribute("aria-pressed", side === state.side));
  },

  /** Shows the lines about the layers of a NeuralNetwork. */
  network({ network: lines }) {
    byId("network").hidden = !lines;
    if (lines) byId("network-lines").replaceChildren(...lines.map((line) => el("li", { class: "text" }, line)));
  },

  /** Shows Core ML's measurement, if there is one, with links to the ops for which it differs from the prediction. */
  measured(report) {
    const { measured } = report;
    byId("measured").hidden = !measured;
    if (!measured) return;
    byId("measured-head").textContent = `Measured on ${measured.where}`;
    byId("measured-lines").replaceChildren(...measured.lines.map((line) => el("li", { class: "text" }, line)));
    fill(
      byId("measured-ops"),
      measured.differ.length ? el("h3", { class: "tier" }, "Different from the prediction") : null,
      this.differing(measured.differ),
    );
  },

  differing(rows) {
    if (!rows.length) return null;
    const list = stepped(rows, 10, (row) => changesView.op(row, state.side));
    roving(list, "button.item", { grow: list.grow });
    return list;
  },
};
