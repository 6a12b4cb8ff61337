"""Inspect any checkpoint: its layout, model, tensors and suspicious weights; and the report about it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from vitrail.base.errors import CheckpointError, unknown_name_error
from vitrail.base.text import abbreviate_list, format_table, make_printable
from vitrail.checkpoint.config_from_shapes import parse_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import get_built_in_family
from vitrail.checkpoint.layout import TranslatedCheckpoint, detect_layout
from vitrail.checkpoint.reading import (
    TRAINED_SIZE,
    build_meta_model,
    parse_trained_size,
    read_named_contents,
    translate_with_layout,
)
from vitrail.checkpoint.weight_adaptation import CHANGEABLE_FIELDS, format_fields
from vitrail.checkpoint.weight_folders import find_weight_files
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.inspection.checkpoints.checksum_verification import FileCheck, verify_checksums
from vitrail.inspection.checkpoints.weight_checks import (
    TensorStatistics,
    compute_tensor_statistics,
    find_suspicious_weights,
    replace_block_number,
)
from vitrail.inspection.summary import format_megabytes, format_shape
from vitrail.layers.pool import AttentionPool
from vitrail.models.base.checks import ImageConfig, pair
from vitrail.models.base.contract import ImageModel, Model
from vitrail.models.base.family import Family
from vitrail.models.catalog.families import load_built_in_families

# fields that neither files nor weights determine
RUNTIME_FIELDS = ("dropout", "attention_dropout", "stochastic_depth", "stage_dropout", "mlp_dropout", "dynamic")
# a different value is still the same preset
MINOR_FIELDS = ("classes", "activation", "norm_eps", "constants", "vocabulary", "source_vocabulary", "pad")
SHAPE_FIELDS = (
    *("width", "depth", "stages", "block", "widths"),
    *("encoder_depth", "decoder_depth", "hidden", "attention"),
)


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


def inspect_file(path: str | Path, /, *, source: str | None = None, **known: Any) -> CheckpointInspection:
    """Inspect a file or folder of any layout, known or unknown; only unreadable files raise an error.

    `source` overrides layout detection; `known` are config fields that the file does not specify, such as heads.
    """
    known = parse_trained_size(known)
    check_given_field_names(known)
    contents, place = read_named_contents(path)
    rows = tuple(compute_tensor_statistics(name, tensor) for name, tensor in contents.tensors.items())
    inspection = CheckpointInspection(
        path=str(path),
        kind=contents.kind,
        size=sum(file.stat().st_size for file in (find_weight_files(place) if place.is_dir() else [place])),
        wrapper=contents.wrapper,
        others=contents.other_keys,
        numbers=sum(row.count for row in rows),
        dtypes=dict(Counter(row.dtype for row in rows)),
        groups=group_tensors_over_blocks(rows),
        tensors=rows,
        suspicious=tuple(find_suspicious_weights(rows, contents.tensors)),
        checksums=verify_checksums(place),
    )
    try:
        layout = detect_layout(contents, source)
    except CheckpointError as error:
        return replace(inspection, reason=str(error))
    inspection = replace(inspection, layout=layout.name)
    try:
        translated = translate_with_layout(contents, layout, known, str(path), named=source is not None)
    except CheckpointError as error:
        return replace(inspection, reason=str(error))
    return add_description(inspection, translated, known)


def build_inspected_model(inspection: CheckpointInspection, fields: Mapping[str, Any]) -> Model:
    """The model of a file on the meta device, with these config fields replaced."""
    if inspection.family is None or inspection.head is None:
        raise CheckpointError(f"no model can be built from {inspection.path}: {inspection.reason}")
    family = get_built_in_family(inspection.family, inspection.path)
    changes = {name: value for name, value in fields.items() if name != TRAINED_SIZE}
    with torch.device("meta"):
        return family.build(family.configure(**{**(inspection.config or {}), **changes}))


def group_tensors_over_blocks(rows: Sequence[TensorStatistics]) -> tuple[TensorGroup, ...]:
    """Group tensors over blocks, in the file's order but with equal names together."""
    counts = Counter((replace_block_number(row.name), row.shape, row.dtype) for row in rows)
    first_index = {name: index for index, name in reversed([*enumerate(name for name, *_ in counts)])}
    ordered = sorted(counts.items(), key=lambda each: first_index[each[0][0]])
    return tuple(TensorGroup(name, count, shape, dtype) for (name, shape, dtype), count in ordered)


