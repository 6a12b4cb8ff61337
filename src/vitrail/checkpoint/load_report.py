"""Report on what loading did with every tensor, printed as a short table."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.base.text import abbreviate_list, format_table

NOT_CONFIG_FIELDS = ("preprocessing", "labels")


@dataclass(frozen=True)
class LoadReport:
    """Tensors of the model are matched, resized or initialised; tensors of the file that are not used are ignored."""

    matched: tuple[str, ...]
    resized: Mapping[str, str]  # name → method
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields that the file does not specify

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that the text of the report names in backticks."""
        return (*format_assumptions(self.assumed)[1], "source")

    def __str__(self) -> str:
        resized = [f"{name} ({method})" for name, method in self.resized.items()]
        groups = {"resized": resized, "initialised": self.initialised, "ignored": self.ignored}
        rows = [("matched", str(len(self.matched)), "")] if self.matched else []
        rows += [(group, str(len(names)), abbreviate_list(names)) for group, names in groups.items() if names]
        assumption, _ = format_assumptions(self.assumed)
        warnings = [f"warning: {warning}" for warning in (assumption, *self.warnings) if warning]
        return "\n".join([*format_table(("", "tensors", ""), rows, "lrl"), *warnings])


def format_assumptions(assumed: Mapping[str, Any], given: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """One sentence with the fields that a file does not specify, the values assumed, and how to change them.

    `given` are fields that the user has set. The second result has the settings that the sentence names in backticks.
    """
    remaining = {name: value for name, value in assumed.items() if name not in given}
    if not remaining:
        return "", ()
    settings = [f"{name}=…" for name in remaining if name not in NOT_CONFIG_FIELDS][:1]
    settings += [name for name in NOT_CONFIG_FIELDS if name in remaining]
    remedy = " and ".join(f"`{setting}`" for setting in settings)
    text = f"does not specify {', '.join(remaining)}; assumed {format_fields(remaining)}. Change this with {remedy}"
    return text, tuple(settings)


def format_fields(values: Mapping[str, Any]) -> str:
    """Format fields as name=value, with sizes as the command line accepts them."""
    return ", ".join(
        f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in values.items()
    )
