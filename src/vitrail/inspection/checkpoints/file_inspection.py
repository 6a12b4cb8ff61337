"""A checkpoint of anybody's: whose layout, which model, which tensors, and what about them is suspicious."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.config_from_shapes import parse_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import find_weight_files, read_raw_contents
from vitrail.checkpoint.layout import TranslatedCheckpoint, detect_layout
from vitrail.checkpoint.reading import (
    TRAINED_SIZE,
    build_meta_model,
    get_family,
    locate_checkpoint,
    parse_trained_size,
    translate_with_layout,
)
from vitrail.checkpoint.weight_adaptation import CHANGEABLE_FIELDS
from vitrail.errors import CheckpointError, unknown_name_error
from vitrail.inspection.checkpoints.checksum_verification import verify_checksums
from vitrail.inspection.checkpoints.report import CheckpointInspection, TensorGroup
from vitrail.inspection.checkpoints.weight_checks import (
    TensorStatistics,
    block_pattern,
    compute_tensor_statistics,
    find_suspicious_weights,
)
from vitrail.inspection.summary import format_shape
from vitrail.models.catalog import load_families
from vitrail.models.checks import pair
from vitrail.models.family import Family

RUNTIME_FIELDS = (
    "dropout",
    "attention_dropout",
    "stochastic_depth",
    "stage_dropout",
    "dynamic",
)  # no file and no weight has them
MINOR_FIELDS = ("classes", "activation", "norm_eps", "constants")  # with another of these it is still the same preset


def inspect_file(path: str | Path, /, *, source: str | None = None, **known: Any) -> CheckpointInspection:
    """Looks into a file or folder of any layout, or of none; only one that cannot be read at all is refused.

    `source` names the layout where it should not be found out; fields that no file says, such as heads, may be given.
    """
    known = parse_trained_size(known)
    check_known_fields(known)
    place = locate_checkpoint(path)
    contents = read_raw_contents(place)
    rows = tuple(compute_tensor_statistics(name, tensor) for name, tensor in contents.tensors.items())
    seen = CheckpointInspection(
        path=str(path),
        kind=contents.kind,
        size=sum(file.stat().st_size for file in (find_weight_files(place) if place.is_dir() else [place])),
        wrapper=contents.wrapper,
        others=contents.other_keys,
        numbers=sum(row.count for row in rows),
        dtypes=dict(Counter(row.dtype for row in rows)),
        groups=group_tensors(rows),
        tensors=rows,
        suspicious=tuple(find_suspicious_weights(rows, contents.tensors)),
        checksums=verify_checksums(place),
    )
    try:
        layout = detect_layout(contents, source)
    except CheckpointError as error:
        return replace(seen, reason=str(error))
    try:
        found = translate_with_layout(contents, layout, known, str(path), named=source is not None)
    except CheckpointError as error:
        return replace(seen, layout=layout.name, reason=str(error))
    return add_description(replace(seen, layout=layout.name), found, known)


def group_tensors(rows: Sequence[TensorStatistics]) -> tuple[TensorGroup, ...]:
    """In the file's order, but groups of one name together."""
    kinds = Counter((block_pattern(row.name), row.shape, row.dtype) for row in rows)
    places = {name: place for place, name in reversed([*enumerate(name for name, *_ in kinds)])}
    ordered = sorted(kinds.items(), key=lambda each: places[each[0][0]])
    return tuple(TensorGroup(name, count, shape, dtype) for (name, shape, dtype), count in ordered)


def check_known_fields(known: Mapping[str, Any]) -> None:
    own = {each.name for family in load_families() for each in fields(family.config)}
    names = own - {*CHANGEABLE_FIELDS} | {"image_size", TRAINED_SIZE}
    for name in known:
        if name not in names:
            raise unknown_name_error("field that a file may leave out", name, sorted(names))


def add_description(
    seen: CheckpointInspection, found: TranslatedCheckpoint, known: Mapping[str, Any]
) -> CheckpointInspection:
    """With what the layout's reader found."""
    about, said = found.description, list(found.warnings)
    seen = replace(
        seen,
        family=about.family,
        config=dict(about.config),
        labels=about.labels,
        preprocessing=about.preprocessing,
        resampling=about.resampling,
        provenance=dict(about.provenance),
        ignored=found.ignored,
        assumed=dict(found.assumed),
    )
    try:
        family = get_family(about.family, seen.path)
        config = build_meta_model(found, family, seen.path).config
    except CheckpointError as error:
        return replace(seen, reason=str(error), suspicious=(*seen.suspicious, *said))
    preset, differs = find_nearest_preset(family, config)
    said += find_contradictions(about, config, known)
    seen = replace(seen, config=asdict(config), preset=preset, differs=differs, head=describe_head(config))
    return replace(seen, suspicious=(*seen.suspicious, *said))


def find_nearest_preset(family: Family, config: Any) -> tuple[str | None, dict[str, Any] | None]:
    """The preset of this width and depth, or these stages, with which the fewest fields differ, and those."""
    ranked = list[tuple[int, int, str, dict[str, Any]]]()
    for name, preset in family.presets.items():
        theirs, ours = asdict(preset), asdict(config)
        if theirs.get("layer_scale") is not None and ours.get("layer_scale") is not None:
            theirs["layer_scale"] = ours["layer_scale"]  # where it started is not in the weights
        apart = {key: value for key, value in ours.items() if value != theirs[key] and key not in RUNTIME_FIELDS}
        if not {"width", "depth", "stages", "block", "widths"} & apart.keys():
            ranked.append((len(apart.keys() - {*MINOR_FIELDS}), len(apart), name, apart))
    if not ranked:
        return None, None
    *_, name, apart = min(ranked, key=lambda each: each[:2])
    return name, apart


def find_contradictions(about: Description, config: Any, known: Mapping[str, Any]) -> list[str]:
    """What the checkpoint says of itself and does not go together, or with what was given."""
    how, size, said = about.preprocessing, pair(config.image_size), list[str]()
    if how is None:
        said.append("how pictures are prepared is not said")
    elif pair(how.image_size) != size:
        said.append(
            f"pictures are prepared at {format_shape(pair(how.image_size))}, the model is for {format_shape(size)}"
        )
    elif len(how.mean) != config.channels:
        said.append(f"pictures are prepared with {len(how.mean)} channels, the model is for {config.channels}")
    for name, value in known.items():
        there = getattr(config, "image_size" if name == TRAINED_SIZE else name, None)
        given = (
            parse_image_size(value)
            if name in ("image_size", TRAINED_SIZE)
            else tuple(value)
            if isinstance(value, list)
            else value
        )
        if there != given:
            said.append(f"{name} is {there!r} in the file, not {value!r} as given")
    return said


def describe_head(config: Any) -> str:
    pool = " on attention pooling (MAP)" if getattr(config, "pool", "") == "map" else ""
    classes = getattr(config, "classes", 0)
    if not classes:
        return f"none{' but features' * bool(pool)}{pool}"
    kind = "tanh layer and linear" if getattr(config, "head", "") == "mlp" else "linear"
    if getattr(config, "distilled", False):
        kind = "distilled, two linear"
    return f"{kind}, {classes} classes{pool}"
