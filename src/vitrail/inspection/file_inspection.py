"""Inspect any checkpoint: its layout, model, tensors and suspicious weights; and the report about it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite, prod
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.base.errors import CheckpointError, ConfigError, describe_error, unknown_name_error
from vitrail.base.files import check_regular_file, file_checksum, read_text
from vitrail.base.json_yaml import CHECKSUM_KEY as JSON_CHECKSUM_KEY
from vitrail.base.json_yaml import parse_json, verify_and_remove_checksum
from vitrail.base.text import abbreviate_list, format_table, make_printable
from vitrail.checkpoint.checksums import CHECKSUM_KEY, matches_header_checksum
from vitrail.checkpoint.config_from_shapes import parse_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import get_family
from vitrail.checkpoint.layout import TranslatedCheckpoint, detect_layout
from vitrail.checkpoint.reading import (
    TRAINED_SIZE,
    build_meta_model,
    parse_trained_size,
    read_named_contents,
    translate_with_layout,
)
from vitrail.checkpoint.run_files import CHECKPOINTS_FOLDER, MODEL_FOLDER, is_run_folder
from vitrail.checkpoint.weight_adaptation import CHANGEABLE_FIELDS, format_fields
from vitrail.checkpoint.weight_files import read_weight_file
from vitrail.checkpoint.weight_folders import CONFIG_FILE, find_weight_files
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.inspection.summary import format_megabytes, format_shape
from vitrail.layers.pool import AttentionPool
from vitrail.models.base.checks import ImageConfig, pair
from vitrail.models.base.contract import ImageModel, Model
from vitrail.models.base.family import Family
from vitrail.models.catalog.families import load_built_in_families

MAX_PLAUSIBLE_WEIGHT = 1e4  # far above trained weights; float16 ends at 65504
BLOCK_NUMBER = re.compile(r"(^|[./]|encoderblock_|encoder_layer_|unit)\d+(?=[./]|$)")  # in a tensor's name
BLOCK_NAME = re.compile(rf"(.*?{BLOCK_NUMBER.pattern})[./](.*)")
HEAD_NAME = re.compile(r"(^|[./])(heads?|head_dist|\w*classifier)[./]|^(module\.)?(fc|linear)\.")
BATCH_COUNTER_NAME = re.compile(r"\.num_batches_tracked$")  # integer buffer of batch norm
POSITION_NAME = re.compile(r"pos(ition)?_?embed|pos_(rows|columns)$")


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """Statistics of a tensor. Mean, deviation, lowest and highest are over finite values, None if there are none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float | None = None
    deviation: float | None = None
    lowest: float | None = None
    highest: float | None = None
    nan: int = 0
    infinite: int = 0

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def is_constant(self) -> bool:
        finite = self.lowest is not None and not self.nan and not self.infinite
        return finite and self.count > 1 and self.lowest == self.highest

    @property
    def is_varied(self) -> bool:
        return self.lowest != self.highest

    @property
    def largest_magnitude(self) -> float:
        return max(abs(self.lowest or 0.0), abs(self.highest or 0.0))


def compute_tensor_statistics(name: str, tensor: Tensor) -> TensorStatistics:
    """Compute a tensor's statistics, with at most one copy of it."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    values, nan, infinite = flatten_to_float(tensor), 0, 0
    if values.numel() and not all(bool(end.isfinite()) for end in values.aminmax()):
        nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
        values = values[values.isfinite()]
    if not values.numel():
        return TensorStatistics(name=name, shape=shape, dtype=dtype, nan=nan, infinite=infinite)
    found = (*torch.std_mean(values, correction=0), *values.aminmax())
    deviation, mean, lowest, highest = (n if isfinite(n) else None for n in (each.item() for each in found))
    return TensorStatistics(
        name=name,
        shape=shape,
        dtype=dtype,
        mean=mean,
        deviation=deviation,
        lowest=lowest,
        highest=highest,
        nan=nan,
        infinite=infinite,
    )


def flatten_to_float(tensor: Tensor) -> Tensor:
    """Values as float32 or float64; empty for packed dtypes, which cannot be converted."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    try:
        if tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float() if tensor.is_floating_point() else tensor.double()
    except NotImplementedError:
        return torch.empty(0)
    return tensor.reshape(-1)


