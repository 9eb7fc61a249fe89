// The data of the report, the state of the page (chosen op, function, side), and listeners for its changes.

const data = JSON.parse(byId("data").textContent);
const text = (place) => (place < 0 ? "" : data.texts[place]);
const ANSWERS = ["no", "unknown", "yes"];
const ENGINES = ["ANE", "CPU, BNNS", "CPU, classic"];

class Report {
  constructor(raw) {
    Object.assign(this, raw);
    this.size = (this.ops.index || []).length;
    this.rows = Array.from({ length: this.size }, (_, row) => row);
    this.findings.forEach((finding, place) => {
      finding.place = place;
      finding.of = this.rules[finding.rule];
      finding.remedy = this.fixes[finding.fix] ?? null;
    });
    this.hits = this.findings.filter((finding) => !finding.near);
    this.nears = this.findings.filter((finding) => finding.near);
    this.functionOf = new Int32Array(this.size);
    this.functions.forEach((one, place) => this.functionOf.fill(place, one.first, one.first + one.count));
    this.told = new Map((this.measured?.ops || []).map(([row, ...said]) => [row, said]));
    this.found = this.byRow();
    this.readers = this.rows.map(() => []);
    this.rows.forEach((row) => this.ops.reads[row].forEach((maker) => this.readers[maker].push(row)));
  }

  /** Returns for each row the findings that cover it, the worst first, then those that cover the fewest ops. */
  byRow() {
    const found = this.rows.map(() => []);
    for (const finding of this.hits) {
      const rows = finding.covers.length ? finding.covers : finding.row === null ? [] : [finding.row];
      rows.forEach((row) => found[row] && found[row].push(finding));
    }
    const weight = (finding) => [-finding.refuses, finding.severity, finding.covers.length];
    const worst = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
    found.forEach((hits) => hits.length > 1 && hits.sort((a, b) => worst(weight(a), weight(b))));
    return found;
  }

  type(row) {
    return text(this.ops.type[row]);
  }
  output(row) {
    return text(this.ops.output[row]);
  }
  kind(row) {
    return text(this.ops.kind[row]);
  }
  reason(row) {
    return text(this.ops.reason[row]);
  }
  origin(row) {
    return text(this.ops.origin[row]);
  }
  blocker(row) {
    return text(this.ops.blocker[row]);
  }
  onAne(row) {
    return this.ops.on_ane[row] === 1;
  }
  answer(row) {
    return ANSWERS[this.ops.ane[row]];
  }
  cpu(row) {
    return Math.min(this.ops.est_bnns[row] ?? Infinity, this.ops.est_classic[row] ?? Infinity);
  }
  codes(row) {
    return [...new Set(this.found[row].map((finding) => finding.of.code))];
  }

  /** Returns the estimated time of the op on the device on which it is predicted to run. */
  spent(row) {
    return [this.ops.est_ane, this.ops.est_bnns, this.ops.est_classic][this.ops.engine[row]][row] ?? 0;
  }

  title(row) {
    return `${this.type(row)} ${this.output(row)}`;
  }
  place(row) {
    return `${this.onAne(row) ? "ANE" : "CPU"}`;
  }
}

const reports = data.reports.map((raw) => new Report(raw));
const state = { side: 0, function: 0, chosen: null };
const listeners = { side: [], function: [], chosen: [], theme: [], filter: [] };

const current = () => reports[state.side];
const when = (event, told) => listeners[event].push(told);
const tell = (event, detail) => listeners[event].forEach((told) => told(detail));

/** Changes the choice: its `kind` is op, finding or segment; `from` is the part of the page in which it was chosen. */
function choose(chosen, from) {
  state.chosen = chosen;
  const row = chosen && chosen.row;
  if (row !== null && row !== undefined) showFunction(current().functionOf[row]);
  if (chosen && chosen.function !== undefined) showFunction(chosen.function);
  tell("chosen", from);
}

/** Chooses the costliest finding when the page opens, without moving any view. */
function chooseFirst() {
  const finding = current().findings[current().costliest];
  if (!finding) return;
  state.chosen = { kind: "finding", finding, row: finding.row };
  tell("chosen", "start");
}

function showFunction(place) {
  if (place === state.function) return;
  state.function = place;
  tell("function");
}

function showSide(side) {
  if (side === state.side) return;
  state.side = side;
  state.function = 0;
  state.chosen = null;
  tell("side");
  tell("chosen");
}
