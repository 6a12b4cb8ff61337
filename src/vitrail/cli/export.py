"""vitrail export: write a model that runs without torch."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.files import refuse_existing_outputs
from vitrail.base.text import format_count
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.groups import MODEL
from vitrail.cli.options.values import check_minimum, parse_fields, parse_model_fields, read_labels
from vitrail.cli.output.messages import print_error, print_notes


def export(
    checkpoint: flags.TorchModel,
    out: Path,
    /,
    *,
    to: Literal["onnx", "onnx-int8", "torch-export", "ctranslate2"] = "onnx",
    features: Literal["class", "mean", "tokens"] | None = None,
    image_size: flags.ImageSize = None,
    dynamic: Annotated[bool, Parameter(negative=(), group=MODEL)] = False,
    portable: Annotated[bool, Parameter(negative=(), group=MODEL)] = False,
    merge: Annotated[int, Parameter(group=MODEL)] = 0,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    check: Annotated[list[str] | None, Parameter(negative=())] = None,
    overwrite: flags.Overwrite = False,
) -> None:
    """Export a model to a folder that predicts without torch.

    The folder has model.onnx, and config.json with labels and preprocessing. The file takes pixels as Pillow gives
    them, uint8 (batch, rows, columns, channels), in batches of any size; normalization is part of its first layer.
    Before the folder appears, the export is compared with torch on eight photos of the package, views of them, noise
    and the images of --check. An exact export differs by less than 1e-4; for int8, the number of images with the same
    top class is printed.

    A model that translates is exported with --to ctranslate2: a folder with model.bin, the vocabulary and
    tokenizer.json for ctranslate2.Translator, compared with torch token by token.

    Examples::

        vitrail export vit_fashion exported
        vitrail export vit_fashion small --to onnx-int8 --check photos
        vitrail export vit_fashion features --features mean
        vitrail export transformer_tatoeba translator --to ctranslate2

    Parameters
    ----------
    out
        Folder to write.
    to
        Format. onnx-int8 is smaller and about twice as fast, but not exact; torch-export is for torch.export.load,
        ctranslate2 for a Transformer that translates.
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
    """
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_model_fields(fields, image_size)
    if to == "torch-export" and portable:
        raise ConfigError("--portable with --to torch-export; expected it with onnx or onnx-int8")
    check_minimum("--merge", merge, 0)
    if dynamic and merge:
        raise ConfigError("--dynamic with --merge, which needs a fixed number of patches; use one of them")
    refuse_existing_outputs([out], overwrite=overwrite)

    from vitrail.export.atomic_folder import check_target_folder

    check_target_folder(out, overwrite=overwrite)  # before a model is read, and again when it is written
    if to == "ctranslate2":
        others = {"--features": features, "--image-size": image_size, "--dynamic": dynamic, "--portable": portable}
        others |= {"--merge": merge, "--labels": labels, "--preprocessing": preprocessing, "--check": check}
        if unused := [name for name, value in others.items() if value]:
            raise ConfigError(f"{unused[0]} with --to ctranslate2; expected it with a model that reads images")
        print(export_translator(checkpoint, out, given, overwrite=overwrite))
        return

    from vitrail.export.export import export_model
    from vitrail.models.base.contract import takes_other_sizes
    from vitrail.opening import open_dynamic_module, open_torch_model
    from vitrail.predict.image_list import decode_images

    open_wanted = open_dynamic_module if dynamic else open_torch_model
    loaded = open_wanted(checkpoint, fields=given, preprocessing=how or None, labels=read_labels(labels))
    assert loaded.checkpoint is not None
    module: Any = loaded.module
    config = module.config
    if features is None and not config.classes:  # as after pre-training
        features = "class" if "class" in module.classifier_tokens else "mean"
    takes_any = takes_other_sizes(loaded.module)
    if dynamic and not takes_any:
        kind = type(loaded.model).__name__
        print_notes([f"{kind} takes one image size only: the export is for {config.image_size}"])
    how = replace(loaded.preprocessing, image_size=config.image_size)
    exported, checked = export_model(
        loaded.module,
        out,
        preprocessing=how,
        labels=loaded.labels,
        to=to,
        output=features or "logits",
        dynamic=dynamic and takes_any,
        portable=portable,
        merge=merge,
        provenance={"checkpoint": str(checkpoint), **loaded.checkpoint.description.provenance},
        images=decode_images(check, how, print_error) if check else None,
        overwrite=overwrite,
    )
    rows, columns = config.image_size
    size = f"any multiple of {exported.multiple}" if exported.multiple else f"{rows}×{columns}"
    print(f"{out}: {to}, {exported.output}, images of {size}, any batch")
    if to == "onnx-int8":
        print(f"agrees with fp32 on {checked.same} of {format_count(checked.images, 'image')}")
    else:
        print(f"matches torch on {format_count(checked.images, 'image')} to within {checked.difference:.1e}")
    if to != "torch-export":
        print(f"use it: vitrail {'embed' if features else 'predict'} {out} photo.jpg")


def export_translator(checkpoint: str, out: Path, fields: dict[str, Any], *, overwrite: bool) -> str:
    """Export a text model to CTranslate2; what is printed about it."""
    from vitrail.export.ctranslate2_export import export_to_ctranslate2, import_ctranslate2
    from vitrail.text_loading import open_text_model

    import_ctranslate2()  # before a model is read
    loaded = open_text_model(checkpoint, fields=fields)
    checked = export_to_ctranslate2(
        loaded.model,
        loaded.tokenizer,
        out,
        languages=loaded.languages,
        provenance={"checkpoint": str(checkpoint)},
        overwrite=overwrite,
    )
    pair = "-".join(loaded.languages or ()) or "text"
    return f"{out}: ctranslate2, {pair}, {loaded.tokenizer.vocabulary:,} tokens\n{checked}"
