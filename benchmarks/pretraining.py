"""Training steps of tasks without labels, compared with a supervised step of the same encoder and with other libraries.

    make bench

Each step is forward, backward and AdamW on a batch in memory. The steps alternate, round after round, so that a busy
moment of the machine affects all of them; CPU seconds of all threads are counted. Ratios are computed within each
round; the median of the rounds is printed with the quartiles. Above 1, vitrail's step is faster.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before transformers

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from cyclopts import Parameter, run
from rich.progress import track
from torch import Tensor, nn

import vitrail
from vitrail.data.batch import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import make_view_keys
from vitrail.recipes.pretraining_settings import MaeSettings, SimMimSettings
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.schedule import Clock
from vitrail.tasks.image_task import ImageTask
from vitrail.tasks.pretraining.mae import MaskedAutoencoder
from vitrail.tasks.pretraining.simmim import SimMim, hide_squares
from vitrail.text import format_table

Step = Callable[[], object]
CLOCK = Clock(step=0, steps=1000, steps_per_epoch=100)
CLASSES = 10  # of the supervised step


@dataclass(frozen=True)
class Case:
    """A task at one size. `make_steps` returns the step of "vitrail", and of "supervised" and a library to compare."""

    task: str
    name: str
    make_steps: Callable[[], Mapping[str, Step]]


def make_step(model: nn.Module, compute_loss: Callable[[], Tensor]) -> Step:
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        compute_loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_task_step(task: ImageTask, batch: int) -> Step:
    """A step of our task on noise, with masks drawn by the keys of the images."""
    size = task.backbone.config.image_size
    task.preprocessing = Preprocessing(image_size=size)
    images = torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8)
    made = Batch({"images": images}, {"images": make_view_keys(0, 0, np.arange(batch), 0)}, batch)
    return make_step(task, lambda: task(made, CLOCK)[0])


def make_supervised_step(batch: int, preset: str, fields: Mapping[str, Any]) -> Step:
    model = vitrail.create(preset, **{**fields, "classes": CLASSES})
    images, labels = torch.randn(batch, 3, *model.config.image_size), torch.randint(CLASSES, (batch,))
    return make_step(model, lambda: F.cross_entropy(model(images), labels))


def make_mae_steps(batch: int, settings: MaeSettings, preset: str, fields: Mapping[str, Any]) -> Mapping[str, Step]:
    model: Any = vitrail.create(preset, **{**fields, "classes": 0})
    config = model.config
    peer: Any = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width,
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "mask_ratio": settings.mask_ratio,
        "norm_pix_loss": settings.normalize_pixels,
        "decoder_hidden_size": settings.decoder_width,
        "decoder_num_hidden_layers": settings.decoder_depth,
        "decoder_num_attention_heads": settings.decoder_heads,
        "decoder_intermediate_size": 4 * settings.decoder_width,
        "attn_implementation": "sdpa",
    }
    theirs = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**peer))
    images = torch.randn(batch, 3, *config.image_size)
    return {
        "vitrail": make_task_step(MaskedAutoencoder(model, settings), batch),
        "supervised": make_supervised_step(batch, preset, fields),
        "transformers": make_step(theirs, lambda: theirs(images).loss),
    }


def make_mae_recipe_steps() -> Mapping[str, Step]:
    recipe = open_recipe("mae-cpu")
    settings = MaeSettings(**{name: value for name, value in recipe.task.items() if name != "name"})
    return make_mae_steps(recipe.loop.batch, settings, str(recipe.model), recipe.fields)


def make_simmim_steps(
    batch: int, settings: SimMimSettings, preset: str, fields: Mapping[str, Any]
) -> Mapping[str, Step]:
    model: Any = vitrail.create(preset, **{**fields, "classes": 0})
    config = model.config
    peer: Any = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width,
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "encoder_stride": config.patch_size[0],
        "attn_implementation": "sdpa",
    }
    theirs = transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**peer))
    images, keys = torch.randn(batch, 3, *config.image_size), make_view_keys(0, 0, np.arange(batch), 0)
    hidden = hide_squares(keys, config.image_size, config.patch_size, settings)
    masks = torch.zeros(batch, model.grid[0] * model.grid[1], dtype=torch.bool).scatter_(1, hidden, value=True)
    return {
        "vitrail": make_task_step(SimMim(model, settings), batch),
        "supervised": make_supervised_step(batch, preset, fields),
        "transformers": make_step(theirs, lambda: theirs(images, bool_masked_pos=masks).loss),
    }


def make_simmim_recipe_steps() -> Mapping[str, Step]:
    recipe = open_recipe("simmim-cpu")
    settings = SimMimSettings(**{name: value for name, value in recipe.task.items() if name != "name"})
    return make_simmim_steps(recipe.loop.batch, settings, str(recipe.model), recipe.fields)


SINCOS = {"positions": "sincos_2d"}
CASES = (
    Case("mae", "recipe mae-cpu", make_mae_recipe_steps),
    Case(  # a quarter of the blocks of both parts
        "mae",
        "L/16, 6 + 2 blocks, batch 4",
        lambda: make_mae_steps(4, MaeSettings(decoder_depth=2), "vit_large_patch16_224", {**SINCOS, "depth": 6}),
    ),
    Case("mae", "B/16, batch 4", lambda: make_mae_steps(4, MaeSettings(), "vit_base_patch16_224", SINCOS)),
    Case("simmim", "recipe simmim-cpu", make_simmim_recipe_steps),
    Case("simmim", "B/16, batch 4", lambda: make_simmim_steps(4, SimMimSettings(), "vit_base_patch16_224", {})),
)


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """CPU seconds per step, round by round; the order changes every round."""
    steps = case.make_steps()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    order = list(steps)
    for _ in track(range(rounds), f"{case.task} {case.name}", transient=True):
        for name in order:
            start = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - start)
        order.append(order.pop(0))
    return times


def format_row(case: Case, times: Mapping[str, list[float]]) -> list[str]:
    peer = next((name for name in times if name not in ("vitrail", "supervised")), "")
    own = times["vitrail"]
    ratios = [format_ratio(times[name], own) if name in times else "" for name in ("supervised", peer)]
    return [case.task, case.name, f"{1000 * statistics.median(own):.0f} ms", ratios[0], peer, ratios[1]]


def format_ratio(times: list[float], own: list[float]) -> str:
    low, middle, high = statistics.quantiles([its / mine for its, mine in zip(times, own, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def main(
    *,
    rounds: int = 10,
    threads: int = 2,
    only: Annotated[str, Parameter(help="Measure only the cases of this task.")] = "",
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} threads, {rounds} rounds")
    rows = [format_row(case, measure(case, rounds)) for case in CASES if only in ("", case.task)]
    heading = ("task", "case", "vitrail, CPU", "supervised / vitrail", "library", "library / vitrail")
    print("\n".join(format_table(heading, rows, "llrrlr")))


if __name__ == "__main__":
    run(main)
