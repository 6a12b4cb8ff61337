"""Load a model from a checkpoint of any layout: locate, translate, check and adapt it, and report on every tensor."""

import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, CheckpointWarning, ConfigError, describe_error, unknown_name_error
from vitrail.base.text import abbreviate_list
from vitrail.checkpoint.config_from_shapes import format_size, parse_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import get_family
from vitrail.checkpoint.layout import (
    LAYOUT_KEY,
    LAYOUT_NAMED_KEY,
    OWN_LAYOUT,
    Layout,
    TranslatedCheckpoint,
    detect_layout,
)
from vitrail.checkpoint.model_location import (
    UNVERIFIED,
    find_location_warnings,
    find_named_weights,
    locate_or_download_checkpoint,
)
from vitrail.checkpoint.resample import INTERPOLATION_RULES, ResamplingPolicy
from vitrail.checkpoint.weight_adaptation import (
    CHANGEABLE_FIELDS,
    LoadReport,
    adapt_weights,
    check_adaptable,
    format_assumed_fields,
)
from vitrail.checkpoint.weight_files import RawContents, read_raw_contents
from vitrail.checkpoint.weight_folders import find_bundled_model
from vitrail.data.images.class_names import IMAGENET, list_imagenet_labels
from vitrail.models.base.checks import ImageConfig, pair
from vitrail.models.base.contract import check_reads_images
from vitrail.models.base.family import Family
from vitrail.models.catalog import families
from vitrail.models.catalog.external_families import trust
from vitrail.models.catalog.pretrained import PretrainedWeights, find_weights_by_file_name

RUNNABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # dtypes that a model computes in
SIZE_FIELDS = ("width", "widths", "depth", "depths", "stages", "heads", "patch_size")  # that tell presets apart
DEPTH_FIELDS = ("depth", "encoder_depth", "decoder_depth")
TRAINED_SIZE = (
    "trained_size"  # size of the training images, for grids with the same number of positions; not a config field
)


@dataclass(frozen=True)
class Checkpoint:
    """A model, its description, and a report on what was done with every tensor."""

    model: Any
    description: Description
    report: LoadReport
    layout: str  # of the file


def create(name: str, /, *, pretrained: bool | Any = False, **fields: Any) -> Any:
    """Build a model by name, with newly initialized or public weights.

    create("vit_base_patch16_224", classes=10, image_size=384), create("ViT-B/16", pretrained=True, classes=10).
    `name` is a preset or an alias such as "ViT-B/16", or for your own family "package.module:preset" or
    "path/to/file.py:preset"; `fields` replace those of its config. With `pretrained`, the weights are downloaded once:
    timm's default ones, or those of "preset.tag"; the head for another number of classes is new and zero. The type
    depends on the name: a ViT, a DeiT, a Transformer, …

    >>> model = vitrail.create("ViT-Ti/16", classes=10, image_size=64)
    >>> model.config.width, model.config.classes
    (192, 10)
    """
    return load(name, **fields) if pretrained else families.build_preset(name, **fields)


def load(
    path: str | Path,
    *,
    source: str | None = None,
    family: Family | None = None,
    policy: ResamplingPolicy | None = None,
    dtype: torch.dtype | None = None,
    trust_code: str | Sequence[str] = (),
    **fields: Any,
) -> Any:
    """Load a model by name or from a file or folder of any layout, in its own configuration or adapted to another one.

    load("vit_tiny_patch16_224"), load("ViT-Ti/16.augreg_in21k"), load("weights.pth"), load("hf-hub:OWNER/NAME"),
    load(path, image_size=384, classes=37). Names are those of `vitrail models`; their public weights are downloaded
    once. For another image size, positions are resampled by the method of the
    checkpoint's authors, or by `policy`. For another patch size, the patch kernel is resized as in FlexiViT. For other
    classes, the head is new and zero. `source` overrides layout detection. Fields that the file does not specify, such
    as heads, can be passed too; trained_size=(32, 128) gives the grid of its positions. `dtype` casts the weights; by
    default they keep their dtype, and mixed dtypes are cast to the widest. No code that a file names is run: for a
    family from outside the package pass `trust_code`, such as "resmlp.py:resmlp_tiny", or its `family`.

    >>> model = vitrail.load("vit_fashion", classes=3)
    >>> model.config.classes
    3
    """
    with trust(trust_code):
        checkpoint = read(path, source=source, family=family, policy=policy, dtype=dtype, **fields)
    warn_about_report(checkpoint, path)
    return checkpoint.model


