"""Open a model by name: public weights, a run folder, a checkpoint of any layout, an export, hf-hub:… or timm:….

`open_model` finds the kind of the model, which opens it; the functions below it are those of the kind image. torch is
imported only for models that run on it: opening an exported model needs numpy and onnxruntime.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.base.errors import (
    CheckpointError,
    ConfigError,
    describe_error,
    missing_package_error,
    unusable_device_error,
)
from vitrail.base.kinds import call_command, check_kind, check_options, find_kind
from vitrail.base.machine import count_cores
from vitrail.base.text import abbreviate_list
from vitrail.checkpoint.hub import HUB_PREFIX
from vitrail.checkpoint.model_location import locate_or_download_checkpoint
from vitrail.checkpoint.run_files import FinishedRun, find_finished_run
from vitrail.checkpoint.weight_folders import find_bundled_model, read_kind
from vitrail.data.images.class_names import IMAGENET, check_class_labels, list_imagenet_labels
from vitrail.data.images.decoding.model_input import ImageTransform
from vitrail.data.images.preprocessing import PILLOW_FILTERS, Preprocessing
from vitrail.export.description import ExportDescription, is_exported
from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import Size, find_image_config, pair
from vitrail.models.catalog.external_families import TIMM_PREFIX, is_external_family_name, trust

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitrail.checkpoint.description import Description
    from vitrail.checkpoint.reading import Checkpoint
    from vitrail.data.text.tokenizer import TextTokenizer

IMAGE = "image"  # the kind
NOTHING: Any = None  # of what a kind does not have
LOAD_ARGUMENTS = ("path", "source", "family", "policy", "dtype", "images_only", "choose_fields")  # no config fields

GivenPreprocessing = Preprocessing | Mapping[str, Any] | None  # complete, some fields, or None for the checkpoint's


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in eval mode with all that it takes to use it, from `vitrail.open_model`.

    `model(batch)` of a model that reads images returns logits.

    >>> opened = vitrail.open_model("vit_fashion")
    >>> opened.model(opened.make_batch(["example:cat", "example:rocket"])).shape
    torch.Size([2, 10])
    """

    source: str  # the name that it was opened by
    model: Any  # a module; an ExportedModel runs without torch
    kind: str = "image"
    preprocessing: Preprocessing = NOTHING  # of images
    tokenizer: "TextTokenizer" = NOTHING  # of text
    classes: int = 0  # 0 without a head
    labels: tuple[str, ...] | None = None
    languages: tuple[str, str] | None = None  # source, target
    run: FinishedRun | None = None
    checkpoint: "Checkpoint | None" = None  # its layout, description and load report

    def __repr__(self) -> str:
        exported = isinstance(self.model, ExportedModel)
        facts = [repr(self.source), self.kind, "exported" if exported else type(self.model).__name__]
        if exported:
            facts.append(self.model.description.precision)
        else:
            facts.append(f"{sum(each.numel() for each in self.model.parameters()):,} parameters")
        if self.preprocessing is not None:
            facts.append(f"{'×'.join(map(str, pair(self.preprocessing.image_size)))} pixels")
        if self.tokenizer is not None:
            facts += [f"{self.tokenizer.vocabulary:,} tokens", *(["-".join(self.languages)] if self.languages else [])]
        elif self.classes:
            facts.append(f"{self.classes:,} classes{f': {abbreviate_list(self.labels, 3)}' if self.labels else ''}")
        elif self.kind == IMAGE:
            facts.append("no head")
        return f"Opened({', '.join(facts)})"

    @property
    def transform(self) -> ImageTransform:
        """A transform as torchvision's, which data loaders can use: `transform(photo)` is the model's input.

        The result is a tensor (C, rows, columns) on the CPU; for an exported model an array of uint8 (rows, columns,
        C). A photo is a path, bytes, a Pillow image, an array or a tensor. Only the settings are pickled for the
        workers of a data loader, not the model.

        >>> opened = vitrail.open_model("vit_fashion")
        >>> opened.transform("example:cat").shape
        torch.Size([1, 28, 28])
        """
        if isinstance(self.model, ExportedModel):
            return ImageTransform(self.preprocessing)
        return ImageTransform(self.preprocessing, next(self.model.parameters()).dtype)

    def make_batch(self, photos: Sequence[Any]) -> Any:
        """The model's input for several photos, with the batch as the first dimension, on the model's device."""
        inputs = [*map(self.transform, photos)]
        if isinstance(self.model, ExportedModel):
            return np.stack(inputs)
        import torch

        return torch.stack(inputs).to(next(self.model.parameters()).device)

    def copy_module(self) -> "Opened":
        """The same weights in separate modules, whose hooks do not see what other threads compute."""
        tensors: dict[int, Any] = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        return replace(self, model=deepcopy(self.model, tensors))

    @property
    def module(self) -> "nn.Module":
        """The model as a torch module; an exported one is wrapped in one, run by ONNX Runtime."""
        if not isinstance(self.model, ExportedModel):
            return self.model
        from vitrail.export.torch_modules import ExportedModule

        return ExportedModule(self.model)


