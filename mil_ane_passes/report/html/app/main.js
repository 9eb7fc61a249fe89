// Starts all parts of the page.

theme.start();
[
  summary,
  stepView,
  rulesView,
  changesView,
  strips,
  findingsView,
  details,
  opsView,
  buffersView,
  weightsView,
  graph,
].forEach((part) => part.start());
chooseFirst();
document.documentElement.dataset.ready = "yes";
