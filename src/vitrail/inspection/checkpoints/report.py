"""What was found in a checkpoint, and how it reads as a page."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from vitrail.checkpoint.load_report import abbreviate_list, format_fields
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.checkpoints.checksum_verification import FileCheck
from vitrail.inspection.checkpoints.weight_checks import TensorStatistics
from vitrail.inspection.summary import format_megabytes
from vitrail.text import format_table, make_printable


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one name, shape and type, one in each block: # stands for the block's number."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class CheckpointInspection:
    """What `inspect` found; `str()` of it is a page. What could not be found out is None, and `reason` says why."""

    path: str
    kind: str
    size: int  # bytes on disk
    wrapper: str  # the key that a pickle keeps its tensors under
    others: tuple[str, ...]  # what else the pickle holds
    numbers: int  # in all tensors
    dtypes: Mapping[str, int]  # tensors of each
    groups: tuple[TensorGroup, ...]
    tensors: tuple[TensorStatistics, ...]
    suspicious: tuple[str, ...]
    checksums: tuple[FileCheck, ...] = ()
    layout: str | None = None
    reason: str = ""
    family: str | None = None
    preset: str | None = None  # the nearest of the family
    differs: Mapping[str, Any] | None = None  # fields of the config that are not the preset's
    config: Mapping[str, Any] | None = None
    head: str | None = None
    labels: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    resampling: str | None = None
    provenance: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # values assumed for fields that the file does not specify

    def __str__(self) -> str:
        return self.format_report()

    def format_report(self, *, every_tensor: bool = False) -> str:
        """The page, its tensors one by one with their statistics or grouped over the blocks."""
        lines = [
            fill(make_printable(f"{name:14} {text}"), width=120, subsequent_indent=15 * " ")
            for name, text in list_facts(self)
        ]
        found = [f"- {make_printable(text)}" for text in self.suspicious]
        table = format_tensor_table(self.tensors) if every_tensor else format_group_table(self.groups)
        return "\n".join([*lines, "", *table, "", "suspicious" if found else "nothing suspicious", *found])


def list_facts(seen: CheckpointInspection) -> list[tuple[str, str]]:
    """The lines before the tensors."""
    beside = f", beside {abbreviate_list(seen.others)}" if seen.others else ""
    under = f", tensors under {seen.wrapper!r}{beside}" if seen.wrapper else ""
    types = ", ".join(f"{count} {kind}" for kind, count in seen.dtypes.items())
    lines = [("file", seen.path), ("kind", f"{seen.kind}, {format_megabytes(seen.size)}{under}")]
    lines.append(("layout", seen.layout or "none known here"))
    lines.append(("checksum", ", ".join(f"{each.file}: {each.verdict}" for each in seen.checksums) or "none"))
    if seen.reason:
        lines.append(("problem", seen.reason))
    if seen.family is not None and seen.config is not None:
        but = ", ".join(f"{name} {value}" for name, value in (seen.differs or {}).items())
        near = f" {seen.preset}{', but ' * bool(but)}{but}" if seen.preset else " of no preset's width and depth"
        labels = f"{len(seen.labels)}: {abbreviate_list(seen.labels)}" if seen.labels else "none"
        lines += [
            ("architecture", f"{seen.family},{near}" if seen.head else seen.family),
            ("config", format_assignments(seen.config)),
            ("head", seen.head or "not known"),
            ("labels", labels),
            ("preprocessing", format_assignments(asdict(seen.preprocessing)) if seen.preprocessing else "none"),
            ("resampling", str(seen.resampling)),
            ("provenance", format_assignments(seen.provenance or {})),
            ("assumed", describe_assumed_fields(seen)),
            ("ignored", abbreviate_list(seen.ignored) or "nothing"),
        ]
    return [*lines, ("tensors", f"{len(seen.tensors)}, together {seen.numbers:,} numbers: {types or 'none'}")]


def describe_assumed_fields(seen: CheckpointInspection) -> str:
    """The assumed fields, and how to set them."""
    if not seen.assumed:
        return "nothing"
    fields = [name for name in seen.assumed if name != "preprocessing"]
    return (
        format_fields(seen.assumed)
        + "; not specified in the file"
        + (f": change with --set {fields[0]}=…" if fields else "")
    )


def format_checksum_table(checks: tuple[FileCheck, ...]) -> str:
    """The files of a run or an export, one per line."""
    lines = [(make_printable(each.file), each.verdict, make_printable(each.reason)) for each in checks]
    return "\n".join(format_table(("file", "checksum", ""), lines, "lll"))


def format_assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def format_group_table(groups: tuple[TensorGroup, ...]) -> list[str]:
    lines = [(make_printable(each.pattern), f"{each.count} ×", str(each.shape), each.dtype) for each in groups]
    return format_table(("tensor", "", "shape", "type"), lines, "lrll")


def format_tensor_table(rows: tuple[TensorStatistics, ...]) -> list[str]:
    heading = ("tensor", "shape", "type", "mean", "deviation", "min", "max")
    lines = [
        (
            *(make_printable(row.name), str(row.shape), row.dtype),
            *("" if n is None else f"{n:.4g}" for n in (row.mean, row.deviation, row.lowest, row.highest)),
        )
        for row in rows
    ]
    return format_table(heading, lines, "lllrrrr")
