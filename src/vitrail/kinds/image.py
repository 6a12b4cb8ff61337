"""Models that read images: classes, features and maps of what they attend to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail.base.errors import ConfigError
from vitrail.base.kinds import Kind, Messages, name_run_and_code
from vitrail.base.text import format_count
from vitrail.opening import (
    GivenPreprocessing,
    Opened,
    open_checkpoint_of_any_size,
    open_image_model,
    open_torch_model,
    refuse_models_without_layers,
)
from vitrail.tasks import PRETRAINING_TASKS

if TYPE_CHECKING:
    from vitrail.base.figures import FigureFolder
    from vitrail.export.description import ExportDescription
    from vitrail.inspection.explain.explain_files import ExplainResult
    from vitrail.inspection.explore.image_explorer import ImageExplorer
    from vitrail.models.base.checks import Size
    from vitrail.tasks.image_source import ImageSource
    from vitrail.train.plan import Plan


def open_inspected_model(
    model: str,
    *,
    labels: Sequence[str] | None = None,
    image_size: "Size | None" = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    device: str = "auto",
) -> Opened:
    """A model whose layers are looked at, on a device by name."""
    from vitrail.distributed import Ranks, resolve_device

    fields = {**(fields or {}), **({} if image_size is None else {"image_size": image_size})}
    place = resolve_device(device, Ranks())
    return open_torch_model(model, fields=fields, preprocessing=preprocessing, labels=labels, device=place)


def explain(
    model: str,
    inputs: Sequence[str],
    output: "FigureFolder",
    *,
    method: Any = None,
    layer: str | None = None,
    head: str | None = None,
    token: str | None = None,
    of_class: str | None = None,
    discard: float | None = None,
    mass: float | None = None,
    foreground: bool = False,
    data: str | None = None,
    k: int | None = None,
    check: bool | None = None,
    messages: Messages,
    labels: Sequence[str] | None = None,
    image_size: "Size | None" = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    device: str = "auto",
) -> "ExplainResult":
    """Write figures of what a model attends to in images; the options are those of `vitrail explain`."""
    of_maps = {"layer": layer, "head": head, "token": token, "of_class": of_class, "discard": discard, "mass": mass}
    given = [name for name, value in {**of_maps, "check": check}.items() if value is not None]
    for needed, others in (("pca", {"foreground": foreground}), ("neighbors", {"data": data, "k": k})):
        for name, value in others.items():
            if value not in (None, False) and method != needed:
                raise ConfigError(f"`{name}` needs `method` {needed}", (name, "method"))
    if not inputs:
        raise ConfigError("no images; expected files, folders or example:cat")
    opening: dict[str, Any] = {"labels": labels, "image_size": image_size, "fields": fields}
    opening |= {"preprocessing": preprocessing, "device": device}
    writing: dict[str, Any] = {"stdin": messages.stdin, "on_explained": messages.on_result}
    writing |= {"on_error": messages.on_error}
    if method in ("pca", "neighbors"):
        if given:
            raise ConfigError(f"`{given[0]}` cannot be combined with `method` {method}; leave it out")
        from vitrail.inspection.explain.explain_files import explain_by_components, explain_by_neighbors

        opened = open_inspected_model(model, **opening)
        if method == "pca":
            return explain_by_components(opened, inputs, output, foreground=foreground, **writing)
        count = 5 if k is None else k
        writing |= {"on_note": messages.on_note, "progress": messages.progress}
        return explain_by_neighbors(opened, inputs, data, output, k=count, **writing)
    from vitrail.base.figures import FigureFile
    from vitrail.inspection.explain.explain_files import can_occlude, explain_arguments
    from vitrail.inspection.explain.explain_options import ExplainOptions, default_method, default_methods
    from vitrail.inspection.explain.explainer import Explainer
    from vitrail.report.html_page import FigurePage

    explainer = Explainer(open_inspected_model(model, **opening))
    by_default = method is None and not given and not isinstance(output, FigureFile)
    how: dict[str, Any] = {"head": head or "mean", "discard": discard or 0.0, "mass": mass}
    chosen = method or default_method(explainer.model, explainer.layers, **how)
    methods = default_methods(explainer.model, explainer.layers) if by_default else (chosen,)
    how |= {"layer": layer or "-1", "token": token or "head", "of_class": of_class}
    options = [explainer.resolve_options(ExplainOptions(method=each, **how)) for each in methods]
    return explain_arguments(
        explainer,
        inputs,
        options,
        output,
        with_components=by_default and not explainer.loaded.classes,
        check=bool(check) or (isinstance(output, FigurePage) and can_occlude(explainer, options)),
        on_note=messages.on_note,
        progress=messages.progress,
        **writing,
    )


def explore(model: str, opened: Opened) -> "ImageExplorer":
    """The explorer of a model with layers; an exported model raises an error before torch is imported."""
    refuse_models_without_layers(opened)
    from vitrail.inspection.explore.image_explorer import ImageExplorer

    return ImageExplorer(model, opened.copy_module())


def export(
    model: str,
    out: Path,
    *,
    to: Literal["onnx", "onnx-int8", "torch-export"] = "onnx",
    features: str | None = None,
    image_size: "Size | None" = None,
    dynamic: bool = False,
    portable: bool = False,
    merge: int = 0,
    labels: Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    check: Sequence[str] | None = None,
    overwrite: bool = False,
    for_target: str | None = None,
    web_runtime: Path | None = None,
    messages: Messages,
) -> list[str]:
    """Export a model to a folder that predicts without torch; what was written, and how exact it is.

    With a target, the folder has the files of the system that serves it.
    """
    from vitrail.export.export import ExportFormat, export_model
    from vitrail.models.base.contract import takes_other_sizes
    from vitrail.predict.image_list import decode_images

    if to not in (known := get_args(ExportFormat)):
        raise ConfigError(f"`to` {to} for {model}, which reads images; expected {', '.join(known)}")
    fields = {**(fields or {}), **({} if image_size is None else {"image_size": image_size})}
    opening = open_checkpoint_of_any_size if dynamic else open_torch_model
    opened = opening(model, fields=fields, preprocessing=preprocessing, labels=labels)
    assert opened.checkpoint is not None
    config: Any = opened.model.config
    if features is None and not config.classes:  # as after pre-training
        features = "class" if "class" in opened.model.classifier_tokens else "mean"
    takes_any = takes_other_sizes(opened.module)
    if dynamic and not takes_any:
        messages.on_note(
            f"{type(opened.model).__name__} takes one image size only: the export is for {config.image_size}"
        )
    how = replace(opened.preprocessing, image_size=config.image_size)
    output: Any = features or "logits"
    images = decode_images(check, how, messages.on_error) if check else None
    provenance = {"checkpoint": str(model), **opened.checkpoint.description.provenance}
    lines = list[str]()

    def write(folder: Path) -> "ExportDescription":
        exported, checked = export_model(
            opened.module,
            folder,
            preprocessing=how,
            labels=opened.labels,
            to=to,
            output=output,
            dynamic=dynamic and takes_any,
            portable=portable or for_target == "web",  # whose attention is a separate step, which can be shown
            merge=merge,
            provenance=provenance,
            images=images,
            overwrite=overwrite,
        )
        rows, columns = config.image_size
        size = f"any multiple of {exported.multiple}" if exported.multiple else f"{rows}×{columns}"
        counted = format_count(checked.images, "image")
        exact = f"matches torch on {counted} to within {checked.difference:.1e}"
        lines.append(f"{out}: {for_target or to}, {exported.output}, images of {size}, any batch")
        lines.append(f"agrees with fp32 on {checked.same} of {counted}" if to == "onnx-int8" else exact)
        return exported

    if for_target is None:
        write(out)
        use = f"use it: vitrail {'embed' if features else 'predict'} {out} photo.jpg"
        return lines if to == "torch-export" else [*lines, use]
    from vitrail.export.targets.table import write_for_target
    from vitrail.inspection.explore.image_explorer import ImageExplorer

    overlay = ImageExplorer(model, opened).describe() if for_target == "web" else None
    written = write_for_target(for_target, out, write, overlay=overlay, runtime=web_runtime, note=messages.on_note)
    return [*lines, *written]


def report(
    model: str,
    out: Path,
    *,
    data: str | None = None,
    images: int,
    explained: int,
    evaluate: bool,
    batch: int,
    messages: Messages,
    labels: Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
    preprocessing: GivenPreprocessing = None,
    device: str = "auto",
) -> str:
    """Write an HTML page about a model; what was written."""
    from vitrail.base.figures import new_figure
    from vitrail.base.files import make_writable_folder
    from vitrail.evaluation.evaluation_data import select_images
    from vitrail.inspection.explain.explainer import Explainer
    from vitrail.report.evaluation_report import evaluate_images
    from vitrail.report.html_page import render_page, write_page
    from vitrail.report.model_report import MAX_BANK_IMAGES, build_model_report
    from vitrail.train.run_list import read_run_summary

    opened = open_inspected_model(model, labels=labels, fields=fields, preprocessing=preprocessing, device=device)
    explainer = Explainer(opened)
    chosen = select_images(opened, data, images, by_class=True)
    make_writable_folder(out.parent)
    new_figure(1, 1)  # fail before the work if figures cannot be drawn
    for note in chosen.notes:
        messages.on_note(note)
    labeled, missing, evaluated = chosen.labeled if evaluate else None, list[str](), None
    if labeled is not None and labeled.no_mapping_reason:
        missing.append(f"accuracy: not measured, since {labeled.no_mapping_reason}")
    elif labeled is not None:
        with messages.progress(len(labeled.images), "evaluating") as advance:
            evaluated = evaluate_images(opened, labeled, progress=advance)
    with messages.progress(len(chosen.items) + min(explained, len(chosen.items)), "explaining") as advance:
        title, lead, sections = build_model_report(
            explainer,
            opened.source,
            chosen.items,
            explained=explained,
            batch=batch,
            evaluated=evaluated,
            run=None if opened.run is None else read_run_summary(opened.run.model.parent),
            bank=chosen.take_evenly(MAX_BANK_IMAGES) if not opened.classes else (),
            notes=missing,
            progress=advance,
        )
    with messages.progress(sum(len(section.figures) for section in sections), "drawing") as advance:
        page = render_page(title, lead, sections, progress=advance)
    write_page(page, out)
    return f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser"


def open_source(task: Any, data: Any, recipe: Any, **options: Any) -> "ImageSource":
    """The images that a task is trained on; `data` is anything that `open_data` takes."""
    from vitrail.tasks.classification import Classification
    from vitrail.tasks.image_task import open_image_source

    return open_image_source(task, data, recipe, **options, need_classes=isinstance(task, Classification))


def describe_next_steps(run: Path, model: Path, plan: "Plan", code: str | None) -> str:
    name, more = name_run_and_code(run, code)
    if plan.request is not None and plan.request.task_name in PRETRAINING_TASKS:
        labeled = len(plan.source.to_json().get("classes", ())) > 1
        return (
            f"vitrail probe {name}{'' if labeled else ' `data` labeled_photos'}, vitrail train `init` {name} `data` "
            f"photos, or vitrail explain {name} photo.jpg"
        )
    if plan.source.describe_model_input(plan.task.result).get("labels") is None:
        return f'vitrail embed {name} photos -o features.npy, or in Python vitrail.load("{model}"{more})'
    return (
        f"vitrail eval {name}, vitrail predict {name} photo.jpg, "
        f'or in Python vitrail.Predictor("{model}"{more}).predict("photo.jpg")'
    )


KIND = Kind(
    name="image",
    does="reads images",
    use="vitrail predict",
    commands={
        "predict": "vitrail.predict.image_rows:PredictionRows",
        "embed": "vitrail.predict.image_rows:FeatureRows",
        "explore": "vitrail.kinds.image:explore",
        "evaluate": "vitrail.evaluation.checkpoint_evaluation:open_checkpoint_evaluation",
        "explain": "vitrail.kinds.image:explain",
        "export": "vitrail.kinds.image:export",
        "report": "vitrail.kinds.image:report",
        "serve": "vitrail.predict.served_images:ServedImages",
    },
    open=open_image_model,
    open_source=open_source,
    describe_next_steps=describe_next_steps,
)
