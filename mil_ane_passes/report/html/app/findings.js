// The findings, grouped by rule, worst first; near misses come last and are folded.

const STEP = 10;
const FEW = 4;
const TIER_SIGNS = ["✕", "⊘", "▲", "›"]; // one for each severity, because color must not be the only sign

function grouped(findings) {
  const groups = new Map();
  for (const finding of findings) {
    if (!groups.has(finding.rule)) groups.set(finding.rule, []);
    groups.get(finding.rule).push(finding);
  }
  return [...groups.values()];
}

/** Groups FEW or more findings with the same text; others stay single. A group has the position of its first member. */
function alike(findings) {
  const rows = new Map();
  for (const finding of findings) {
    const key = JSON.stringify([finding.type, finding.reason, finding.sure, finding.fresh, finding.fix]);
    if (!rows.has(key)) rows.set(key, []);
    rows.get(key).push(finding);
  }
  return [...rows.values()].flatMap((same) => (same.length < FEW ? same.map((finding) => [finding]) : [same]));
}

const findingsView = {
  start() {
    when("side", () => this.show());
    when("chosen", () => this.mark());
    this.show();
  },

  show() {
    const { hits, nears, ignored } = current();
    byId("findings-count").textContent = `${count(hits.length, "finding")} of ${count(grouped(hits).length, "rule")}${ignored ? `, ${ignored} ignored` : ""}`;
    fill(
      byId("finding-list"),
      ...data.severities.flatMap((severity, rank) =>
        this.tier(severity.title, rank, grouped(hits.filter((finding) => finding.severity === rank)), severity.fails),
      ),
      this.nears(grouped(nears)),
      hits.length + nears.length ? null : el("p", { class: "note" }, "No findings."),
    );
  },

  /** Builds the groups of one severity. Suggestions are folded, like near misses: they need no action. */
  tier(name, rank, groups, open) {
    if (!groups.length) return [];
    const sign = el("span", { "aria-hidden": "true" }, TIER_SIGNS[rank]);
    const head = el("h3", { class: `tier tier-${rank}` }, sign, ` ${name}`);
    if (open) return [head, ...groups.map((group, place) => this.group(group, !place || groups.length <= FEW))];
    return [head, this.quiet(`${name}s`, "Possible improvements; no action is needed.", groups)];
  },

  nears(groups) {
    if (!groups.length) return null;
    return el(
      "div",
      { class: "apart" },
      el("h3", { class: "tier" }, "Not rewritten"),
      this.quiet("Near misses", "Ops that a rule nearly matched, with the reasons.", groups),
    );
  },

  /** Builds one folded box with all groups. */
  quiet(name, words, groups) {
    const many = groups.reduce((sum, group) => sum + group.length, 0);
    const head = el(
      "summary",
      {},
      el("span", { class: "group-title" }, el("b", {}, name), el("span", {}, words)),
      el("span", { class: "group-side" }, `${many.toLocaleString("en")}×`, el("br"), `of ${count(groups.length, "rule")}`),
    );
    const box = el("details", { class: "group near" }, head);
    const fillIn = () => box.children.length > 1 || box.append(...groups.map((group) => this.group(group, false)));
    head.addEventListener("click", fillIn);
    return box;
  },

  group(findings, open) {
    const rule = findings[0].of;
    const ops = findings.reduce((sum, finding) => sum + Math.max(1, finding.covers.length), 0);
    const extra = ops > findings.length && !findings[0].near ? `${count(ops, "op")} · ` : "";
    const head = el(
      "summary",
      {},
      el("span", { class: "group-title" }, el("b", {}, `${rule.code} ${rule.slug}`), el("span", {}, rule.summary)),
      el(
        "span",
        { class: "group-side" },
        el("b", {}, `${findings.length.toLocaleString("en")}×`),
        el("br"),
        `${extra}${remedyText(findings)}`,
      ),
    );
    const box = el("details", { class: "group" }, head);
    const fillIn = () => {
      if (box.children.length > 1) return;
      const list = stepped(alike(findings), STEP, (same) =>
        same.length < FEW ? this.item(same[0]) : this.same(same),
      );
      box.append(list);
      roving(list, "button.item", { grow: list.grow });
      this.mark();
    };
    head.addEventListener("click", fillIn);
    if (open) {
      box.open = true;
      fillIn();
    }
    return box;
  },

  /** Builds one row for findings that differ only in their names; the names are shown on demand. */
  same(findings) {
    const [first] = findings;
    const head = el(
      "summary",
      {},
      el("b", {}, `${findings.length.toLocaleString("en")}×`),
      ` ${text(first.type)}`,
      first.fresh ? el("span", { class: "warn" }, " · new") : null,
      first.refuses && !first.sure ? el("span", { class: "warn" }, " · not sure") : null,
      el("span", { class: "why text" }, text(first.reason)),
    );
    const box = el("details", { class: "same" }, head);
    box.findings = findings;
    head.addEventListener("click", () => {
      if (box.children.length > 1) return;
      const list = stepped(findings, STEP, (finding) => this.item(finding, true));
      box.append(list);
      roving(list, "button.item", { grow: list.grow });
      this.mark();
    });
    return box;
  },

  /** Builds the row of one finding; with `brief`, without the reason, which the group already shows. */
  item(finding, brief = false) {
    const covers =
      finding.covers.length > 1 && !finding.near ? ` and ${count(finding.covers.length - 1, "op")} more` : "";
    const made = el(
      "button",
      {
        type: "button",
        class: "item",
        onclick: () => choose({ kind: "finding", finding, row: finding.row }, "findings"),
      },
      el("span", { class: "what name" }, text(finding.value)),
      ` ${text(finding.type)}${covers}`,
      finding.fresh ? el("span", { class: "warn" }, " · new") : null,
      finding.refuses && !finding.sure ? el("span", { class: "warn" }, " · not sure") : null,
      brief ? null : el("span", { class: "why text" }, text(finding.reason)),
    );
    made.finding = finding;
    return made;
  },

  mark() {
    const finding = state.chosen && state.chosen.finding;
    for (const item of byId("finding-list").querySelectorAll(".item")) {
      if (finding && item.finding === finding) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
    }
    for (const box of byId("finding-list").querySelectorAll("details.same"))
      box.firstChild.classList.toggle("holds", Boolean(finding) && box.findings.includes(finding));
  },
};

function remedyText(findings) {
  if (findings.some((finding) => finding.remedy?.commands.length)) return "has a command";
  return findings.some((finding) => finding.remedy) ? "advice" : "no fix";
}
