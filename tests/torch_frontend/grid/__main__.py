"""`python -m tests.torch_frontend.grid`: see run.py."""

from __future__ import annotations

import sys

from .run import main

sys.exit(main())
