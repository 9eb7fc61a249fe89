"""The version, in one place; read by the packaging, the reports and `--version`."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"


def make_json_header(command: str, schema: int = 1) -> dict[str, Any]:
    """Return the first keys of the JSON of a command; `schema` is the version of its format."""
    return {"schema": schema, "tool": "mil-ane-passes", "version": __version__, "command": command}
