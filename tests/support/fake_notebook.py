"""A stand-in for IPython in the kernel of a notebook, which records the HTML that is displayed."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class FakeNotebook:
    shown: list[str] = field(default_factory=list[str])

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> "FakeNotebook":
        notebook = cls()
        ipython: Any = ModuleType("IPython")
        ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
        display: Any = ModuleType("IPython.display")
        display.HTML = str
        display.display = notebook.display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        return notebook

    def display(self, html: str, *, display_id: bool) -> Any:
        assert display_id
        self.shown.append(html)
        return SimpleNamespace(update=self.shown.append)