def open_model(
    model: "str | Path | nn.Module | Opened",
    *,
    kind: str | None = None,
    image_size: Size | None = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    labels: Sequence[str] | Literal["imagenet"] | None = None,
    device: "str | torch.device | None" = None,
    threads: int | None = None,
    trust_code: str | Sequence[str] = (),
) -> Opened:
    """Open a model of any kind by name or path, or wrap a module with a config that reads images.

    The kind is image, text (a run of translation) or caption; with `kind`, a model of another one is an error. For
    another `image_size`, the positions are resampled as in `vitrail.load`. `preprocessing` replaces the model's own
    but its image size, or some of its fields; a model without any gets the usual values of its layout, or mean and
    std 0.5, with a warning. `labels` are class names, or "imagenet" for those of ImageNet-1k. By default, `device`
    is the CPU, and a module stays where it is; "auto" is a GPU if there is one. `threads` is for exported models,
    by default one per core. `fields` are config fields that a checkpoint does not specify, such as heads.
    `trust_code` names the file of a checkpoint's own family: "resmlp.py:resmlp_tiny"; no other code is imported.

    >>> opened = vitrail.open_model("vit_fashion")
    >>> opened.labels[0], opened.preprocessing.image_size
    ('T-shirt/top', (28, 28))
    """
    if not isinstance(fields, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"`fields` is {repr(fields)[:60]}; expected a dictionary such as {{'heads': 3}}")
    if not isinstance(model, str | Path | Opened):
        if kind not in (None, IMAGE):
            raise CheckpointError(
                f"the model is {repr(model)[:60]}; expected a name or a path, or what open_model returned"
            )
        if image_size is not None:
            fields = {**(fields or {}), "image_size": image_size}
        return wrap_module(model, fields, preprocessing, labels, device)
    if not model:
        raise CheckpointError("the model is ''; expected a name, a path, a module or what open_model returned")
    own, run = (model.kind, model.run) if isinstance(model, Opened) else detect_kind(model)
    source = model.source if isinstance(model, Opened) else str(model)
    found = find_kind(own, source)
    check_kind(own, kind or own, source)
    given: dict[str, Any] = {"image_size": image_size, "fields": fields, "preprocessing": preprocessing}
    given = check_options(found.open, {**given, "labels": labels, "device": device, "threads": threads}, source, found)
    if not isinstance(model, Opened):
        with trust(trust_code):
            return found.open(source, run, **given)
    if image_size is not None:
        fields = {**(fields or {}), "image_size": image_size}
    refuse_fields_without_checkpoint(fields, source, "already loaded")
    return change_opened_model(model, preprocessing, labels, device, threads)


def detect_kind(model: str | Path) -> tuple[str, FinishedRun | None]:
    """The name of the kind of a model, and its run, from the files in its folder; it is downloaded if it is missing.

    torch is not imported: a missing file and a missing network are reported at once.
    """
    name = str(model)
    if name.startswith(TIMM_PREFIX) or is_exported(name):
        return IMAGE, None
    run = find_finished_run(Path(name))
    return read_kind(locate_or_download_checkpoint(name) if run is None else run.model), run


def run_command(command: str, model: str, **options: Any) -> Any:
    """What a command does with a model, by the kind of the model; options that are None are not given."""
    return call_command(find_kind(detect_kind(model)[0], model), command, model, options)


def open_image_model(
    name: str,
    run: FinishedRun | None = None,
    *,
    image_size: Size | None = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    labels: Sequence[str] | Literal["imagenet"] | None = None,
    device: "str | torch.device | None" = None,
    threads: int | None = None,
) -> Opened:
    """A model that reads images: a checkpoint of any layout, a run, an export, or one of timm's."""
    if image_size is not None:
        fields = {**(fields or {}), "image_size": image_size}
    if name.startswith(TIMM_PREFIX):
        refuse_fields_without_checkpoint(fields, name, "built by timm")
        opened = open_timm_model(name.removeprefix(TIMM_PREFIX))
        if preprocessing is not None:
            opened = replace(opened, preprocessing=merge_preprocessing(opened.preprocessing, preprocessing))
    elif is_exported(name):
        size, others = split_image_size(fields)
        refuse_fields_without_checkpoint(others, name, "exported and complete")
        return open_exported_model(name, size, preprocessing, labels, threads or count_cores())
    else:
        opened = open_checkpoint(name, fields or {}, preprocessing, run=run)
    return replace(
        opened,
        model=move_to_device_for_eval(opened.model, device or "cpu"),
        labels=choose_labels(labels, opened.labels, opened.classes),
    )