def read(
    path: str | Path,
    *,
    source: str | None = None,
    family: Family | None = None,
    policy: ResamplingPolicy | None = None,
    dtype: torch.dtype | None = None,
    images_only: bool = False,
    choose_fields: Callable[[Description], Mapping[str, Any]] = lambda _: {},
    **fields: Any,
) -> Checkpoint:
    """Like `load`, but return the model together with its description and the load report.

    `images_only` refuses a model that reads text. `choose_fields` returns further fields for what the file says.
    """
    if policy is not None and policy not in tuple(INTERPOLATION_RULES):
        raise unknown_name_error("position policy", policy, INTERPOLATION_RULES)
    fields = parse_trained_size(fields)
    if dtype is None and find_bundled_model(path) is not None:
        dtype = torch.float32  # stored in half precision, to be small
    translated = read_translated_checkpoint(path, source, fields)
    description, where = translated.description, str(path)
    family = family or get_family(description, where)
    if family.name != description.family:
        raise CheckpointError(f"{where} is of the family {description.family!r}; family={family.name!r} was given")
    if images_only:
        check_reads_images(family.build)
    source_model = build_meta_model(translated, family, where)
    tensors, dtype_warnings = cast_to_one_dtype(translated.tensors, source_model)
    model = source_model
    check_trained_size(fields.pop(TRAINED_SIZE, None), source_model.config, where)
    fields |= choose_fields(description)
    if fields:
        with torch.device("meta"):
            model = family.build(check_adaptable(source_model.config, family.configure(source_model.config, **fields)))
    policy = policy or description.resampling
    adapted, report = adapt_weights(tensors, source_model, model, family.checkpoint, policy)
    model.load_state_dict(adapted, assign=True)
    foreign = "source" in description.provenance  # our own may have a head that was not trained yet
    head_warnings = find_zero_head_warnings(adapted, report) if foreign else []
    report = replace(
        report,
        ignored=(*report.ignored, *translated.ignored),
        warnings=(*translated.warnings, *head_warnings, *(dtype_warnings if dtype is None else ())),
        assumed=translated.assumed,
    )
    description = describe_adapted_model(description, source_model.config, model.config, policy)
    return Checkpoint((model if dtype is None else model.to(dtype)).eval(), description, report, translated.layout)


def build_meta_model(translated: TranslatedCheckpoint, family: Family, where: str) -> Any:
    """Build the model of a checkpoint without values, and check that the tensors fit it."""
    with wrap_config_errors(where):
        config = family.configure(**translated.description.config)
        sizes, tensors = asdict(config), len(translated.tensors)
        blocks = sum(sizes.get(name, 0) for name in DEPTH_FIELDS) + sum(sizes.get("stages", ()))
        if blocks > tensors:  # checked before building, which takes long for a million blocks
            raise CheckpointError(f"{where}: {blocks} blocks and {tensors} tensors; expected more tensors")
        with torch.device("meta"):
            model = family.build(config)
    check_tensors_fit_model(model, translated.tensors, where)
    return model


def warn_about_report(checkpoint: Checkpoint, path: str | Path, given: Collection[str] = ()) -> None:
    """Issue one warning with all that needs attention in the report; `given` are fields that the user has set."""
    report = checkpoint.report
    assumption, fields = format_assumed_fields(report.assumed, (*given, "labels"))  # names do not change the results
    lines = ([f"{path} {assumption}"] if assumption else []) + [f"{path}: {each}" for each in report.warnings]
    if lines:
        warnings.warn(CheckpointWarning("; ".join(lines), fields=(*fields, "source")), stacklevel=3)


def describe(path: str | Path, *, source: str | None = None, **fields: Any) -> Description:
    """Family, config, preprocessing, labels and provenance of a checkpoint, from the file or its layout.

    Fields that the file does not specify, such as heads, can be passed.

    >>> about = vitrail.describe("vit_fashion")
    >>> about.family, about.config["classes"], about.labels[1]
    ('vit', 10, 'Trouser')
    """
    return read_translated_checkpoint(path, source, parse_trained_size(fields)).description