def replace_block_number(name: str) -> str:
    """The tensor's name with # for the block's number, equal for all blocks."""
    return BLOCK_NUMBER.sub(r"\1#", name)


def find_suspicious_weights(rows: Sequence[TensorStatistics], tensors: Mapping[str, Tensor]) -> list[str]:
    """Findings, one line per kind."""
    floats = [row for row in rows if row.is_float]
    constant = [row for row in floats if row.is_constant and row.lowest]
    zero = [row.name for row in floats if row.is_constant and not row.lowest]
    blocks, single = find_identical_blocks_and_tensors([row for row in floats if row.is_varied], tensors)
    found = {
        "NaN": [f"{row.name} ({row.nan:,} of {row.count:,} values)" for row in rows if row.nan],
        "infinite": [f"{row.name} ({row.infinite:,} of {row.count:,} values)" for row in rows if row.infinite],
        f"beyond ±{MAX_PLAUSIBLE_WEIGHT:,.0f}": [
            f"{row.name} ({row.largest_magnitude:.3g})"
            for row in floats
            if row.largest_magnitude > MAX_PLAUSIBLE_WEIGHT
        ],
        "head of zeros, as in Google's ImageNet-21k files": [name for name in zero if HEAD_NAME.search(name)],
        "all zeros": [replace_block_number(name) for name in zero if not HEAD_NAME.search(name)],
        "constant, as before training": [f"{replace_block_number(row.name)} ({row.lowest:.4g})" for row in constant],
        "equal position embeddings, as before training": find_mostly_constant_position_tables(floats, tensors),
        "blocks with the same weights": blocks,
        "identical tensors": single,
        "not floating point": [
            f"{replace_block_number(row.name)} ({row.dtype})"
            for row in rows
            if not row.is_float and not BATCH_COUNTER_NAME.search(row.name)
        ],
        "empty": [row.name for row in rows if not row.count],
    }
    kinds = Counter(row.dtype for row in floats)
    if len(kinds) > 1:
        found["mixed dtypes"] = [f"{count} {kind}" for kind, count in kinds.most_common()]
    return [f"{what}: {abbreviate_list(list(dict.fromkeys(where)))}" for what, where in found.items() if where]


