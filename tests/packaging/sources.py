"""What a source distribution holds beside the package: all that its tests need.

Left alone, setuptools takes the files `tests/test*.py` and no others, so the tests that come along could not run. This
command (see `cmdclass` in setup.cfg) names the rest; what is built and installed is not changed by it.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py as _build_py

__all__ = ["build_py", "extra_sources"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "fixtures", ".ci", ".github")
FILES = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.cfg")
MADE = frozenset({"__pycache__", "build", "dist"})
"Folders that tools leave behind; so are hidden ones and *.egg-info."


def extra_sources(root: Path = ROOT) -> list[str]:
    """The files of tests, fixtures, the commands of CI and the action below `root`, as paths from there, in order."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    parts = {path: path.relative_to(root).parts for path in found}
    kept = [path for path in found if not any(_is_made(part) for part in parts[path][1:])]
    return sorted([*(path.relative_to(root).as_posix() for path in kept),
                   *(name for name in FILES if (root / name).is_file())])


def _is_made(part: str) -> bool:
    return part in MADE or part.startswith(".") or part.endswith((".egg-info", ".pyc"))


class build_py(_build_py):
    """setuptools' own, that knows of more sources."""

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *extra_sources()]
