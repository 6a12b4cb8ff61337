"""Every task without labels at toy size, for the tests that all of them must pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from support.toy_task import make_backbone

import vitrail
from vitrail.recipes.pretraining_settings import AimSettings, IgptSettings
from vitrail.tasks.pretraining.aim import AutoregressiveImageModel
from vitrail.tasks.pretraining.igpt import ImageGpt
from vitrail.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class PretrainingCase:
    """A task and the fields of its backbone; the images are those of `make_data`, 10×10 pixels."""

    make_task: Callable[[Any], Task]  # of a backbone
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exact_accumulation: bool = True  # otherwise it must be refused

    def make(self, **noise: Any) -> Task:
        return self.make_task(make_backbone(**{**self.fields, **noise}))


def make_igpt(objective: Any) -> Callable[[Any], Task]:
    """Its family has neither patches nor stochastic depth, so the backbone of the other tasks is not used."""

    def make(_: Any) -> Task:
        torch.manual_seed(1)
        fields = {"image_size": 8, "colours": 9, "width": 12, "depth": 2, "heads": 2, "classes": 0}
        backbone = vitrail.create("igpt_cpu", **fields, causal=objective == "autoregressive")
        return ImageGpt(backbone, IgptSettings(objective=objective))

    return make


AIM = AimSettings(head_depth=1, head_width=8)
CASES: dict[str, PretrainingCase] = {
    "aim": PretrainingCase(
        make_task=lambda backbone: AutoregressiveImageModel(backbone, AIM),
        fields={"class_token": False, "pool": "mean"},
    ),
    "igpt": PretrainingCase(make_task=make_igpt("autoregressive")),
    "igpt, bert": PretrainingCase(make_task=make_igpt("bert")),
}