def download_if_missing(name: str | Path) -> None:
    """Download a model that is opened by name. Before torch is imported: a missing network is reported at once."""
    if not str(name).startswith((TIMM_PREFIX, HUB_PREFIX)) and not is_exported(name):
        locate_or_download_checkpoint(name)


def change_opened_model(
    loaded: Opened,
    preprocessing: GivenPreprocessing,
    labels: Sequence[str] | None,
    device: "str | torch.device | None",
    threads: int | None,
) -> Opened:
    """The same model, not loaded again, with other settings; None keeps a setting."""
    model, how = loaded.model, loaded.preprocessing
    if isinstance(model, ExportedModel):
        if preprocessing is not None:
            how = merge_preprocessing(how, preprocessing)
            how = fit_preprocessing_to_export(how, model.description, loaded.source)
        if threads not in (None, model.threads):
            model = model.with_threads(model.streams, threads)
    else:
        if preprocessing is not None:
            is_timm = loaded.source.startswith(TIMM_PREFIX)  # whose model has no config
            how = merge_preprocessing(how, preprocessing)
            how = how if is_timm else choose_preprocessing(model, how, None)
        model = move_to_device_for_eval(model, device)
    return replace(loaded, model=model, preprocessing=how, labels=choose_labels(labels, loaded.labels, loaded.classes))


def open_torch_model(
    model: "str | Path | nn.Module | Opened",
    *,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    labels: Sequence[str] | None = None,
    device: "str | torch.device | None" = None,
) -> Opened:
    """`open_model` for what needs the layers of a model: an exported model and one of timm's are refused."""
    refuse_models_without_layers(model)
    return open_model(model, kind=IMAGE, fields=fields, preprocessing=preprocessing, labels=labels, device=device)


def refuse_models_without_layers(model: "str | Path | nn.Module | Opened") -> None:
    """Refuse an exported model and one of timm's, by name or loaded."""
    if isinstance(model, Opened):
        name, exported = model.source, isinstance(model.model, ExportedModel)
    else:
        name, exported = (str(model), is_exported(model)) if isinstance(model, str | Path) else ("", False)
    if name.startswith(TIMM_PREFIX):
        raise ConfigError(f"{name} runs timm's code, whose layers differ; use its weights: hf-hub:timm/…")
    if exported:
        raise ConfigError(
            f"{name} is an exported model, whose layers cannot be accessed; use the checkpoint or the run that it was "
            "exported from"
        )


def open_checkpoint_of_any_size(
    name: str,
    *,
    fields: Mapping[str, Any],
    preprocessing: GivenPreprocessing = None,
    labels: Sequence[str] | None = None,
) -> Opened:
    """`open_torch_model` for images of any size, if the config of the model has the field `dynamic`."""
    refuse_models_without_layers(name)
    check_kind(detect_kind(name)[0], IMAGE, name)
    loaded = open_checkpoint(
        name, fields, preprocessing, lambda about: {"dynamic": True} if "dynamic" in about.config else {}
    )
    return replace(loaded, labels=choose_labels(labels, loaded.labels, loaded.classes))


def open_checkpoint(
    name: str,
    fields: Mapping[str, Any],
    preprocessing: GivenPreprocessing,
    choose_fields: "Callable[[Description], Mapping[str, Any]]" = lambda _: {},
    run: FinishedRun | None = None,
) -> Opened:
    """The model in a checkpoint of any layout, or of a run; `choose_fields` as in `read`."""
    download_if_missing(name)
    import torch

    from vitrail.checkpoint.reading import read, warn_about_report

    refuse_load_arguments_as_fields(fields)
    run = run or find_finished_run(Path(name))
    with torch.inference_mode(False):  # weights that are read in inference mode never have gradients
        found = read(name if run is None else run.model, images_only=True, choose_fields=choose_fields, **fields)
    about = found.description
    how = choose_preprocessing(found.model, about.preprocessing, preprocessing)
    if about.preprocessing is None:
        from vitrail.checkpoint.layout import format_preprocessing

        assumed = {**found.report.assumed, "preprocessing": format_preprocessing(how)}
        found = replace(found, report=replace(found.report, assumed=assumed))
    warn_about_report(found, name, ("preprocessing",) if gives_mean_and_std(preprocessing) else ())
    return Opened(
        source=name,
        model=found.model,
        preprocessing=how,
        classes=found.model.config.classes,
        labels=about.labels,
        run=run,
        checkpoint=found,
    )


