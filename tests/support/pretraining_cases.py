"""Every task without labels at toy size, for the tests that all of them must pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from support.toy_task import make_backbone

import vitrail
from vitrail.recipes.schedule import Schedule
from vitrail.recipes.task_settings import (
    AimSettings,
    ByolSettings,
    DinoSettings,
    EsvitSettings,
    IgptSettings,
    MaeSettings,
    SimClrSettings,
    SimMimSettings,
)
from vitrail.tasks.pretraining.aim import AutoregressiveImageModel
from vitrail.tasks.pretraining.byol import Byol
from vitrail.tasks.pretraining.dino import Dino
from vitrail.tasks.pretraining.esvit import Esvit
from vitrail.tasks.pretraining.igpt import ImageGpt
from vitrail.tasks.pretraining.mae import MaskedAutoencoder
from vitrail.tasks.pretraining.mpp import Mpp
from vitrail.tasks.pretraining.simclr import SimClr
from vitrail.tasks.pretraining.simmim import SimMim
from vitrail.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class PretrainingCase:
    """A task and the fields of its backbone; the images are those of `make_data`, 10×10 pixels."""

    make_task: Callable[[Any], Task]  # of a backbone
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exact_accumulation: bool = True  # otherwise it must be refused
    lr: float = 0.05  # of SGD, to compare one process with two; lower with batch norm, where rounding errors grow

    def make(self, **noise: Any) -> Task:
        return self.make_task(make_backbone(**{**self.fields, **noise}))


def make_igpt(objective: Any) -> Callable[[Any], Task]:
    """Its family has neither patches nor stochastic depth, so the backbone of the other tasks is not used."""

    def make(_: Any) -> Task:
        torch.manual_seed(1)
        fields = {"image_size": 8, "colors": 9, "width": 12, "depth": 2, "heads": 2, "classes": 0}
        backbone: Any = vitrail.create("igpt_cpu", **fields, causal=objective == "autoregressive")
        return ImageGpt(backbone, IgptSettings(objective=objective))

    return make


AIM = AimSettings(head_depth=1, head_width=8)
SMALL_HEAD: Mapping[str, Any] = {"prototypes": 16, "head_width": 10, "bottleneck_width": 6}
CROPS: Mapping[str, Any] = {
    "local_crops": 2,
    "local_size": 4,
    "teacher_temperature": Schedule(start=0.3, warmup=1, warmup_start=0.2, by="epoch"),
    "teacher_momentum": Schedule(start=0.9, end=1.0),
}
MAE_SETTINGS = MaeSettings(mask_ratio=0.5, decoder_width=8, decoder_depth=2, decoder_heads=2)
# layer norm amplifies rounding errors of a mask token with learned positions, which both start near 0
LARGE_POSITIONS = {"positions": "sincos_2d"}

STABLE_VIEWS: dict[str, Any] = {"area": (0.9, 1.0), "jitter": 0, "gray": 0, "blur": 0}
NO_CLASS_TOKEN = {"class_token": False, "pool": "mean"}  # it starts near 0, so its gradients are large
BYOL_SETTINGS = ByolSettings(**STABLE_VIEWS, projector_width=64, projection_width=32)

CASES: dict[str, PretrainingCase] = {
    "byol": PretrainingCase(
        make_task=lambda backbone: Byol(backbone, BYOL_SETTINGS),
        fields=NO_CLASS_TOKEN,
        exact_accumulation=False,
        lr=5e-3,
    ),
    "aim": PretrainingCase(
        make_task=lambda backbone: AutoregressiveImageModel(backbone, AIM),
        fields={"class_token": False, "pool": "mean"},
    ),
    "igpt": PretrainingCase(make_task=make_igpt("autoregressive")),
    "igpt, bert": PretrainingCase(make_task=make_igpt("bert")),
    "dino": PretrainingCase(
        make_task=lambda backbone: Dino(backbone, DinoSettings(**SMALL_HEAD, **CROPS)), fields={"dynamic": True}
    ),
    "esvit": PretrainingCase(
        make_task=lambda backbone: Esvit(backbone, EsvitSettings(**SMALL_HEAD, **CROPS)), fields={"dynamic": True}
    ),
    "mae": PretrainingCase(make_task=lambda backbone: MaskedAutoencoder(backbone, MAE_SETTINGS)),
    "mpp": PretrainingCase(make_task=Mpp, fields=LARGE_POSITIONS),
    "simclr": PretrainingCase(
        make_task=lambda backbone: SimClr(backbone, SimClrSettings(**STABLE_VIEWS, loss_temperature=1.0)),
        fields=NO_CLASS_TOKEN,
        exact_accumulation=False,
        lr=5e-3,
    ),
    "simmim": PretrainingCase(
        make_task=lambda backbone: SimMim(backbone, SimMimSettings(mask_size=4)), fields=LARGE_POSITIONS
    ),
}
