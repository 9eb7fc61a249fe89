"""Reports in notebooks and in files."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..utils.errors import InputError, suggest_nearest
from ..utils.text_format import escape_text, join_names

__all__ = ["Document", "build_document", "build_fragment"]

_STYLE = ("body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; "
          "color-scheme: light dark } table { border-collapse: collapse } th, td { text-align: left; padding: .2rem "
          ".8rem .2rem 0 } pre { white-space: pre-wrap }")


class Document:
    """A report that notebooks show and that is saved to a file, in a form that the suffix selects."""

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a report holds programs, which cannot be pickled."""
        raise TypeError(f"a {type(self).__name__} holds programs and cannot be pickled or deep-copied; "
                        "expected its to_dict() or str(): return one of them from a function in another process")

    def __copy__(self) -> Document:
        """Return a shallow copy; `copy.copy` would otherwise call `__reduce__`."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON."""
        raise NotImplementedError

    def to_html(self) -> str:
        """Return a page that loads nothing else."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to `path`, as the command would: .json, .html, .txt, or what else `get_forms` has.

        An existing file is replaced. Returns the path. Raises InputError for another suffix, for a folder, for a place
        inside a package, and where the file cannot be written.
        """
        from ..package.output_file import check_output_file, write_text_file

        forms = self.get_forms()
        suffix = Path(path).suffix.lower()
        if suffix not in forms:
            raise InputError(f"{os.fspath(path)}: found {f'the suffix {suffix}' if suffix else 'no suffix'}; expected "
                             f"{join_names(forms).replace(' and ', ' or ')}, which selects the format of the report"
                             f"{suggest_nearest(suffix, forms)}")
        target = check_output_file(os.fspath(path), [], "a report")
        write_text_file(target, f"{forms[suffix]()}\n")
        return target

    def get_forms(self) -> Mapping[str, Callable[[], str]]:
        """Return what makes each form of the report, by suffix."""
        return {".json": lambda: json.dumps(self.to_dict(), indent=2, allow_nan=False), ".html": self.to_html,
                ".txt": lambda: str(self)}


def build_fragment(
    headline: str, heads: Sequence[str], rows: Iterable[Sequence[object]], text: str
) -> str:
    """Build HTML for a notebook: a line, a table unless it has no rows, and the whole text, folded.

    Names from files are data: none becomes markup.
    """
    body = "".join(f"<tr>{''.join(f'<td>{_escape_html(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{_escape_html(each)}</th>" for each in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""
    lines = "\n".join(_escape_html(line) for line in text.split("\n"))
    folded = f"<details><summary>text</summary><pre>{lines}</pre></details>"
    return f"<div><p>{_escape_html(headline)}</p>{table}{folded}</div>"


def build_document(title: str, fragment: str) -> str:
    """Build a page around a fragment: without scripts, and its policy forbids it to load anything."""
    return ("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            f"<title>{_escape_html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"{fragment.replace('<details>', '<details open>', 1)}\n</body>\n</html>")


def _escape_html(text: object) -> str:
    return html.escape(escape_text(text))
