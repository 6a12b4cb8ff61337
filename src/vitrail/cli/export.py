"""vitrail export: write a model that runs without torch."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.files import refuse_existing_outputs
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_minimum, parse_fields, parse_size, read_labels
from vitrail.cli.output.help_text import MODEL
from vitrail.cli.output.messages import print_text
from vitrail.cli.output.results import make_message_callbacks

Target = Literal["triton", "kserve", "kubernetes", "ray", "web", "container"]


def export(
    checkpoint: flags.TorchModel,
    out: Path,
    /,
    *,
    to: Literal["onnx", "onnx-int8", "torch-export", "ctranslate2"] | None = None,
    for_target: Annotated[Target | None, Parameter(name="--for")] = None,
    features: Literal["class", "mean", "tokens"] | None = None,
    image_size: flags.ImageSize = None,
    dynamic: Annotated[bool, Parameter(negative=(), group=MODEL)] = False,
    portable: Annotated[bool, Parameter(negative=(), group=MODEL)] = False,
    merge: Annotated[int, Parameter(group=MODEL)] = 0,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    check: Annotated[list[str] | None, Parameter(negative=())] = None,
    web_runtime: Path | None = None,
    overwrite: flags.Overwrite = False,
) -> None:
    """Export a model to a folder that predicts without torch.

    The folder has model.onnx, and config.json with labels and preprocessing. The file takes pixels as Pillow gives
    them, uint8 (batch, rows, columns, channels), in batches of any size; normalization is part of its first layer.
    Before the folder appears, the export is compared with torch on eight photos of the package, views of them, noise
    and the images of --check. An exact export differs by less than 1e-4; for int8, the number of images with the same
    top class is printed.

    A model that translates is exported to CTranslate2: a folder with model.bin, the vocabulary and
    tokenizer.json for ctranslate2.Translator, compared with torch token by token.

    With --for, the model comes in a new folder with the files of the system that serves it, each checked by a parser
    of its format: a repository for Triton, resources for KServe or Kubernetes, an application of Ray Serve, a
    Dockerfile without torch, or a page for any static host that runs the model in the browser.

    Examples::

        vitrail export vit_fashion exported
        vitrail export vit_fashion small --to onnx-int8 --check photos
        vitrail export vit_fashion features --features mean
        vitrail export transformer_tatoeba translator
        vitrail export vit_fashion fashion --for container

    Parameters
    ----------
    out
        Folder to write.
    to
        Format. onnx-int8 is smaller and about twice as fast, but not exact; torch-export is for torch.export.load,
        ctranslate2 for a Transformer that translates. [default: onnx, or ctranslate2 for a model that translates]
    for_target
        What serves the model: triton, kserve, kubernetes, ray, web or container. [default: vitrail, or your program]
    features
        Export features instead of classes, for `vitrail embed`: the class token, the mean of the patches, or all
        tokens. [default: classes; without a head, the features that it would read]
    dynamic
        Accept any multiple of the patch size. By default the size is fixed, which is slightly faster.
    portable
        Use only operators of the ONNX standard, for other runtimes than ONNX Runtime.
    merge
        Number of similar tokens to merge in each layer: faster and less exact.
    check
        Images or folders to check the export on as well. May be repeated.
    web_runtime
        With --for web: folder of the npm package onnxruntime-web. [default: node_modules/onnxruntime-web]
    """
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_fields(fields)
    if to == "torch-export" and portable:
        raise ConfigError("--portable with --to torch-export; expected it with onnx or onnx-int8")
    check_minimum("--merge", merge, 0)
    if dynamic and merge:
        raise ConfigError("--dynamic with --merge, which needs a fixed number of patches; use one of them")
    from vitrail.export.atomic_folder import check_target_folder
    from vitrail.opening import run_command

    if for_target is None:
        refuse_existing_outputs([out], overwrite=overwrite)
        check_target_folder(out, overwrite=overwrite)  # before a model is read, and again when it is written
        if web_runtime is not None:
            raise ConfigError("--web-runtime without --for web; expected both")
    else:
        if overwrite or to in ("torch-export", "ctranslate2"):
            given = "--overwrite" if overwrite else f"--to {to}"
            raise ConfigError(f"{given} with --for; expected a new folder, and --to onnx or onnx-int8")
        from vitrail.export.targets.table import check_target

        check_target(for_target, out, web_runtime)
    lines = run_command(
        "export",
        checkpoint,
        out=out,
        to=to,
        features=features,
        image_size=None if image_size is None else parse_size(image_size),
        dynamic=dynamic or None,
        portable=portable or None,
        merge=merge or None,
        labels=read_labels(labels),
        fields=given or None,
        preprocessing=how or None,
        check=check,
        overwrite=overwrite,
        for_target=for_target,
        web_runtime=web_runtime,
        messages=make_message_callbacks(),
    )
    print_text("\n".join(lines))
