"""Every task without labels at toy size, for the tests that all of them must pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.toy_task import make_backbone

from vitrail.recipes.pretraining_settings import MaeSettings, SimClrSettings, SimMimSettings
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

    def make(self, **noise: Any) -> Task:
        return self.make_task(make_backbone(**{**self.fields, **noise}))


MAE_SETTINGS = MaeSettings(mask_ratio=0.5, decoder_width=8, decoder_depth=2, decoder_heads=2)
# layer norm amplifies rounding errors of a mask token with learned positions, which both start near 0
LARGE_POSITIONS = {"positions": "sincos_2d"}

CASES: dict[str, PretrainingCase] = {
    "mae": PretrainingCase(make_task=lambda backbone: MaskedAutoencoder(backbone, MAE_SETTINGS)),
    "simclr": PretrainingCase(
        make_task=lambda model: SimClr(  # a high temperature: with batch norm, rounding errors grow quickly
            model, SimClrSettings(area=(0.7, 1.0), jitter=0, grey=0, blur=0, loss_temperature=3.0)
        ),
        exact_accumulation=False,
    ),
    "simmim": PretrainingCase(
        make_task=lambda backbone: SimMim(backbone, SimMimSettings(mask_size=4)), fields=LARGE_POSITIONS
    ),
    "mpp": PretrainingCase(make_task=Mpp, fields=LARGE_POSITIONS),
}