def check_given_field_names(known: Mapping[str, Any]) -> None:
    names = {"image_size", TRAINED_SIZE}
    for family in load_built_in_families():  # the first has most names: seldom is another one imported
        if known.keys() <= names:
            return
        names |= {each.name for each in fields(family.config)} - {*CHANGEABLE_FIELDS}
    for name in known:
        if name not in names:
            raise unknown_name_error("config field", name, sorted(names))


def add_description(
    inspection: CheckpointInspection, translated: TranslatedCheckpoint, known: Mapping[str, Any]
) -> CheckpointInspection:
    """Add what the layout's reader found: config, labels, preprocessing and the nearest preset."""
    about, findings = translated.description, list(translated.warnings)
    inspection = replace(
        inspection,
        family=about.family,
        config=dict(about.config),
        labels=about.labels,
        preprocessing=about.preprocessing,
        resampling=about.resampling,
        provenance=dict(about.provenance),
        ignored=translated.ignored,
        assumed=dict(translated.assumed),
    )
    try:
        family = get_built_in_family(about.family, inspection.path)
        model = build_meta_model(translated, family, inspection.path)
    except CheckpointError as error:
        return replace(inspection, reason=str(error), suspicious=(*inspection.suspicious, *findings))
    config: Any = model.config
    preset, differs = find_nearest_preset(family, config)
    findings += find_contradictions(about, config, known)
    inspection = replace(inspection, config=asdict(config), preset=preset, differs=differs, head=describe_head(model))
    return replace(inspection, suspicious=(*inspection.suspicious, *findings))


def find_nearest_preset(family: Family, config: Any) -> tuple[str | None, dict[str, Any] | None]:
    """The preset of the same width and depth, or stages, that differs in the fewest fields, and these fields."""
    ranked = list[tuple[int, int, str, dict[str, Any]]]()
    for name, preset in family.presets.items():
        theirs, ours = asdict(preset), asdict(config)
        if theirs.get("layer_scale") is not None and ours.get("layer_scale") is not None:
            theirs["layer_scale"] = ours["layer_scale"]  # its initial value is not in the weights
        differs = {key: value for key, value in ours.items() if value != theirs[key] and key not in RUNTIME_FIELDS}
        if not {*SHAPE_FIELDS} & differs.keys():
            ranked.append((len(differs.keys() - {*MINOR_FIELDS}), len(differs), name, differs))
    if not ranked:
        return None, None
    *_, name, differs = min(ranked, key=lambda each: each[:2])
    return name, differs


def find_contradictions(about: Description, config: Any, known: Mapping[str, Any]) -> list[str]:
    """Contradictions between the checkpoint's preprocessing, its config and the given fields."""
    findings = find_preprocessing_contradictions(about, config) if isinstance(config, ImageConfig) else []
    for name, value in known.items():
        actual = vars(config).get("image_size" if name == TRAINED_SIZE else name)
        given = (
            parse_image_size(value)
            if name in ("image_size", TRAINED_SIZE)
            else tuple(value)
            if isinstance(value, list)
            else value
        )
        if actual != given:
            findings.append(f"{name} is {actual!r} in the file, not {value!r} as given")
    return findings


def find_preprocessing_contradictions(about: Description, config: ImageConfig) -> list[str]:
    preprocessing, size = about.preprocessing, pair(config.image_size)
    if preprocessing is None:
        return ["the file does not specify its preprocessing"]
    if pair(preprocessing.image_size) != size:
        prepared = format_shape(pair(preprocessing.image_size))
        return [f"preprocessing gives images of {prepared}, the model expects {format_shape(size)}"]
    if len(preprocessing.mean) != config.channels:
        channels = len(preprocessing.mean)
        return [f"preprocessing gives images of {channels} channels, the model expects {config.channels}"]
    return []


def describe_head(model: Model) -> str:
    if not isinstance(model, ImageModel):
        return f"{model.config.vocabulary} tokens"
    is_map = model.attention_pool and isinstance(model.get_submodule(model.attention_pool), AttentionPool)
    pool = " on attention pooling (MAP)" if is_map else ""
    if not model.classifiers:
        return f"none, features{pool}" if pool else "none"
    kind = "tanh layer and linear" if vars(model.config).get("head") == "mlp" else "linear"
    if len(model.classifiers) == 2:
        kind = "distilled, two linear"
    return f"{kind}, {model.config.classes} classes{pool}"
