"""Ours beside what others do, in rounds: `python -m tests.lab.benchmarks` runs all of it."""

import os

# The bars of coremltools' pipelines are drawn for nobody here; tqdm reads this as it is imported.
os.environ.setdefault("TQDM_DISABLE", "1")