def read_model_description(name: str, fields: Mapping[str, Any] | None = None) -> "Description":
    """The description of a checkpoint or a run, without building its model."""
    from vitrail.checkpoint.reading import describe

    refuse_load_arguments_as_fields(fields or {})
    run = find_finished_run(Path(name))
    return describe(name if run is None else run.model, **(fields or {}))


def build_without_weights(name: str, fields: Mapping[str, Any]) -> "nn.Module":
    """The model of a preset, a checkpoint or a run on the meta device, with these config fields replaced."""
    import torch

    from vitrail.models.catalog.families import build_preset

    is_file = find_bundled_model(name) is not None or os.path.exists(name)  # noqa: PTH110  # Path refuses a long name
    if is_external_family_name(name) or not is_file:
        with torch.device("meta"):
            return build_preset(name, **fields)

    from vitrail.checkpoint.family_recognition import get_family

    about = read_model_description(name)
    family = get_family(about, name)
    with torch.device("meta"):
        return family.build(family.configure(**{**about.config, **fields}))


def open_exported_model(
    path: str | Path,
    image_size: Size | None,
    preprocessing: GivenPreprocessing,
    labels: Sequence[str] | None,
    threads: int,
) -> Opened:
    """A model written by `vitrail export`. Does not import torch."""
    found = ExportedModel(path, threads=threads)
    about = found.description
    how = merge_preprocessing(about.preprocessing, preprocessing)
    if image_size is not None:
        how = replace(how, image_size=image_size)
    return Opened(
        source=str(path),
        model=found,
        preprocessing=fit_preprocessing_to_export(how, about, path, asked=image_size is not None),
        classes=about.classes,
        labels=choose_labels(labels, about.labels, about.classes),
    )


