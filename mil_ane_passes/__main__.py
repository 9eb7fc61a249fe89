"""`python -m mil_ane_passes` is the command `mil-ane-passes`."""

from __future__ import annotations

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
