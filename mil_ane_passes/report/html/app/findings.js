// The findings, grouped by rule, worst first; what almost was one comes last and stays folded.

const STEP = 10;
const FEW = 4;
const TIER_SIGNS = ["✕", "⊘", "▲", "›"]; // one for each severity, so that color alone tells nothing

function grouped(findings) {
  const groups = new Map();
  for (const finding of findings) {
    if (!groups.has(finding.rule)) groups.set(finding.rule, []);
    groups.get(finding.rule).push(finding);
  }
  return [...groups.values()];
}

const findingsView = {
  start() {
    when("side", () => this.show());
    when("chosen", () => this.mark());
    this.show();
  },

  show() {
    const { hits, nears, ignored } = current();
    byId("findings-count").textContent = `${count(hits.length, "finding")} by ${count(grouped(hits).length, "rule")}${ignored ? `, ${ignored} ignored` : ""}`;
    fill(
      byId("finding-list"),
      ...data.severities.flatMap((severity, rank) =>
        this.tier(severity.title, rank, grouped(hits.filter((finding) => finding.severity === rank)), severity.fails),
      ),
      this.nears(grouped(nears)),
      this.together(hits),
      hits.length + nears.length ? null : el("p", { class: "note" }, "No rule found anything."),
    );
  },

  tier(name, rank, groups, open) {
    return groups.length
      ? [
          el("h3", { class: `tier tier-${rank}` }, el("span", { "aria-hidden": "true" }, TIER_SIGNS[rank]), ` ${name}`),
          ...groups.map((group, place) => this.group(group, open && (!place || group.length <= FEW))),
        ]
      : [];
  },

  /** All near misses in one fold: what almost was a finding. */
  nears(groups) {
    if (!groups.length) return null;
    const head = el(
      "summary",
      {},
      el("span", { class: "group-title" }, el("b", {}, "Near misses"), el("span", {}, "What almost was a finding.")),
      el("span", { class: "group-side" }, `by ${count(groups.length, "rule")}`),
    );
    const box = el("details", { class: "group near" }, head);
    const fillIn = () => box.children.length > 1 || box.append(...groups.map((group) => this.group(group, false)));
    head.addEventListener("click", fillIn);
    return el("div", { class: "apart" }, el("h3", { class: "tier" }, "Almost"), box);
  },

  /** One command for all that has a pass, where that is more than one. */
  together(hits) {
    const passes = [
      ...new Set(
        hits
          .filter((finding) => data.severities[finding.severity].fails && finding.of.fix?.pass)
          .map(({ of }) => of.fix.pass),
      ),
    ];
    if (passes.length < 2) return null;
    return el(
      "div",
      { class: "together" },
      el("h4", {}, "All fixes at once"),
      el("p", { class: "command" }, command(current().model, passes)),
    );
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
        `${extra}${rule.fix ? (rule.fix.pass ? "a pass fixes it" : "advice") : "no fix"}`,
      ),
    );
    const box = el("details", { class: "group" }, head);
    const fillIn = () => {
      if (box.children.length > 1) return;
      const list = stepped(findings, STEP, (finding) => this.item(finding));
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

  item(finding) {
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
      el("span", { class: "why text" }, text(finding.reason)),
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
  },
};
