"""What loading did with every tensor, as an object and as a short table."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vitrail.tables import text_table


@dataclass(frozen=True)
class LoadReport:
    """Each tensor of the model was matched, resized or initialised; those of the file not used were ignored."""

    matched: tuple[str, ...]
    resized: Mapping[str, str]  # name → how
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            ("matched", len(self.matched), ""),
            ("resized", len(self.resized), listed([f"{name} ({how})" for name, how in self.resized.items()])),
            ("initialised", len(self.initialised), listed(self.initialised)),
            ("ignored", len(self.ignored), listed(self.ignored)),
        ]
        shown = [(what, str(count), names) for what, count, names in lines if count]
        warnings = [f"warning: {warning}" for warning in self.warnings]
        return "\n".join([*text_table(("", "tensors", ""), shown, "lrl"), *warnings])


def listed(names: Collection[str], most: int = 4) -> str:
    return ", ".join([*names][:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
