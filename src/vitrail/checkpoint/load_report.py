"""What loading did with every tensor, as an object and as a short table."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.text import format_table


@dataclass(frozen=True)
class LoadReport:
    """Each tensor of the model was matched, resized or initialised; those of the file not used were ignored."""

    matched: tuple[str, ...]
    resized: Mapping[str, str]  # name → how
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # values assumed for fields that the file does not specify

    def __str__(self) -> str:
        lines = [
            ("matched", len(self.matched), ""),
            ("resized", len(self.resized), abbreviate_list([f"{name} ({how})" for name, how in self.resized.items()])),
            ("initialised", len(self.initialised), abbreviate_list(self.initialised)),
            ("ignored", len(self.ignored), abbreviate_list(self.ignored)),
        ]
        shown = [(what, str(count), names) for what, count, names in lines if count]
        said = (format_assumptions(self.assumed), *self.warnings)
        warnings = [f"warning: {warning}" for warning in said if warning]
        return "\n".join([*format_table(("", "tensors", ""), shown, "lrl"), *warnings])


def abbreviate_list(names: Collection[str], most: int = 4) -> str:
    return ", ".join([*names][:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_assumptions(assumed: Mapping[str, Any], given: Collection[str] = ()) -> str:
    """One sentence: the fields that a file does not specify, the values assumed and how to change them; or empty.

    `given` are fields that the user has set.
    """
    left = {name: value for name, value in assumed.items() if name not in given}
    if not left:
        return ""
    fields = [name for name in left if name != "preprocessing"]
    ways = [f"--set {name}=… (in Python: {name}=…)" for name in fields[:1]]
    if "preprocessing" in left:
        ways.append("`vitrail convert --preprocessing` (in Python: preprocessing=…)")
    return f"does not specify {', '.join(left)}; assumed {format_fields(left)}. Change that with {' and '.join(ways)}"


def format_fields(values: Mapping[str, Any]) -> str:
    """name=value, with sizes as the command line accepts them."""
    return ", ".join(
        f"{name}={'x'.join(map(str, each)) if isinstance(each, tuple) else each}" for name, each in values.items()
    )