def parse_trained_size(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with trained_size, if it is given, as (rows, columns)."""
    if fields.get(TRAINED_SIZE) is None:
        return {name: value for name, value in fields.items() if name != TRAINED_SIZE}
    size = parse_image_size(fields[TRAINED_SIZE])
    if size is None:
        given = repr(fields[TRAINED_SIZE])[:40]
        raise ConfigError(f"{TRAINED_SIZE} is {given}; expected a size in pixels such as 224, or (rows, columns)")
    return {**fields, TRAINED_SIZE: size}


def check_trained_size(given: tuple[int, int] | None, config: Any, where: str) -> None:
    """Check trained_size against the size in the config, which some layouts specify."""
    if given is not None and not isinstance(config, ImageConfig):
        raise CheckpointError(f"{where} reads text; remove {TRAINED_SIZE}, the size of training images")
    if given is not None and given != pair(config.image_size):
        raise CheckpointError(
            f"{where} was trained on images of {format_size(pair(config.image_size))}, not {format_size(given)}; "
            f"remove {TRAINED_SIZE} or set it to this size"
        )


def read_translated_checkpoint(path: str | Path, source: str | None, fields: Mapping[str, Any]) -> TranslatedCheckpoint:
    """Read a checkpoint and translate it to our tensor names; `fields` are given by the user."""
    contents = read_named_contents(path)[0]
    return translate_with_layout(contents, detect_layout(contents, source), fields, str(path), named=source is not None)


def read_named_contents(path: str | Path) -> tuple[RawContents, Path]:
    """Read a file, a folder or a model by name, and return where it is on this machine.

    Public weights are recognized by the name that they are opened by, or by that of their file.
    """
    weights = find_named_weights(path)
    place = locate_or_download_checkpoint(path)
    location_warnings = find_location_warnings(path, place)  # before a file that is not the hub's is read
    contents = replace(read_raw_contents(place), warnings=location_warnings)
    if weights is not None and "family" not in (contents.config or {}):  # a folder of ours says what it is
        contents = add_timm_config(contents, weights)
    return replace(contents, weights=weights or find_weights_by_file_name(Path(path))), place


def add_timm_config(contents: RawContents, weights: PretrainedWeights) -> RawContents:
    """The contents with the architecture and preprocessing of the table in config.json, as far as it lacks them."""
    config = contents.config or {}
    known: dict[str, Any] = {
        "input_size": [len(weights.mean), weights.image_size, weights.image_size],
        "crop_pct": weights.crop,
        "crop_mode": "squash" if weights.fit == "squash" else "center",
        "interpolation": weights.interpolation,
        "mean": list(weights.mean),
        "std": list(weights.std),
    }
    given = config.get("pretrained_cfg")
    if isinstance(given, dict):
        known |= {name: value for name, value in given.items() if value is not None}
    return replace(contents, config={"architecture": weights.preset, **config, "pretrained_cfg": known})


def translate_with_layout(
    contents: RawContents, layout: Layout, fields: Mapping[str, Any], where: str, *, named: bool = False
) -> TranslatedCheckpoint:
    """Let a layout read a file. It receives the fields that loading cannot change: the file must already have them.

    `named` says whether the user named the layout.
    """
    check_weights_are_not_quantized(contents.tensors, where)
    known = {name: value for name, value in fields.items() if name not in CHANGEABLE_FIELDS}
    known["requested_size"] = fields.get("image_size")
    known[LAYOUT_NAMED_KEY] = named or contents.header.get(LAYOUT_KEY) == layout.name
    with wrap_config_errors(where):
        translated = layout.read(contents, known)
    if layout.name != OWN_LAYOUT and LAYOUT_KEY not in contents.header:  # what we wrote has the names that it had
        translated = add_known_labels(translated, contents.weights)
    if contents.weights is not None and any(each.startswith(UNVERIFIED) for each in contents.warnings):
        check_is_preset(translated.description, contents.weights.preset, where, contents.path)
    translated = drop_mismatched_labels(translated)
    return replace(translated, layout=layout.name, warnings=(*contents.warnings, *translated.warnings))


def check_is_preset(description: Description, preset: str, where: str, place: Path) -> None:
    """Check that weights which somebody has put into the cache have the sizes of the preset that they are named by."""
    family, expected = families.find_preset(preset)
    found, sizes = {"family": description.family}, {"family": family.name}
    if description.family == family.name:
        sizes = {name: value for name, value in asdict(expected).items() if name in SIZE_FIELDS}
        found = asdict(family.configure(**description.config))
    for name, value in sizes.items():
        if found[name] != value:
            raise CheckpointError(
                f"{where}: the weights in {place} have {name} {found[name]}; expected {value}: replace them with those "
                f"of {preset}"
            )


def add_known_labels(translated: TranslatedCheckpoint, weights: PretrainedWeights | None) -> TranslatedCheckpoint:
    """Add the names of ImageNet's classes if the file has none; for weights that are not known, they are assumed."""
    description, assumed = translated.description, translated.assumed
    classes = description.config.get("classes", 0)
    if description.labels is not None:
        return translated
    labels = get_known_labels(weights, classes)
    if weights is None and classes == len(list_imagenet_labels()):
        labels, assumed = list_imagenet_labels(), {**assumed, "labels": IMAGENET}
    return replace(translated, description=replace(description, labels=labels), assumed=assumed)


def get_known_labels(weights: PretrainedWeights | None, classes: int) -> tuple[str, ...] | None:
    """The names of ImageNet's classes for weights that were trained on it."""
    if weights is None or not weights.has_imagenet_classes or classes != len(list_imagenet_labels()):
        return None
    return list_imagenet_labels()


def drop_mismatched_labels(translated: TranslatedCheckpoint) -> TranslatedCheckpoint:
    description = translated.description
    labels, classes = description.labels, description.config.get("classes")
    if labels is None or len(labels) == classes:
        return translated
    warning = f"it has {len(labels)} labels for {classes} classes: the labels are ignored"
    return replace(translated, description=replace(description, labels=None), warnings=(*translated.warnings, warning))


def describe_adapted_model(description: Description, saved: Any, config: Any, policy: ResamplingPolicy) -> Description:
    """Description of the adapted model, which may have another image size or other classes."""
    preprocessing, fields = description.preprocessing, asdict(config)
    same = asdict(saved).get("classes") == fields.get("classes")
    if preprocessing is not None and saved.image_size != config.image_size:
        preprocessing = replace(preprocessing, image_size=config.image_size)
    labels = description.labels if same else None
    return replace(description, config=fields, labels=labels, preprocessing=preprocessing, resampling=policy)


def find_zero_head_warnings(tensors: Mapping[str, Tensor], report: LoadReport) -> list[str]:
    if "head.weight" in report.matched and not tensors["head.weight"].any():
        return ["its head is all zeros, as in Google's ImageNet-21k files: train it, or get features with classes=0"]
    return []


@contextmanager
def wrap_config_errors(where: str) -> Generator[None]:
    """Report an invalid config as a one-line error of the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except (ConfigError, RuntimeError) as error:  # of a field in the file, or of torch for a shape
        raise CheckpointError(f"{where}: {describe_error(error)}") from None


def check_tensors_fit_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check that the tensors are exactly those of the model, with the same shapes and floating dtypes."""
    expected = model.state_dict()
    wrong_dtype = [name for name, tensor in tensors.items() if not has_runnable_dtype(tensor, expected.get(name))]
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "of another shape": [n for n, t in tensors.items() if n in expected and t.shape != expected[n].shape],
        "not of a floating dtype": wrong_dtype,
        "without values": [name for name, tensor in tensors.items() if tensor.is_meta],
    }
    texts = [f"{len(names)} {what} ({abbreviate_list(names, 3)})" for what, names in problems.items() if names]
    if len(texts) == 1 and wrong_dtype:
        raise unsupported_dtype_error(where, wrong_dtype[0], tensors[wrong_dtype[0]].dtype)
    if texts:
        raise CheckpointError(f"{where} does not fit its config: {'; '.join(texts)} of {len(expected)} tensors")


