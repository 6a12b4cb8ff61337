"""Docstrings as help texts for terminals of any width."""

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar

Documented = TypeVar("Documented", bound=Callable[..., Any])


def reflow_docstring(documented: Documented) -> Documented:
    """Join each paragraph of the docstring into one line; examples and headings stay."""
    lines = list[str]()
    for line in cleandoc(documented.__doc__ or "").splitlines():
        last = lines[-1] if lines else ""
        goes_on = line.strip() and last.strip() and indent_width(line) == indent_width(last)
        if goes_on and not line.lstrip().startswith(("vitrail ", "---")) and not last.startswith("---"):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    documented.__doc__ = "\n".join(lines)
    return documented


def indent_width(line: str) -> int:
    return len(line) - len(line.lstrip())
