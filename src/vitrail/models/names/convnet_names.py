"""Checkpoints of convnets: names of batch norms, and the config.json of timm."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vitrail.base.errors import CheckpointError
from vitrail.models.base.checkpoint_side import ConfigFields

BATCH_NORM_PARTS = ("*", "running_mean", "running_var", "num_batches_tracked")
ARGUMENTS_IN_SHAPES = ("in_chans", "num_classes", "layers", "depth", "w0", "wa", "wm", "group_size")


def list_batch_norm_names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in BATCH_NORM_PARTS)


def make_preset_card(config: ConfigFields, family: str, presets: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a preset: timm opens a folder of a convnet only if it is one of its own models."""
    shape = config.keys() - {"image_size", "channels", "classes"}
    same = (name for name, each in presets.items() if all(asdict(each)[key] == config[key] for key in shape))
    name = next(same, None)
    if name is None:
        raise CheckpointError(
            f"timm cannot open a folder of a custom {family}; expected OUT.safetensors or OUT.pth, "
            f"or a preset: {', '.join(presets)}"
        )
    return {"architecture": name, "num_classes": config["classes"], "model_args": {"in_chans": config["channels"]}}
