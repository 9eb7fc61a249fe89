// The next step: a command and its predicted effect, or the statement that no command is predicted to help.

const stepView = {
  start() {
    when("side", () => this.show());
    this.show();
  },

  show() {
    const { step } = current();
    byId("step").hidden = !step;
    if (!step) return;
    fill(
      byId("step-body"),
      el("p", { class: "text" }, step.words),
      step.command ? commandBox(step.command) : null,
      step.pairs.length ? this.outcome(step.pairs) : null,
      step.note ? el("p", { class: "facts text" }, step.note) : null,
    );
  },

  outcome(pairs) {
    return el(
      "table",
      { class: "outcome", "aria-label": "Predicted before and after" },
      el(
        "thead",
        {},
        el("tr", {}, ...["Predicted", "before", "after"].map((name) => el("th", { scope: "col" }, name))),
      ),
      el(
        "tbody",
        {},
        ...pairs.map(([name, before, after, gain]) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, name),
            el("td", {}, before),
            el(
              "td",
              { class: gain > 0 ? "better" : gain < 0 ? "worse" : null },
              after,
              gain > 0 ? " (better)" : gain < 0 ? " (worse)" : "",
            ),
          ),
        ),
      ),
    );
  },
};