def has_runnable_dtype(tensor: Tensor, expected: Tensor | None) -> bool:
    """Whether a model can compute in this dtype, or it is an integer as expected (the counter of a batch norm)."""
    integer = not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.dtype in RUNNABLE_DTYPES or (integer and expected is not None and not expected.is_floating_point())


def check_weights_are_not_quantized(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse float8 and weights of integers, with or without their scales, before the other tensors are looked at."""
    for name, tensor in tensors.items():
        is_weight = name.endswith(("weight", "kernel"))
        if tensor.dtype not in RUNNABLE_DTYPES and (tensor.is_floating_point() or is_weight):
            raise unsupported_dtype_error(where, name, tensor.dtype)


def unsupported_dtype_error(where: str, name: str, dtype: torch.dtype) -> CheckpointError:
    return CheckpointError(
        f"{where}: {name} has dtype {format_dtype(dtype)}; expected one of "
        f"{', '.join(map(format_dtype, RUNNABLE_DTYPES))}: convert quantized weights with the library that wrote them"
    )


def cast_to_one_dtype(tensors: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Cast all tensors to the widest of their floating dtypes, with a warning if they have several."""
    counters = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in counters}
    if len(dtypes) < 2:
        return dict(tensors), ()
    widest = reduce(torch.promote_types, dtypes)
    cast = {name: tensor if name in counters else tensor.to(widest) for name, tensor in tensors.items()}
    named = ", ".join(sorted(format_dtype(each) for each in dtypes))
    return cast, (f"its tensors have dtypes {named}: all are cast to {format_dtype(widest)} (dtype=… sets another)",)


def format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
