"""The result of inspecting a checkpoint, and its text report."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from vitrail.base.text import abbreviate_list, format_table, make_printable
from vitrail.checkpoint.load_report import format_fields
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.inspection.checkpoints.checksum_verification import FileCheck
from vitrail.inspection.checkpoints.weight_checks import TensorStatistics
from vitrail.inspection.summary import format_megabytes


@dataclass(frozen=True)
class TensorGroup:
    """Tensors with the same name, shape and dtype in each block; # stands for the block's number."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class CheckpointInspection:
    """Result of `inspect_file`; `str()` is its report. Unknown values are None, and `reason` says why."""

    path: str
    kind: str
    size: int  # bytes on disk
    wrapper: str  # key of the tensors in a pickle
    others: tuple[str, ...]  # other keys of the pickle
    numbers: int  # total number of values
    dtypes: Mapping[str, int]  # number of tensors per dtype
    groups: tuple[TensorGroup, ...]
    tensors: tuple[TensorStatistics, ...]
    suspicious: tuple[str, ...]
    checksums: tuple[FileCheck, ...] = ()
    layout: str | None = None
    reason: str = ""
    family: str | None = None
    preset: str | None = None  # nearest preset of the family
    differs: Mapping[str, Any] | None = None  # config fields that differ from the preset
    config: Mapping[str, Any] | None = None
    head: str | None = None
    labels: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    resampling: str | None = None
    provenance: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for fields that the file does not specify

    def __str__(self) -> str:
        return self.format_report()

    def format_report(self, *, every_tensor: bool = False) -> str:
        """Format the report, with statistics of every tensor or with tensors grouped over blocks."""
        lines = [
            fill(make_printable(f"{name:14} {text}"), width=120, subsequent_indent=15 * " ")
            for name, text in list_facts(self)
        ]
        findings = [f"- {make_printable(text)}" for text in self.suspicious]
        table = format_tensor_table(self.tensors) if every_tensor else format_group_table(self.groups)
        return "\n".join([*lines, "", *table, "", "suspicious" if findings else "nothing suspicious", *findings])


def list_facts(inspection: CheckpointInspection) -> list[tuple[str, str]]:
    """The lines before the table of tensors."""
    others = f", other keys: {abbreviate_list(inspection.others)}" if inspection.others else ""
    under = f", tensors under {inspection.wrapper!r}{others}" if inspection.wrapper else ""
    types = ", ".join(f"{count} {kind}" for kind, count in inspection.dtypes.items())
    lines = [("file", inspection.path), ("kind", f"{inspection.kind}, {format_megabytes(inspection.size)}{under}")]
    lines.append(("layout", inspection.layout or "unknown"))
    lines.append(("checksum", ", ".join(f"{each.file}: {each.verdict}" for each in inspection.checksums) or "none"))
    if inspection.reason:
        lines.append(("problem", inspection.reason))
    if inspection.family is not None and inspection.config is not None:
        differences = ", ".join(f"{name} {value}" for name, value in (inspection.differs or {}).items())
        preset = (
            f" {inspection.preset}{' except ' * bool(differences)}{differences}"
            if inspection.preset
            else " not like any preset"
        )
        labels = f"{len(inspection.labels)}: {abbreviate_list(inspection.labels)}" if inspection.labels else "none"
        lines += [
            ("architecture", f"{inspection.family},{preset}" if inspection.head else inspection.family),
            ("config", format_assignments(inspection.config)),
            ("head", inspection.head or "unknown"),
            ("labels", labels),
            (
                "preprocessing",
                format_assignments(asdict(inspection.preprocessing)) if inspection.preprocessing else "none",
            ),
            ("resampling", str(inspection.resampling)),
            ("provenance", format_assignments(inspection.provenance or {})),
            ("assumed", describe_assumed_fields(inspection)),
            ("ignored", abbreviate_list(inspection.ignored) or "nothing"),
        ]
    return [*lines, ("tensors", f"{len(inspection.tensors)} with {inspection.numbers:,} values: {types or 'none'}")]


def describe_assumed_fields(inspection: CheckpointInspection) -> str:
    """The assumed fields, and how to change them."""
    if not inspection.assumed:
        return "nothing"
    remedy = next((f"; set {name}=… to change it" for name in inspection.assumed if name != "preprocessing"), "")
    return f"{format_fields(inspection.assumed)}; not specified in the file{remedy}"


def format_checksum_table(checks: tuple[FileCheck, ...]) -> str:
    """The files of a run or an export, one per line."""
    lines = [(make_printable(each.file), each.verdict, make_printable(each.reason)) for each in checks]
    return "\n".join(format_table(("file", "checksum", ""), lines, "lll"))


def format_assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def format_group_table(groups: tuple[TensorGroup, ...]) -> list[str]:
    lines = [(make_printable(each.pattern), f"{each.count} ×", str(each.shape), each.dtype) for each in groups]
    return format_table(("tensor", "", "shape", "dtype"), lines, "lrll")


def format_tensor_table(rows: tuple[TensorStatistics, ...]) -> list[str]:
    heading = ("tensor", "shape", "dtype", "mean", "std", "min", "max")
    lines = [
        (
            *(make_printable(row.name), str(row.shape), row.dtype),
            *("" if n is None else f"{n:.4g}" for n in (row.mean, row.deviation, row.lowest, row.highest)),
        )
        for row in rows
    ]
    return format_table(heading, lines, "lllrrrr")
