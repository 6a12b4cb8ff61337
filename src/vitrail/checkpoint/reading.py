"""From a checkpoint of any layout to a model: found, checked, made to fit, and every tensor accounted for."""

import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.checkpoint import hub
from vitrail.checkpoint.config_from_shapes import format_size, parse_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents, read_raw_contents
from vitrail.checkpoint.layout import LAYOUT_KEY, OWNER_NAMED_KEY, Layout, TranslatedCheckpoint
from vitrail.checkpoint.load_report import LoadReport, format_assumptions
from vitrail.checkpoint.resample import INTERPOLATION_RULES, ResamplingPolicy
from vitrail.checkpoint.sources import SOURCE_NAMES
from vitrail.checkpoint.weight_adaptation import CHANGEABLE_FIELDS, adapt_weights, check_adaptable
from vitrail.errors import CheckpointError, ConfigError, describe_error, unknown_name_error
from vitrail.models.catalog import load_families
from vitrail.models.checks import pair
from vitrail.models.family import Family

RUNNABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # dtypes that a model computes in
TRAINED_SIZE = "trained_size"  # of the images; tells apart grids with the same number of positions; not a config field


@dataclass(frozen=True)
class Checkpoint:
    """A model, what is known of it, and what became of every tensor on the way."""

    model: Any
    description: Description
    report: LoadReport
    layout: str  # of the file, as --from says it


