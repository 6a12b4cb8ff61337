"""vitrail train: a model on your data."""

from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.settings import Settings, given
from vitrail.cli.summary import parse_field, parse_size
from vitrail.errors import ConfigError
from vitrail.train.recipe import open_recipe

RATES = ("dropout", "stochastic_depth")  # of the model, but people look for them here


def train(
    *,
    data: str | None = None,
    model: str | None = None,
    recipe: str | None = None,
    init: str | None = None,
    image_size: str | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    dropout: float | None = None,
    stochastic_depth: float | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    workers: int | None = None,
    cache: float | None = None,
    val_share: float | None = None,
    real: Path | None = None,
    strict: Annotated[bool, Parameter(negative=())] = False,
    settings: Annotated[Settings | None, Parameter(name="*")] = None,
) -> None:
    """Train a model: from scratch, from a checkpoint of any layout (--init), or on from where it stopped (--resume).

    With nothing said, a small ViT learns the embedded Fashion-MNIST pictures. What a model's preset says a recipe may
    change, and a flag may change both. The run is a folder: what it was told (run.json), its log, its checkpoints,
    curves.png, and at the end model/, for `vitrail eval` and `vitrail.load`. Ctrl-C saves before it stops.
    On several GPUs or machines: torchrun --nproc-per-node 8 -m vitrail train …

    Examples::

        vitrail train --epochs 1
        vitrail train --data photos --init my_model --epochs 1 --batch 4
        vitrail train --data photos --init my_model --recipe probe --image-size 96 --epochs 1 --batch 4
        vitrail train --data photos --model ViT-Ti/16 --set depth=2 --image-size 32 --batch 4 --dry-run
        vitrail train --resume runs/demo

    Parameters
    ----------
    data
        fashion (embedded), or a folder: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg, of which a part is kept
        for validation; CIFAR-10 or -100, MNIST files; ImageNet.
    model
        A name that `vitrail models` lists, or a family of your own: package.module:preset, file.py:preset.
    recipe
        fashion, cifar10-cpu, finetune, probe, vit, deit, scratch, or a .yaml file of your own. Without it: finetune
        with --init, fashion for that data, else scratch.
    init
        A checkpoint to start from: anything that `vitrail convert` reads, or the folder of a run.
    image_size
        Pixels: 384, or rows x columns: 384x256; the positions of --init are resampled.
    fields
        Any field of the model's config, as FIELD=VALUE; may be repeated.
    dropout
        Rate of the model's dropout.
    stochastic_depth
        Rate at which the last block is left out; it grows from 0 at the first.
    out
        The folder of the run; else a new one in runs/.
    resume
        The folder of a run to go on with, to the bit as if it had not stopped.
    dry_run
        Check data, model, memory and speed, say how long it will take, and write nothing.
    device
        auto, cpu, cuda, cuda:1, mps.
    workers
        Processes that prepare pictures; without it as many as help.
    cache
        Gigabytes up to which decoded pictures are held in memory; 1 unless said, 0: none.
    val_share
        Share of a folder without a validation part that is kept for validation; 0.2 unless said.
    real
        ReaL labels of ImageNet's validation pictures, a .json file.
    strict
        An unreadable picture is an error; else it is skipped and named at the end.
    settings
        All that a recipe says.
    """
    start = monotonic()
    changes = given(settings)
    if "epochs" in changes:
        if "minutes" in changes:
            raise ConfigError("--minutes beside --epochs; expected one of them")
        changes["minutes"] = None  # a recipe's budget gives way
    rates = {name: value for name, value in zip(RATES, (dropout, stochastic_depth), strict=True) if value is not None}
    at_model = {**dict(parse_field(item) for item in fields or ()), **rates}
    if image_size is not None:
        at_model["image_size"] = parse_size(image_size)
    if resume is not None:
        told = {"data": data, "model": model, "recipe": recipe, "init": init, "out": out, "val_share": val_share}
        told |= {"real": real, "cache": cache, "dry_run": dry_run or None, "set": fields, "image_size": image_size}
        other = [name for name, value in {**told, **rates, **changes}.items() if value is not None]
        if other:
            raise ConfigError(
                f"--resume {resume} beside --{other[0].replace('_', '-')}; expected it alone: a run goes on as it "
                "began; for another, start a new one, from its weights with --init"
            )
        from vitrail.cli.runner import Here, go_on

        go_on(resume, Here(device=device, workers=workers, strict=strict))
        return
    if cache is not None and cache < 0:
        raise ConfigError(f"--cache {cache}; expected gigabytes, or 0 for none")
    name = recipe or ("finetune" if init else "fashion" if data in (None, "fashion") and model is None else "scratch")
    chosen = open_recipe(name)
    if chosen.model is not None and (init or model not in (None, chosen.model)):
        # they are for the starting weights of the model that it names
        chosen = replace(chosen, model=None, fields={}, preprocessing={}).changed({"whiten": False, "early_size": 0})
    chosen = chosen.changed({**changes, "fields": at_model, **({"model": model} if model else {})})

    from vitrail.cli.runner import Here, begin
    from vitrail.train.job import Request

    request = Request(
        data=anywhere("fashion" if data is None else data),
        recipe=chosen,
        init=None if init is None else anywhere(init),
        val_share=0.2 if val_share is None else val_share,
        real=None if real is None else anywhere(str(real)),
        cache=1.0 if cache is None else cache,
    )
    here = Here(device=device, workers=workers, strict=strict)
    begin(request, out, here, start=start, dry_run=dry_run)


def anywhere(place: str) -> str:
    """A path so that it can be resumed from another folder; a name as it is."""
    return str(Path(place).resolve()) if place not in ("", "fashion") and Path(place).exists() else place