def find_identical_blocks_and_tensors(
    rows: Sequence[TensorStatistics], tensors: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Identical blocks, and other identical tensors; only tensors with equal statistics are compared."""
    first_name, copies = dict[object, str](), dict[str, str]()
    for row in rows:
        key = (row.shape, row.dtype, row.mean, row.deviation, row.lowest, row.highest)
        earlier = first_name.setdefault(key, row.name)
        if row.name != earlier and torch.equal(flatten_to_float(tensors[earlier]), flatten_to_float(tensors[row.name])):
            copies[row.name] = earlier
    places = {row.name: match.group(1, 3) for row in rows if (match := BLOCK_NAME.fullmatch(row.name))}
    sizes = Counter(block for block, _ in places.values())
    pairs = Counter(
        (places[one][0], places[other][0])
        for other, one in copies.items()
        if one in places and other in places and places[one][1] == places[other][1]
    )
    blocks = {pair: f"{pair[0]} = {pair[1]}" for pair, count in pairs.items() if count == sizes[pair[1]]}
    single = [
        f"{one} = {other}"
        for other, one in copies.items()
        if one not in places or other not in places or (places[one][0], places[other][0]) not in blocks
    ]
    return list(blocks.values()), single


def find_mostly_constant_position_tables(rows: Sequence[TensorStatistics], tensors: Mapping[str, Tensor]) -> list[str]:
    """Position tables in which most rows equal the last; those of prefix tokens may differ."""
    found = list[str]()
    for row in rows:
        if POSITION_NAME.search(row.name) and len(row.shape) > 1 and row.is_varied:
            table = flatten_to_float(tensors[row.name]).reshape(-1, row.shape[-1])
            count = int((table == table[-1]).all(dim=1).sum())
            if len(table) > 2 and 2 * count > len(table):
                found.append(f"{row.name} ({count} of {len(table)})")
    return found


CHECKSUMMED_NAME = re.compile(r"(config|run)\.json|.*\.safetensors")
ChecksumVerdict = Literal["intact", "damaged", "no checksum"]


@dataclass(frozen=True)
class FileCheck:
    """One file and whether it matches its checksum; `reason` explains damage."""

    file: str
    verdict: ChecksumVerdict
    reason: str = ""


def verify_checksums(place: Path) -> tuple[FileCheck, ...]:
    """Check every file of a folder that may have a checksum, or a single file."""
    if not place.is_dir():
        return tuple(verify_file(place, place.name))
    folders = [place, *(place / name for name in (CHECKPOINTS_FOLDER, MODEL_FOLDER) if is_run_folder(place))]
    files = [each for folder in folders if folder.is_dir() for each in sorted(folder.iterdir())]
    candidates = [each for each in files if CHECKSUMMED_NAME.fullmatch(each.name)]
    return tuple(check for each in candidates for check in verify_file(each, str(each.relative_to(place))))


def verify_file(path: Path, name: str) -> Iterator[FileCheck]:
    """Check a file, and the files whose checksums it lists."""
    try:
        check_regular_file(path.stat())
        if path.suffix == ".json":
            yield from verify_json_and_listed_files(path, name)
        elif path.suffix == ".safetensors":
            yield FileCheck(name, verify_weights(path))
        else:
            yield FileCheck(name, "no checksum")
    except (CheckpointError, OSError, ValueError, SafetensorError) as error:
        yield FileCheck(name, "damaged", describe_error(error))


def verify_json_and_listed_files(path: Path, name: str) -> Iterator[FileCheck]:
    data: Any = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise CheckpointError("it is not a JSON object")
    verify_and_remove_checksum(data)
    yield FileCheck(name, "intact" if JSON_CHECKSUM_KEY in data else "no checksum")
    listed = data.get("files") if path.name == CONFIG_FILE else None
    for other, expected in (listed if isinstance(listed, dict) else {}).items():
        if Path(other).name != other:
            raise CheckpointError(f"it lists {other!r}, which is outside its folder")
        same = file_checksum(path.with_name(other)) == expected
        where = str(Path(name).with_name(other))
        yield FileCheck(where, "intact") if same else FileCheck(where, "damaged", f"it does not match {name}")


def verify_weights(path: Path) -> ChecksumVerdict:
    with safe_open(path, "pt") as file:  # the header alone: public files have no checksum and may be large
        if CHECKSUM_KEY not in (file.metadata() or {}):
            return "no checksum"
    contents = read_weight_file(path)
    if not matches_header_checksum(contents.tensors, contents.header):
        raise CheckpointError("the weights do not match their checksum")
    return "intact"


# fields that neither files nor weights determine
RUNTIME_FIELDS = (
    *("dropout", "attention_dropout", "stochastic_depth", "stage_dropout", "mlp_dropout", "dynamic"),
    *("initialization", "norm_momentum"),  # of training alone
)
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
    code: str | None = None  # of a family from outside the package
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
    about = Description(family=inspection.family, config=inspection.config or {}, code=inspection.code)
    family = get_family(about, inspection.path)
    changes = {name: value for name, value in fields.items() if name != TRAINED_SIZE}
    with torch.device("meta"):
        return family.build(family.configure(**{**about.config, **changes}))


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
        code=about.code,
        config=dict(about.config),
        labels=about.labels,
        preprocessing=about.preprocessing,
        resampling=about.resampling,
        provenance=dict(about.provenance),
        ignored=translated.ignored,
        assumed=dict(translated.assumed),
    )
    try:
        family = get_family(about, inspection.path)
        model = build_meta_model(translated, family, inspection.path)
    except (CheckpointError, ConfigError) as error:
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
