// The model as a strip of partitions, one strip for each function; a partition's width is its estimated time.

const PIECES = 160;

/** Returns the partitions of a function; if there are too many to draw, neighbours are merged into mixed pieces. */
function piecesOf(one, place) {
  const step = Math.max(1, Math.ceil(one.segments.length / PIECES));
  const pieces = [];
  for (let from = 0; from < one.segments.length; from += step) {
    const group = one.segments.slice(from, from + step);
    const sum = (some) => some.reduce((all, segment) => all + segment[3], 0);
    const spent = sum(group);
    pieces.push({
      function: place,
      first: group[0][0],
      last: group[group.length - 1][1],
      ms: spent,
      share: spent ? sum(group.filter((segment) => segment[2])) / spent : 0.5,
      segments: group.length,
      backend: group.length > 1 ? "mixed" : group[0][2] ? "ane" : "cpu",
    });
  }
  return pieces;
}

const BACKENDS = { ane: ["A", "ANE"], cpu: ["C", "CPU"], mixed: ["M", "ANE and CPU"] };

function pieceText(piece) {
  const many =
    piece.segments > 1
      ? `${piece.segments} short partitions, ${percent(100 * piece.share)} of their time on the ANE, `
      : "";
  return `${BACKENDS[piece.backend][1]}: ${many}${count(piece.last - piece.first + 1, "op")}, ${time(piece.ms)} estimated`;
}

/** Describes the most frequent kind of unsupported ops in a piece, which keep its other ops off the ANE. */
function blockerOf(report, piece) {
  const counts = new Map();
  for (let row = piece.first; row <= piece.last; row++)
    if (report.answer(row) === "no") counts.set(report.blocker(row), (counts.get(report.blocker(row)) ?? 0) + 1);
  const [most] = [...counts].sort(([, a], [, b]) => b - a);
  if (!most) return "";
  const [kind, many] = most;
  return `${many.toLocaleString("en")} ${kind}${many > 1 && kind.endsWith(" op") ? "s" : ""} unsupported`;
}

const badge = (backend, name) =>
  el("span", { class: `badge ${backend}`, "aria-hidden": name ? null : "true" }, name || BACKENDS[backend][0]);

/** Builds a strip; its partitions can be chosen if it is `live`. */
function stripOf(report, one, place, live) {
  const pieces = piecesOf(one, place);
  const even = pieces.every((piece) => !piece.ms);
  const items = pieces.map((piece) => {
    const [short, long] = BACKENDS[piece.backend];
    const blocker = blockerOf(report, piece);
    const label = `${long} · ${count(piece.last - piece.first + 1, "op")}${blocker && ` · ${blocker}`}`;
    const item = el(
      "div",
      {
        class: `segment ${piece.backend}`,
        role: live ? "option" : null,
        "aria-selected": live ? "false" : null,
        "aria-label": live ? pieceText(piece) : null,
        title: pieceText(piece),
        tabindex: live ? -1 : null,
      },
      el("span", { class: "short" }, short),
      el("span", { class: "long" }, label),
    );
    item.style.flexGrow = even ? piece.last - piece.first + 1 : Math.max(piece.ms, 1e-9) * 1e6;
    const seen = Math.max(0.15, Math.min(0.85, piece.share)); // both colors stay visible
    if (piece.segments > 1) item.style.setProperty("--share", `${100 * seen}%`);
    item.piece = piece;
    return item;
  });
  const name = `Partitions of ${one.name}, ${live ? "in order" : pieces.map(pieceText).slice(0, 8).join("; ")}`;
  return el(
    "div",
    {
      class: "strip",
      role: live ? "listbox" : "img",
      "aria-orientation": live ? "horizontal" : null,
      "aria-label": name,
    },
    ...items,
  );
}

const strips = {
  start() {
    byId("strip-list").addEventListener("click", (event) => this.pick(event.target.closest(".segment")));
    byId("strip-list").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.pick(event.target.closest(".segment"));
    });
    ["focusin", "pointerover"].forEach((name) =>
      byId("strip-list").addEventListener(name, (event) => {
        const over = event.target.closest(".segment");
        if (over) this.hint(over);
      }),
    );
    when("side", () => this.show());
    when("chosen", () => this.mark());
    this.show();
  },

  show() {
    const report = current();
    byId("strip-list").replaceChildren(...report.functions.map((one, place) => this.one(report, one, place)));
    const many = report.functions.some((one) => one.segments.length > PIECES);
    byId("legend").replaceChildren(
      el("span", {}, badge("ane"), " ANE"),
      el("span", {}, badge("cpu"), " CPU, hatched"),
      many ? el("span", {}, badge("mixed"), " several: ANE above, CPU below, by time") : "",
      el("span", {}, "width: estimated time"),
    );
    this.mark();
  },

  one(report, one, place) {
    const total = one.segments.reduce((sum, segment) => sum + segment[3], 0);
    const head = el(
      "p",
      { class: "strip-name" },
      el("span", {}, "Function ", named(one.name)),
      el("span", {}, `${count(one.count, "op")}, ${count(one.segments.length, "partition")}, ${time(total)} estimated`),
    );
    if (!one.segments.length) return el("div", {}, head, el("p", { class: "note" }, "No ops in this function."));
    const strip = stripOf(report, one, place, true);
    roving(strip, ".segment");
    return el(
      "div",
      {},
      head,
      strip,
      el("p", { class: "strip-hint", "aria-hidden": "true" }, "Point at a partition, or choose one."),
    );
  },

  hint(item) {
    const { first, last } = item.piece;
    const report = current();
    const ends = first === last ? report.title(first) : `${report.title(first)} … ${report.title(last)}`;
    const blocker = blockerOf(report, item.piece);
    item.parentElement.nextElementSibling.textContent = `${pieceText(item.piece)} · ${ends}${blocker && ` · ${blocker}`}`;
  },

  pick(item) {
    if (item) choose({ kind: "segment", ...item.piece }, "strip");
  },

  mark() {
    const { chosen } = state;
    const row = chosen && (chosen.kind === "segment" ? chosen.first : chosen.row);
    for (const item of byId("strip-list").querySelectorAll(".segment")) {
      const inside = row !== null && row !== undefined && item.piece.first <= row && row <= item.piece.last;
      item.setAttribute("aria-selected", inside);
    }
  },
};
