"""A checkpoint of anybody's: whose layout, which model, which tensors, and what about them is suspicious."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.architecture import known_size
from vitrail.checkpoint.contents import read_contents, weights_in
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.fit import MAY_DIFFER
from vitrail.checkpoint.layout import Found
from vitrail.checkpoint.reading import (
    TRAINED_SIZE,
    built,
    interpreted,
    known_family,
    layout_of,
    located,
    with_trained_size,
)
from vitrail.errors import CheckpointError, unknown
from vitrail.inspection.integrity import verify
from vitrail.inspection.page import Group, Inspection
from vitrail.inspection.summary import dimensions
from vitrail.inspection.suspicions import Row, look, pattern, suspicions
from vitrail.models.catalog import families
from vitrail.models.checks import pair
from vitrail.models.family import Family

RUNTIME = (
    "dropout",
    "attention_dropout",
    "stochastic_depth",
    "stage_dropout",
    "dynamic",
)  # no file and no weight has them
MINOR = ("classes", "activation", "norm_eps", "constants")  # with another of these it is still the same preset


def inspect(path: str | Path, /, *, source: str | None = None, **known: Any) -> Inspection:
    """Looks into a file or folder of any layout, or of none; only one that cannot be read at all is refused.

    `source` names the layout where it should not be found out; fields that no file says, such as heads, may be given.
    """
    known = with_trained_size(known)
    check_known(known)
    place = located(path)
    contents = read_contents(place)
    rows = tuple(look(name, tensor) for name, tensor in contents.tensors.items())
    seen = Inspection(
        path=str(path),
        kind=contents.kind,
        size=sum(file.stat().st_size for file in (weights_in(place) if place.is_dir() else [place])),
        wrapper=contents.wrapper,
        others=contents.others,
        numbers=sum(row.count for row in rows),
        dtypes=dict(Counter(row.dtype for row in rows)),
        groups=grouped(rows),
        tensors=rows,
        suspicious=tuple(suspicions(rows, contents.tensors)),
        checksums=verify(place),
    )
    try:
        layout = layout_of(contents, source)
    except CheckpointError as error:
        return replace(seen, reason=str(error))
    try:
        found = interpreted(contents, layout, known, str(path), named=source is not None)
    except CheckpointError as error:
        return replace(seen, layout=layout.name, reason=str(error))
    return described(replace(seen, layout=layout.name), found, known)


def grouped(rows: Sequence[Row]) -> tuple[Group, ...]:
    """In the file's order, but groups of one name together."""
    kinds = Counter((pattern(row.name), row.shape, row.dtype) for row in rows)
    places = {name: place for place, name in reversed([*enumerate(name for name, *_ in kinds)])}
    ordered = sorted(kinds.items(), key=lambda each: places[each[0][0]])
    return tuple(Group(name, count, shape, dtype) for (name, shape, dtype), count in ordered)


def check_known(known: Mapping[str, Any]) -> None:
    own = {each.name for family in families() for each in fields(family.config)}
    names = own - {*MAY_DIFFER} | {"image_size", TRAINED_SIZE}
    for name in known:
        if name not in names:
            raise unknown("field that a file may leave out", name, sorted(names))


def described(seen: Inspection, found: Found, known: Mapping[str, Any]) -> Inspection:
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
        family = known_family(about.family, seen.path)
        config = built(found, family, seen.path).config
    except CheckpointError as error:
        return replace(seen, reason=str(error), suspicious=(*seen.suspicious, *said))
    preset, differs = nearest(family, config)
    said += contradictions(about, config, known)
    seen = replace(seen, config=asdict(config), preset=preset, differs=differs, head=head_of(config))
    return replace(seen, suspicious=(*seen.suspicious, *said))


def nearest(family: Family, config: Any) -> tuple[str | None, dict[str, Any] | None]:
    """The preset of this width and depth, or these stages, with which the fewest fields differ, and those."""
    ranked = list[tuple[int, int, str, dict[str, Any]]]()
    for name, preset in family.presets.items():
        theirs, ours = asdict(preset), asdict(config)
        if theirs.get("layer_scale") is not None and ours.get("layer_scale") is not None:
            theirs["layer_scale"] = ours["layer_scale"]  # where it started is not in the weights
        apart = {key: value for key, value in ours.items() if value != theirs[key] and key not in RUNTIME}
        if not {"width", "depth", "stages", "block", "widths"} & apart.keys():
            ranked.append((len(apart.keys() - {*MINOR}), len(apart), name, apart))
    if not ranked:
        return None, None
    *_, name, apart = min(ranked, key=lambda each: each[:2])
    return name, apart


def contradictions(about: Description, config: Any, known: Mapping[str, Any]) -> list[str]:
    """What the checkpoint says of itself and does not go together, or with what was given."""
    how, size, said = about.preprocessing, pair(config.image_size), list[str]()
    if how is None:
        said.append("how pictures are prepared is not said")
    elif pair(how.image_size) != size:
        said.append(f"pictures are prepared at {dimensions(pair(how.image_size))}, the model is for {dimensions(size)}")
    elif len(how.mean) != config.channels:
        said.append(f"pictures are prepared with {len(how.mean)} channels, the model is for {config.channels}")
    for name, value in known.items():
        there = getattr(config, "image_size" if name == TRAINED_SIZE else name, None)
        given = (
            known_size(value)
            if name in ("image_size", TRAINED_SIZE)
            else tuple(value)
            if isinstance(value, list)
            else value
        )
        if there != given:
            said.append(f"{name} is {there!r} in the file, not {value!r} as given")
    return said


def head_of(config: Any) -> str:
    pool = " on attention pooling (MAP)" if getattr(config, "pool", "") == "map" else ""
    classes = getattr(config, "classes", 0)
    if not classes:
        return f"none{' but features' * bool(pool)}{pool}"
    kind = "tanh layer and linear" if getattr(config, "head", "") == "mlp" else "linear"
    if getattr(config, "distilled", False):
        kind = "distilled, two linear"
    return f"{kind}, {classes} classes{pool}"