def load(
    path: str | Path,
    *,
    source: str | None = None,
    family: Family | None = None,
    policy: ResamplingPolicy | None = None,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> Any:
    """The model in a folder or file of any layout, or one made from it for another use.

    load("deit_tiny_patch16_224.pth"), load("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
    load(path, image_size=384, classes=37). Positions are resampled to another image size by the policy of those who
    made the checkpoint, or the named one; the patch kernel to another patch size as FlexiViT does it; and a head for
    other classes starts at zero. `source` names the layout where it should not be found out; fields that a file does
    not say, such as heads, may be given too, and trained_size=(32, 128) for its grid of positions. Weights keep the
    dtype they are stored in unless `dtype` is given; mixed dtypes are cast to the widest. Nothing in a file is ever
    run: a family from outside the package is given as `family`.
    """
    found = read(path, source=source, family=family, policy=policy, dtype=dtype, **fields)
    warn_about_report(found, path)
    return found.model


def read(
    path: str | Path,
    *,
    source: str | None = None,
    family: Family | None = None,
    policy: ResamplingPolicy | None = None,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> Checkpoint:
    """`load`, with the description and the report beside the model."""
    if policy is not None and policy not in tuple(INTERPOLATION_RULES):
        raise unknown_name_error("position policy", policy, INTERPOLATION_RULES)
    fields = parse_trained_size(fields)
    found = read_translated_checkpoint(path, source, fields)
    description, where = found.description, str(path)
    family = family or get_family(description.family, where)
    if family.name != description.family:
        raise CheckpointError(f"{where} is of the family {description.family!r}; family={family.name!r} was given")
    source_model = build_meta_model(found, family, where)
    tensors, mixed = cast_to_one_dtype(found.tensors, source_model)
    model = source_model
    check_trained_size(fields.pop(TRAINED_SIZE, None), source_model.config, where)
    if fields:
        with torch.device("meta"):
            model = family.build(check_adaptable(source_model.config, family.configure(source_model.config, **fields)))
    used = policy or description.resampling
    fitted, report = adapt_weights(tensors, source_model, model, used)
    model.load_state_dict(fitted, assign=True)
    foreign = "source" in description.provenance  # one of ours may have a head that was not trained yet
    said = (
        *found.warnings,
        *(find_zero_head_warnings(model, report) if foreign else ()),
        *(mixed if dtype is None else ()),
    )
    report = replace(report, ignored=(*report.ignored, *found.ignored), warnings=said, assumed=found.assumed)
    description = update_description(description, source_model.config, model.config, used)
    return Checkpoint((model if dtype is None else model.to(dtype)).eval(), description, report, found.layout)


def build_meta_model(found: TranslatedCheckpoint, family: Family, where: str) -> Any:
    """The model that a checkpoint describes, without its numbers; refused unless the tensors are that model's."""
    with wrap_config_errors(where):
        config = family.configure(**found.description.config)
        blocks = getattr(config, "depth", 0) + sum(getattr(config, "stages", ()))
        if blocks > len(found.tensors):  # before a model of a million blocks is built for nothing
            raise CheckpointError(f"{where}: {blocks} blocks and {len(found.tensors)} tensors; expected more tensors")
        with torch.device("meta"):
            model = family.build(config)
    check_tensors_fit_model(model, found.tensors, where)
    return model


def warn_about_report(found: Checkpoint, path: str | Path, given: Collection[str] = ()) -> None:
    """One warning with everything in the report that needs attention; `given` are fields that the user has set."""
    assumption = format_assumptions(found.report.assumed, given)
    lines = ([f"{path} {assumption}"] if assumption else []) + [f"{path}: {each}" for each in found.report.warnings]
    if lines:
        warnings.warn("; ".join(lines), stacklevel=3)


def describe(path: str | Path, *, source: str | None = None, **fields: Any) -> Description:
    """What a checkpoint says of itself, or its layout of it: family, config, preprocessing, labels, provenance.

    Fields that the file does not specify, such as heads, may be given.
    """
    return read_translated_checkpoint(path, source, parse_trained_size(fields)).description


def parse_trained_size(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with trained_size, if given, as (rows, columns)."""
    if fields.get(TRAINED_SIZE) is None:
        return {name: value for name, value in fields.items() if name != TRAINED_SIZE}
    size = parse_image_size(fields[TRAINED_SIZE])
    if size is None:
        given = repr(fields[TRAINED_SIZE])[:40]
        raise ConfigError(f"{TRAINED_SIZE} is {given}; expected pixels such as 224, or (rows, columns)")
    return {**fields, TRAINED_SIZE: size}


def check_trained_size(given: tuple[int, int] | None, config: Any, where: str) -> None:
    """Checks trained_size against layouts that specify the size themselves."""
    size = pair(config.image_size)
    if given not in (None, size):
        raise CheckpointError(
            f"{where} was trained on images of {format_size(size)}, not {format_size(given)}; "
            f"expected no other {TRAINED_SIZE}"
        )


def read_translated_checkpoint(path: str | Path, source: str | None, fields: Mapping[str, Any]) -> TranslatedCheckpoint:
    """The checkpoint in our words, its tensors as they are; fields that no file says may be known."""
    contents = read_raw_contents(locate_checkpoint(path))
    return translate_with_layout(contents, detect_layout(contents, source), fields, str(path), named=source is not None)


def locate_checkpoint(path: str | Path) -> Path:
    """Where it is on this machine, once it has come from the hub."""
    if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"the checkpoint is {path!r}; expected a path")
    if hub.is_hub_name(path):
        return hub.fetch_model(str(path))
    if not Path(path).exists() and any(str(path) in (*each.presets, *each.aliases) for each in load_families()):
        raise CheckpointError(
            f"{path} is a model's name and no file; expected a checkpoint, or hf-hub:timm/…: "
            f"vitrail.create({str(path)!r}) gives it untrained"
        )
    return Path(path)


def translate_with_layout(
    contents: RawContents, layout: Layout, fields: Mapping[str, Any], where: str, *, named: bool = False
) -> TranslatedCheckpoint:
    """What the layout makes of a file; it receives those of the fields that the model must already have.

    `named` is whether the user named the layout.
    """
    known = {name: value for name, value in fields.items() if name not in CHANGEABLE_FIELDS}
    said = named or contents.header.get(LAYOUT_KEY) == layout.name
    with wrap_config_errors(where):
        found = layout.read(contents, {**known, "asked_size": fields.get("image_size"), OWNER_NAMED_KEY: said})
    return replace(drop_mismatched_labels(found), layout=layout.name)


@cache
def list_layouts() -> tuple[Layout, ...]:
    """All that can be read and written, our own first; the first that recognises a file reads it."""
    sources = (f"vitrail.checkpoint.sources.{name}" for name in SOURCE_NAMES)
    return tuple(import_module(name).LAYOUT for name in ("vitrail.checkpoint.sources.vitrail", *sources))


def get_layout(name: str) -> Layout:
    known = {layout.name: layout for layout in list_layouts()}
    if name not in known:
        raise unknown_name_error("layout", name, known)
    return known[name]


def detect_layout(contents: RawContents, source: str | None) -> Layout:
    if source is not None:
        return get_layout(source)
    if not contents.tensors:
        raise CheckpointError(f"{contents.path} holds no tensors; expected the weights of a Vision Transformer")
    said = contents.header.get(LAYOUT_KEY)
    layout = next(
        (each for each in list_layouts() if each.name == said or (said is None and each.matches(contents))), None
    )
    if layout is None:
        names = ", ".join(list(contents.tensors)[:3])
        raise CheckpointError(
            f"{contents.path} is of no layout known here ({len(contents.tensors)} tensors: {names}, …); "
            f"expected {', '.join(each.name for each in list_layouts())}"
        )
    return layout


def drop_mismatched_labels(found: TranslatedCheckpoint) -> TranslatedCheckpoint:
    labels, classes = found.description.labels, found.description.config.get("classes")
    if labels is None or len(labels) == classes:
        return found
    warning = f"{len(labels)} labels for {classes} classes: left out"
    return replace(found, description=replace(found.description, labels=None), warnings=(*found.warnings, warning))


def update_description(description: Description, saved: Any, config: Any, policy: ResamplingPolicy) -> Description:
    """The description of the model that was made: of another size or other classes, perhaps."""
    how, same = description.preprocessing, getattr(saved, "classes", None) == getattr(config, "classes", None)
    if how is not None and saved.image_size != config.image_size:
        how = replace(how, image_size=config.image_size)
    labels = description.labels if same else None
    return replace(description, config=asdict(config), labels=labels, preprocessing=how, resampling=policy)


def find_zero_head_warnings(model: Any, report: LoadReport) -> list[str]:
    head = getattr(model, "head", None)
    if isinstance(head, nn.Linear) and "head.weight" in report.matched and not head.weight.any():
        return ["the head is all zeros, as in Google's ImageNet-21k files: train it, or take features with classes=0"]
    return []


@contextmanager
def wrap_config_errors(where: str) -> Generator[None]:
    """A config that cannot be is the checkpoint's fault, and one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (ConfigError, TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{where}: {describe_error(error)}") from None


def get_family(name: str, where: str) -> Family:
    known = {family.name: family for family in load_families()}
    if name not in known:
        hint = unknown_name_error("family", name, known)
        raise CheckpointError(f"{where}: {hint} (for one from outside, give family=…)")
    return known[name]


def check_tensors_fit_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Every tensor of the model is there, of its shape, and no other."""
    expected = model.state_dict()
    odd = [name for name, tensor in tensors.items() if not has_runnable_dtype(tensor, expected.get(name))]
    wrong = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "of another shape": [n for n, t in tensors.items() if n in expected and t.shape != expected[n].shape],
        "not of floats": odd,
        "without values": [name for name, tensor in tensors.items() if tensor.is_meta],
    }
    found = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
        for what, names in wrong.items()
        if names
    ]
    if len(found) == 1 and odd:
        kinds = (
            f"{', '.join(format_dtype(each) for each in RUNNABLE_DTYPES[:-1])} or {format_dtype(RUNNABLE_DTYPES[-1])}"
        )
        raise CheckpointError(f"{where}: {odd[0]} has dtype {format_dtype(tensors[odd[0]].dtype)}; expected {kinds}")
    if found:
        raise CheckpointError(f"{where} does not fit its config: {'; '.join(found)} of {len(expected)} tensors")


def has_runnable_dtype(tensor: Tensor, expected: Tensor | None) -> bool:
    """Whether a model computes in this dtype, or it is an integer where one is expected (batch norm's counter)."""
    integer = not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.dtype in RUNNABLE_DTYPES or (integer and expected is not None and not expected.is_floating_point())


def cast_to_one_dtype(tensors: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors in the widest of their floating dtypes, and a warning if they had several."""
    counters = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in counters}
    if len(dtypes) < 2:
        return dict(tensors), ()
    widest = reduce(torch.promote_types, dtypes)
    cast = {name: tensor if name in counters else tensor.to(widest) for name, tensor in tensors.items()}
    named = ", ".join(sorted(format_dtype(each) for each in dtypes))
    return cast, (f"its tensors have dtypes {named}: all are used as {format_dtype(widest)} (dtype=… chooses another)",)


def format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
