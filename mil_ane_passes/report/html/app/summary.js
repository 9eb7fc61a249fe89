// The head of the page: which model, what is predicted, and what that rests on.

const base = (path) =>
  path
    .replace(/[\\/]+$/, "")
    .split(/[\\/]/)
    .pop();
const share = (report) => report.summary.predicted_share;
const factor = (report) => (report.summary.dense_bytes ? report.summary.padded_bytes / report.summary.dense_bytes : 1);

/** Our estimate of the run time, with its range; the segmenter's decides placement and is another one. */
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
    ["times the memory that values need", `${factor(report).toFixed(2)}×`],
  ];
}

function verdict(report) {
  const { ops, predicted_on_ane: on, transitions, ane_unknown: unknown } = report.summary;
  const support = report.support ? `; ${report.support}` : "";
  if (!ops) return ["This program has no ops: there is nothing to place.", ""];
  const what =
    on === ops
      ? `All ${ops.toLocaleString("en")} ops are predicted to run on the ANE`
      : on === 0
        ? `None of ${count(ops, "op")} is predicted to run on the ANE`
        : `${on.toLocaleString("en")} of ${count(ops, "op")} are predicted to run on the ANE, with ${count(transitions, "transition")}`;
  const open = unknown ? " Where nobody measured an op on this target, the nearest evidence decides." : "";
  return [`${what}${support}.`, `${report.cause}${idle(report)}${open}`.trim()];
}

/** Ops that are supported on the ANE, and that are predicted to run on the CPU all the same. */
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
    ? `What Core ML said of it on ${measured.where} stands beside the prediction.`
    : "Nobody ran this model.";
  return (
    `${ran} Whether an op is supported on the ANE rests on published measurements and reports, cited with each finding. ` +
    "Times of ops and segments are what Core ML's planner is predicted to estimate on an M4, whatever the target; " +
    `they decide placement and are no run times. ${latencyBasis(report)} ` +
    "What the ANE really does can differ with chip, system and model."
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
      `Made by ${data.tool} ${data.version}. This file holds all it shows and asks the network for nothing.`;
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

  /** What is reported of the layers of a model in the older format. */
  network({ network: lines }) {
    byId("network").hidden = !lines;
    if (lines) byId("network-lines").replaceChildren(...lines.map((line) => el("li", { class: "text" }, line)));
  },

  /** What a Mac said, where somebody asked one; the ops about which we had said otherwise lead to their details. */
  measured(report) {
    const { measured } = report;
    byId("measured").hidden = !measured;
    if (!measured) return;
    byId("measured-head").textContent = `Measured on ${measured.where}`;
    byId("measured-lines").replaceChildren(...measured.lines.map((line) => el("li", { class: "text" }, line)));
    fill(
      byId("measured-ops"),
      measured.differ.length ? el("h3", { class: "tier" }, "Predicted otherwise") : null,
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
