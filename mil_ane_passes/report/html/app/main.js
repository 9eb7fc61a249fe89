// Everything starts here, once.

theme.start();
[summary, changesView, strips, findingsView, details, opsView, buffersView, graph].forEach((part) => part.start());
document.documentElement.dataset.ready = "yes";
