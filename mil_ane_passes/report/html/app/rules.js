// The documentation of each rule with findings: subject, conditions and fix.

const rulesView = {
  start() {
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a.rule-link");
      if (link) this.open(link.hash.slice(1));
    });
    when("side", () => this.show());
    this.show();
  },

  show() {
    const pages = new Map(current().rules.map((rule) => [rule.code, rule]));
    byId("rules").hidden = !pages.size;
    byId("rules-count").textContent = count(pages.size, "rule");
    byId("rules-list").replaceChildren(...[...pages].sort(([a], [b]) => (a < b ? -1 : 1)).map(([, rule]) => this.page(rule)));
  },

  page(rule) {
    const head = el(
      "summary",
      {},
      el("span", { class: "group-title" }, el("b", {}, `${rule.code} ${rule.slug}`), el("span", {}, rule.summary)),
    );
    return el(
      "details",
      { class: "group", id: `rule-${rule.code}` },
      head,
      el("pre", { tabindex: 0, "aria-label": `Page of ${rule.code}` }, rule.page),
      el("p", { class: "note" }, "With options and sources: ", el("code", {}, `mil-ane-passes explain ${rule.code}`)),
    );
  },

  open(id) {
    const page = byId(id);
    if (!page) return;
    page.open = true;
    page.firstChild.focus({ preventScroll: true });
  },
};

/** Builds a link from a rule's code to its documentation on this page. */
const codeLink = (rule, words = rule.code) => el("a", { class: "rule-link", href: `#rule-${rule.code}` }, words);