def split_image_size(fields: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The image size among config fields, None if there is none, and the other fields."""
    others = dict(fields or {})
    return others.pop("image_size", None), others


def fit_preprocessing_to_export(
    given: Preprocessing, about: ExportDescription, path: str | Path, *, asked: bool = False
) -> Preprocessing:
    """The preprocessing at an image size that the file takes; mean and std are part of the file."""
    if (given.mean, given.std) != (about.preprocessing.mean, about.preprocessing.std):
        raise ConfigError(
            f"`preprocessing` has another mean or std than {path} was exported with; export the model again",
            ("preprocessing",),
        )
    own = about.preprocessing.image_size
    if about.multiple == 0:
        if asked and pair(given.image_size) != pair(own):
            asked_size, own_size = ("×".join(map(str, pair(each))) for each in (given.image_size, own))
            raise ConfigError(
                f"`image_size` {asked_size} for {path}, which was exported for images of {own_size}; export the model "
                "again for another size",
                ("image_size",),
            )
        return replace(given, image_size=own)
    rows, columns = pair(given.image_size)
    if rows % about.multiple or columns % about.multiple:
        raise ConfigError(f"images of {rows}×{columns} pixels; expected multiples of {about.multiple}")
    return given


def open_timm_model(name: str) -> Opened:
    """A model that timm builds and downloads."""
    try:
        import timm
    except ImportError:
        raise missing_package_error(f"{TIMM_PREFIX}{name}", "timm", "parity") from None
    except Exception as error:  # for instance a RuntimeError, if torchvision does not fit torch
        raise ConfigError(
            f"{TIMM_PREFIX}{name}: timm cannot be imported: {describe_error(error)}; reinstall it "
            "together with torchvision, for this version of torch"
        ) from None
    try:
        model: Any = timm.create_model(name, pretrained=True)
    except Exception as error:  # unknown, not downloaded, damaged: timm has an exception for each
        raise CheckpointError(
            f"timm cannot open {name!r}: {describe_error(error)}; expected a model name of timm that has weights"
        ) from None
    about: Mapping[str, Any] = model.pretrained_cfg
    interpolation = about.get("interpolation")
    how = Preprocessing(
        image_size=tuple(about["input_size"][1:]),
        crop=float(about.get("crop_pct") or 1.0),
        interpolation=interpolation if interpolation in PILLOW_FILTERS else "bicubic",  # "random" in some models
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
    )
    labels = about.get("label_names")
    return Opened(
        source=f"{TIMM_PREFIX}{name}",
        model=model,
        preprocessing=how,
        classes=int(model.num_classes),
        labels=tuple(labels) if labels else None,
    )


def wrap_module(
    module: "nn.Module",
    fields: Mapping[str, Any] | None,
    preprocessing: GivenPreprocessing,
    labels: Sequence[str] | None,
    device: "str | torch.device | None",
) -> Opened:
    """A module with image_size, channels and classes in its config."""
    import warnings

    from torch import nn

    from vitrail.checkpoint.layout import format_preprocessing
    from vitrail.models.base.contract import check_reads_images

    kind = type(module).__name__
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"the model is {repr(module)[:60]}; expected a name, a path, a module or what open_model returned"
        )
    refuse_fields_without_checkpoint(fields, kind, "already loaded")
    check_reads_images(module)
    config = find_image_config(module)
    if config is None:
        raise ConfigError(f"{kind} has no config; expected a model with image_size, channels and classes in its config")
    how = choose_preprocessing(module, None, preprocessing)
    if not gives_mean_and_std(preprocessing):
        assumed = format_preprocessing(how)
        warnings.warn(f"{kind} does not specify preprocessing; assumed preprocessing={assumed}", stacklevel=3)
    return Opened(
        source=kind,
        model=move_to_device_for_eval(module, device),
        preprocessing=how,
        classes=config.classes,
        labels=choose_labels(labels, None, config.classes),
    )


def choose_preprocessing(model: Any, known: Preprocessing | None, given: GivenPreprocessing) -> Preprocessing:
    """The model's preprocessing with what was given; without any, mean and std 0.5 for each channel of the model."""
    from vitrail.models.base.contract import check_reads_images, takes_other_sizes

    check_reads_images(model)
    config = model.config
    if known is None:
        half = (0.5,) * config.channels
        known = Preprocessing(image_size=config.image_size, mean=half, std=half)
    how = merge_preprocessing(known, given)
    if len(how.mean) != config.channels:
        raise ConfigError(
            f"`preprocessing` has {len(how.mean)} channels; expected {config.channels}, as many as the model",
            ("preprocessing",),
        )
    return how if takes_other_sizes(model) else replace(how, image_size=config.image_size)


def merge_preprocessing(known: Preprocessing, given: GivenPreprocessing) -> Preprocessing:
    if given is None or isinstance(given, Preprocessing):
        return given or known
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"preprocessing is {repr(given)[:60]}; expected vitrail.Preprocessing(crop=0.9, mean=(0.5, 0.5, 0.5), …)"
        )
    if "image_size" in given:
        raise ConfigError(
            f"`preprocessing` image_size={given['image_size']}; expected `image_size`, which also resamples positions",
            ("preprocessing", "image_size"),
        )
    return known.with_fields(given)


def gives_mean_and_std(given: GivenPreprocessing) -> bool:
    """Whether mean and std were given, so that nothing is assumed which needs a warning."""
    return isinstance(given, Preprocessing) or {"mean", "std"} <= set(given or ())


def choose_labels(given: Sequence[str] | None, known: Sequence[str] | None, classes: int) -> tuple[str, ...] | None:
    labels = known if given is None else list_imagenet_labels() if given == IMAGENET else given
    return None if labels is None or not classes else check_class_labels(labels, classes)


def refuse_load_arguments_as_fields(fields: Mapping[str, Any]) -> None:
    if reserved := set(fields).intersection(LOAD_ARGUMENTS):
        raise ConfigError(f"`fields` {min(reserved)}=…; expected a field of the config, such as heads=3")


def refuse_fields_without_checkpoint(fields: Mapping[str, Any] | None, name: str, reason: str) -> None:
    if fields and "image_size" in fields:
        raise ConfigError(f"`image_size` for {name}, which is {reason}; open a checkpoint with it", ("image_size",))
    if fields:
        raise ConfigError(
            f"`fields` {min(fields)}=… for {name}, which is {reason}; use `fields` with a checkpoint", ("fields",)
        )


def move_to_device_for_eval(module: Any, device: "str | torch.device | None") -> Any:
    """The module in eval mode, on the device if one is given."""
    if device is None:
        return module.eval()
    import torch

    from vitrail.distributed import Ranks, resolve_device

    try:
        return module.to(resolve_device(device, Ranks()) if device == "auto" else torch.device(device)).eval()
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError if torch was built without CUDA
        raise unusable_device_error(str(device), error) from None
