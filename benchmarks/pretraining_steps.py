"""Training steps of tasks without labels, compared with a supervised step of the same encoder and with other libraries.

    make bench

Each step is forward, backward and AdamW on a batch in memory. Steps of SimCLR, BYOL and DINO also make the views;
lightly's steps do so with torchvision's transforms, as in its examples. The steps alternate, round after round, so that
a busy moment of the machine affects all of them; CPU seconds of all threads are counted. Ratios are computed within
each round; the median of the rounds is printed with the quartiles. Above 1, vitrail's step is faster.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before transformers

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from cyclopts import Parameter, run
from lightly.loss import DINOLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules.heads import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    DINOProjectionHead,
    SimCLRProjectionHead,
)
from lightly.models.modules.heads_timm import AIMPredictionHead
from lightly.models.modules.masked_causal_vision_transformer import MaskedCausalVisionTransformer
from lightly.models.utils import update_momentum
from PIL import Image
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from torch import Tensor, nn
from torchvision import transforms  # pyright: ignore[reportMissingTypeStubs]

import vitrail
from vitrail.data.batch import Batch
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.rng import make_view_keys
from vitrail.recipes.recipe import Recipe, open_recipe
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import (
    AimSettings,
    ByolSettings,
    DinoSettings,
    MaeSettings,
    SimClrSettings,
    SimMimSettings,
)
from vitrail.tasks import find_task
from vitrail.tasks.image_task import ImageTask, open_image_source
from vitrail.tasks.pretraining.aim import AutoregressiveImageModel
from vitrail.tasks.pretraining.byol import Byol
from vitrail.tasks.pretraining.dino import Dino
from vitrail.tasks.pretraining.igpt import ImageGpt
from vitrail.tasks.pretraining.mae import MaskedAutoencoder
from vitrail.tasks.pretraining.simclr import SimClr
from vitrail.tasks.pretraining.simmim import SimMim, hide_squares
from vitrail.tasks.task import parse_task_settings

Step = Callable[[], object]
Loss = tuple[nn.Module, Callable[[], Tensor]]  # a model, and its loss for the next batch
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


def make_task_loss(task: ImageTask, batch: int) -> Loss:
    """Our task and its loss on noise, with masks drawn by the keys of the images."""
    size = task.backbone.config.image_size
    task.preprocessing = Preprocessing(image_size=size)
    images = torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8)
    made = Batch({"images": images}, {"images": make_view_keys(0, 0, np.arange(batch), 0)}, batch)
    return task, lambda: task(made, CLOCK)[0]


def make_task_step(task: ImageTask, batch: int) -> Step:
    return make_step(*make_task_loss(task, batch))


def make_supervised_step(batch: int, preset: str, fields: Mapping[str, Any]) -> Step:
    model = vitrail.create(preset, **{**fields, "classes": CLASSES})
    images, labels = torch.randn(batch, 3, *model.config.image_size), torch.randint(CLASSES, (batch,))
    return make_step(model, lambda: F.cross_entropy(model(images), labels))


def describe_encoder(config: Any) -> dict[str, Any]:
    """The config of an encoder in transformers' names."""
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width,
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "attn_implementation": "sdpa",
    }


def make_mae_steps(batch: int, settings: MaeSettings, preset: str, fields: Mapping[str, Any]) -> Mapping[str, Step]:
    model: Any = vitrail.create(preset, **{**fields, "classes": 0})
    config = model.config
    peer: Any = {
        **describe_encoder(config),
        "mask_ratio": settings.mask_ratio,
        "norm_pix_loss": settings.normalize_pixels,
        "decoder_hidden_size": settings.decoder_width,
        "decoder_num_hidden_layers": settings.decoder_depth,
        "decoder_num_attention_heads": settings.decoder_heads,
        "decoder_intermediate_size": 4 * settings.decoder_width,
    }
    theirs = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**peer))
    images = torch.randn(batch, 3, *config.image_size)
    return {
        "vitrail": make_task_step(MaskedAutoencoder(model, settings), batch),
        "supervised": make_supervised_step(batch, preset, fields),
        "transformers": make_step(theirs, lambda: theirs(images).loss),
    }


