"""vitrail convert: convert a checkpoint of any layout to another."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.base.files import refuse_existing_outputs
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_model_exists, convert_dtype, parse_fields, parse_size, read_labels
from vitrail.cli.output.help_text import MODEL
from vitrail.cli.output.messages import print_text

Layout = Literal[
    "vitrail", "timm", "hf", "torchvision", "google", "deit", "dino", "mae", "moco", "akamaster", "t2t", "t2t_by_width",
    "imagegpt", "authors",
]  # fmt: skip
LOAD_SNIPPETS = {  # how the result is opened
    "vitrail": "vitrail.load({path!r})",
    "timm": 'timm.create_model("local-dir:{path}", pretrained=True)',
    "hf": "transformers.AutoModelForImageClassification.from_pretrained({path!r})",
    "imagegpt": "transformers.ImageGPTForCausalImageModeling.from_pretrained({path!r})",
}


def convert(
    checkpoint: Annotated[str, Parameter(name="MODEL", validator=check_model_exists)],
    out: Path,
    /,
    *,
    to: Layout,
    source: Annotated[str | None, Parameter(name="--from")] = None,
    image_size: flags.ImageSize = None,
    patch_size: Annotated[str | None, Parameter(group=MODEL)] = None,
    classes: int | None = None,
    policy: Annotated[Literal["timm", "deit", "google", "torchvision", "dino"] | None, Parameter(group=MODEL)] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, Parameter(converter=convert_dtype)] = None,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    parts: Annotated[bool, Parameter(negative=())] = False,
    overwrite: flags.Overwrite = False,
) -> None:
    """Convert a checkpoint of any layout to another.

    Reports what happened to every tensor. Reads Google's .npz; .pth, .bin and .safetensors of timm, facebook's
    DeiT, DINO, MAE, MoCo v3, torchvision, akamaster, T2T-ViT and other authors' formats; folders of transformers, timm
    and vitrail; and hf-hub:OWNER/NAME[@REVISION]. Nothing in a file is executed.

    Examples::

        vitrail convert weights.pth my_vit --to vitrail
        vitrail convert weights.pth for_transformers --to hf
        vitrail convert weights.pth weights.npz --to google
        vitrail convert vit_fashion larger --to vitrail --image-size 56 --dtype float16

    Parameters
    ----------
    checkpoint
        A file, a folder, a run, a name that `vitrail models` lists, or hf-hub:OWNER/NAME[@REVISION].
    out
        A folder for vitrail, hf or timm; .npz for google; .pth or .safetensors for the others and for timm.
    to
        Layout to write.
    source
        Layout to read, as for --to. t2t_by_width scales attention by the full width. [default: detected]
    patch_size
        Resample the patch kernel as FlexiViT does: 16, or 16x8. [default: the model's own]
    classes
        Replace the head with one for this many classes, which starts at zero; 0 removes it. [default: keep it]
    policy
        How positions are resampled. [default: as the authors of the checkpoint do]
    dtype
        Cast the weights. [default: keep their dtype]
    parts
        Write the other parts of a pre-training run or file too: for mae, the decoder.
    """
    given, how = parse_fields(fields), parse_fields(preprocessing, "--preprocessing")
    for name, text in (("image_size", image_size), ("patch_size", patch_size)):
        if text is not None:
            given[name] = parse_size(text, f"--{name.replace('_', '-')}")
    if classes is not None:
        given["classes"] = classes
    refuse_existing_outputs([out], overwrite=overwrite)

    import torch

    from vitrail.checkpoint import read, write
    from vitrail.checkpoint.model_location import locate_or_download_checkpoint
    from vitrail.checkpoint.run_files import find_finished_run
    from vitrail.checkpoint.weight_folders import read_tokenizer_file
    from vitrail.cli import name_options
    from vitrail.opening import choose_preprocessing, refuse_load_arguments_as_fields
    from vitrail.tasks.pretraining.pretraining import read_part_tensors

    refuse_load_arguments_as_fields(given)
    dtypes = {None: None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    run = find_finished_run(Path(checkpoint))
    found = read(checkpoint if run is None else run.model, source=source, policy=policy, dtype=dtypes[dtype], **given)
    about = found.description
    if how:
        about = replace(about, preprocessing=choose_preprocessing(found.model, about.preprocessing, how))
    if labels is not None:
        about = replace(about, labels=read_labels(labels))
    tokenizer = None
    if about.tokenizer is not None:  # a text model keeps its own
        place = locate_or_download_checkpoint(checkpoint) if run is None else run.model
        tokenizer, _ = read_tokenizer_file(place, about.tokenizer)
    print(f"{checkpoint}: family {about.family}, {found.layout} layout")
    print_text(name_options(str(found.report), found.report.settings))
    write(
        found.model,
        out,
        to,
        preprocessing=about.preprocessing,
        labels=about.labels,
        provenance=about.provenance,
        resampling=about.resampling,
        languages=about.languages,
        tokenizer=tokenizer,
        parts=read_part_tensors(checkpoint) if parts else None,
    )
    snippet = LOAD_SNIPPETS.get(to if out.is_dir() else "", "").format(path=str(out))
    if not about.config.get("classes"):
        snippet = snippet.replace("AutoModelForImageClassification", "AutoModel")
    if about.code is not None:
        snippet = snippet.replace(")", f", trust_code={about.code!r})")
    print(f"{out}: written in the {to} layout{f'; open it with {snippet}' if snippet else ''}")