def open_mae_recipe() -> tuple[Any, MaeSettings]:
    """The model of the recipe mae-cpu and its settings."""
    recipe = open_recipe("mae-cpu")
    settings: MaeSettings = parse_task_settings(find_task("mae"), recipe)
    return vitrail.create(str(recipe.model), **{**recipe.fields, "classes": 0}), settings


def make_mae_recipe_steps() -> Mapping[str, Step]:
    recipe, (_, settings) = open_recipe("mae-cpu"), open_mae_recipe()
    return make_mae_steps(recipe.loop.batch, settings, str(recipe.model), recipe.fields)


def make_simmim_steps(
    batch: int, settings: SimMimSettings, preset: str, fields: Mapping[str, Any]
) -> Mapping[str, Step]:
    model: Any = vitrail.create(preset, **{**fields, "classes": 0})
    config = model.config
    peer: Any = {
        **describe_encoder(config),
        "encoder_stride": config.patch_size[0],
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


class TorchvisionViews:
    """Two views of every image, one after another, as in lightly's loops; for recipes without blur and solarize."""

    def __init__(self, images: ArrayDataset, recipe: Recipe, strengths: tuple[float, ...], gray: float) -> None:
        self.images, self.batch, self.steps = images, recipe.loop.batch, count()
        area, size = tuple(recipe.task["area"]), int(recipe.task["view_size"])
        bicubic = transforms.InterpolationMode.BICUBIC
        self.transform: Callable[[Image.Image], Tensor] = transforms.Compose(
            [
                transforms.RandomResizedCrop(size, scale=area, interpolation=bicubic),
                transforms.RandomHorizontalFlip(),
                transforms.RandomApply([transforms.ColorJitter(*strengths)], p=0.8),
                transforms.RandomGrayscale(gray),
                transforms.ToTensor(),
                transforms.Normalize(recipe.preprocessing["mean"], recipe.preprocessing["std"]),
            ]
        )

    def load(self) -> list[Tensor]:
        first = next(self.steps) * self.batch % (len(self.images) - self.batch)
        images = [Image.fromarray(each) for each in self.images.images[first : first + self.batch]]
        return [torch.stack([self.transform(image) for image in images]) for _ in range(2)]


def make_images(number: int = 1024) -> ArrayDataset:
    pixels = np.random.default_rng(0).integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
    return ArrayDataset(pixels, np.zeros(number, np.int64), ("one",), "noise")


def make_two_view_loss(task: SimClr | Byol | Dino, images: ArrayDataset, recipe: Recipe) -> Loss:
    """Our task and its loss of the next views; a teacher follows before the next step."""
    preprocessing = Preprocessing(image_size=(32, 32)).with_fields(recipe.preprocessing)
    data = DatasetSplits(name="noise", train=images, val=None, classes=images.classes)
    source = open_image_source(task, data, recipe, preprocessing)
    task.setup(source, recipe)
    batches = source.load_batches(range(10**6))

    number = count()

    def compute_loss() -> Tensor:
        if next(number):
            task.before_step(CLOCK)
            task.after_step(CLOCK)
        return task(next(batches), CLOCK)[0]

    return task, compute_loss


def make_simclr_losses(batch: int) -> tuple[Loss, Loss]:
    """The models of lightly's loop and of ours for the recipe simclr-cpu, and their losses of the next views."""
    recipe, images = open_recipe("simclr-cpu").with_settings({"batch": batch}), make_images()
    settings: SimClrSettings = parse_task_settings(find_task("simclr"), recipe)
    model: Any = vitrail.create(str(recipe.model), classes=0)
    width, hidden, out = model.config.width, settings.projector_width or model.config.width, settings.projection_width
    head = SimCLRProjectionHead(width, hidden, out, num_layers=settings.projector_depth, batch_norm=True)
    theirs, loss = nn.Sequential(deepcopy(model), head), NTXentLoss(settings.loss_temperature)
    strengths = (0.8, 0.8, 0.8, 0.2)
    views = TorchvisionViews(images, recipe, tuple(settings.jitter * each for each in strengths), settings.gray)
    own = make_two_view_loss(SimClr(model, settings), images, recipe)
    return (theirs, lambda: loss(*theirs(torch.cat(views.load())).chunk(2))), own


def make_simclr_recipe_steps() -> Mapping[str, Step]:
    theirs, own = make_simclr_losses(open_recipe("simclr-cpu").loop.batch)
    return {"vitrail": make_step(*own), "lightly": make_step(*theirs)}


def make_byol_recipe_steps() -> Mapping[str, Step]:
    recipe, images = open_recipe("byol-cpu"), make_images()
    settings: ByolSettings = parse_task_settings(find_task("byol"), recipe)
    model: Any = vitrail.create(str(recipe.model), classes=0)
    width, hidden, out = model.config.width, settings.projector_width, settings.projection_width
    student = nn.Sequential(deepcopy(model), BYOLProjectionHead(width, hidden, out))
    theirs = nn.Sequential(student, BYOLPredictionHead(out, hidden, out))
    teacher, loss = deepcopy(student).requires_grad_(False), NegativeCosineSimilarity()
    strengths = (0.4, 0.4, 0.2, 0.1)
    views = TorchvisionViews(images, recipe, tuple(settings.jitter * each for each in strengths), settings.gray)

    def compute_loss() -> Tensor:
        update_momentum(student, teacher, settings.teacher_momentum.at(CLOCK))
        first, second = views.load()
        with torch.no_grad():
            targets = teacher(first), teacher(second)
        return (loss(theirs(first), targets[1]) + loss(theirs(second), targets[0])) / 2

    return {
        "vitrail": make_step(*make_two_view_loss(Byol(model, settings), images, recipe)),
        "lightly": make_step(theirs, compute_loss),
    }


def make_dino_recipe_steps() -> Mapping[str, Step]:
    recipe, images = open_recipe("dino-cpu"), make_images()
    settings: DinoSettings = replace(parse_task_settings(find_task("dino"), recipe), local_crops=0)
    size = {"view_size": settings.global_size, "area": settings.global_area}
    model: Any = vitrail.create(str(recipe.model), classes=0)
    widths = (model.config.width, settings.head_width, settings.bottleneck_width, settings.prototypes)
    student, teacher = (nn.Sequential(deepcopy(model), DINOProjectionHead(*widths)) for _ in range(2))
    teacher.requires_grad_(False)
    loss = DINOLoss(settings.prototypes, warmup_teacher_temp_epochs=0)
    strengths = (0.4, 0.4, 0.2, 0.1)
    views = TorchvisionViews(
        images, replace(recipe, task=size), tuple(settings.jitter * each for each in strengths), settings.gray
    )

    def compute_loss() -> Tensor:
        update_momentum(student, teacher, settings.teacher_momentum.at(CLOCK))
        both = torch.cat(views.load())
        with torch.no_grad():
            targets = teacher(both).chunk(2)
        return loss(list(targets), list(student(both).chunk(2)), teacher_temp=settings.teacher_temperature.at(CLOCK))

    return {
        "vitrail": make_step(*make_two_view_loss(Dino(model, settings), images, recipe)),
        "lightly": make_step(student, compute_loss),
    }


def make_aim_recipe_steps() -> Mapping[str, Step]:
    """lightly's step gets normalized patches as targets, and its prefixes are half of an image."""
    recipe = open_recipe("aim-cpu")
    settings = AimSettings(**{name: value for name, value in recipe.task.items() if name != "name"})
    model: Any = vitrail.create(str(recipe.model), **{**recipe.fields, "classes": 0})
    config, batch = model.config, recipe.loop.batch
    patches, pixels = model.grid[0] * model.grid[1], 3 * config.patch_size[0] ** 2
    encoder: Any = MaskedCausalVisionTransformer(
        img_size=config.image_size[0],
        patch_size=config.patch_size[0],
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        num_classes=0,
        class_token=False,
        global_pool="",
    )
    head = AIMPredictionHead(config.width, pixels, hidden_dim=settings.head_width, num_blocks=settings.head_depth)
    images, targets = torch.randn(batch, 3, *config.image_size), torch.randn(batch, patches - 1, pixels)
    masked = (torch.arange(patches) >= patches // 2).expand(batch, -1)

    def compute_loss() -> Tensor:
        return F.mse_loss(head(encoder.forward_features(images, mask=masked)[:, :-1]), targets)

    return {
        "vitrail": make_task_step(AutoregressiveImageModel(model, settings), batch),
        "lightly": make_step(nn.ModuleList([encoder, head]), compute_loss),
    }


def make_igpt_recipe_steps() -> Mapping[str, Step]:
    """transformers' step gets the colors; ours finds them in the palette."""
    recipe = open_recipe("igpt-cpu")
    model: Any = vitrail.create(str(recipe.model))
    config, batch = model.config, recipe.loop.batch
    pixels = config.image_size[0] * config.image_size[1]
    peer: Any = {
        "vocab_size": config.colors + 1,  # the last one is the start
        "n_positions": pixels,
        "n_embd": config.width,
        "n_layer": config.depth,
        "n_head": config.heads,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }
    theirs = transformers.ImageGPTForCausalImageModeling(transformers.ImageGPTConfig(**peer))
    colors = torch.randint(config.colors, (batch, pixels))
    inputs = torch.cat([torch.full((batch, 1), config.colors), colors[:, :-1]], dim=1)

    def compute_loss() -> Tensor:
        return F.cross_entropy(theirs(input_ids=inputs).logits.flatten(0, 1), colors.flatten())

    return {"vitrail": make_task_step(ImageGpt(model), batch), "transformers": make_step(theirs, compute_loss)}


SINCOS = {"positions": "sincos_2d"}
CASES = (
    Case("mae", "recipe mae-cpu", make_mae_recipe_steps),
    Case(  # a quarter of the blocks of both parts
        "mae",
        "L/16, 6 + 2 blocks, batch 16",
        lambda: make_mae_steps(16, MaeSettings(decoder_depth=2), "vit_large_patch16_224", {**SINCOS, "depth": 6}),
    ),
    Case("mae", "B/16, batch 4", lambda: make_mae_steps(4, MaeSettings(), "vit_base_patch16_224", SINCOS)),
    Case("simmim", "recipe simmim-cpu", make_simmim_recipe_steps),
    Case("simclr", "recipe simclr-cpu", make_simclr_recipe_steps),
    Case("byol", "recipe byol-cpu", make_byol_recipe_steps),
    Case("dino", "recipe dino-cpu", make_dino_recipe_steps),
    Case("aim", "recipe aim-cpu", make_aim_recipe_steps),
    Case("igpt", "recipe igpt-cpu", make_igpt_recipe_steps),
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


def main(
    *,
    rounds: int = 10,
    threads: int = 2,
    only: Annotated[str, Parameter(help="Measure only the cases of this task.")] = "",
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    rows = [format_row(case, measure(case, rounds)) for case in CASES if only in ("", case.task)]
    heading = ("task", "case", "vitrail, CPU", "supervised / vitrail", "library", "library / vitrail")
    table = markdown_table(heading, rows, "llrrlr")
    run_line = describe_run("pretraining_steps.py", f"--rounds {rounds} --threads {threads}", threads)
    present("pretraining", (table, run_line), page)


if __name__ == "__main__":
    run(main)
