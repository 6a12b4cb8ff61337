"""The interface of an architecture: a config, a module built from it, and named presets."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.base.text import AMERICAN_NAMES
from vitrail.models.base.checkpoint_side import CheckpointSide
from vitrail.models.base.contract import ImageModel, Model

Config = TypeVar("Config")

NEEDED_FIELDS = ("image_size", "channels", "classes")  # of a config, for models that read images
FOREIGN_FIELD_NAMES = {  # of timm and transformers → ours, the first that a config has
    "img_size": ("image_size",),
    "in_chans": ("channels",),
    "num_channels": ("channels",),
    "num_classes": ("classes",),
    "num_labels": ("classes",),
    "embed_dim": ("width", "widths"),
    "embed_dims": ("widths", "width"),
    "hidden_size": ("width", "widths"),
    "depths": ("stages", "depth"),
    "num_hidden_layers": ("depth", "stages"),
    "num_heads": ("heads",),
    "num_attention_heads": ("heads",),
    "mlp_ratio": ("mlp_width", "mlp_ratios"),
    "mlp_ratios": ("mlp_ratio", "mlp_width"),
    "intermediate_size": ("mlp_width",),
    "window_size": ("windows", "window"),
    "act_layer": ("activation",),
    "hidden_act": ("activation",),
    "init_values": ("layer_scale",),
    "reg_tokens": ("registers",),
    "pos_embed": ("positions",),
    "no_embed_class": ("prefix_positions",),
    "global_pool": ("pool",),
    "drop_rate": ("dropout",),
    "attn_drop_rate": ("attention_dropout",),
    "drop_path_rate": ("stochastic_depth",),
    "dynamic_img_size": ("dynamic",),
}


class Presets(Mapping[str, Config]):
    """Configs by name, made when the first one is used: opening a file checks its own config only."""

    def __init__(self, make: Callable[[], Mapping[str, Config]]) -> None:
        self.make = cache(make)

    def __getitem__(self, name: str) -> Config:
        return self.make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.make())

    def __len__(self) -> int:
        return len(self.make())


@dataclass(frozen=True)
class Family:
    """The last line of every model file, and all that the rest of the package knows about an architecture.

    `build(config)` returns the initialized module, see contract.py; a config has at least `image_size`, `channels` and
    `classes`.
    """

    name: str
    config: type[Any]
    build: type[Model]  # called with a config
    presets: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])  # common name → preset
    checkpoint: CheckpointSide = field(default_factory=CheckpointSide)

    def __post_init__(self) -> None:
        if not isinstance(self.build, type) or not issubclass(self.build, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"build of the family {self.name!r} is {self.build!r}; expected a subclass of "
                "vitrail.models.base.contract.ImageModel"
            )
        known = [each.name for each in dataclasses.fields(self.config)]
        if missing := [each for each in NEEDED_FIELDS if issubclass(self.build, ImageModel) and each not in known]:
            raise ConfigError(
                f"the config of the family {self.name!r} has no {missing[0]}; expected {', '.join(NEEDED_FIELDS)}"
            )
        if not isinstance(self.presets, Presets):  # those of the package are checked by its tests
            self.check_presets()

    def check_presets(self) -> None:
        """Raise an error for a preset of another kind, or an alias without a preset."""
        for name, preset in self.presets.items():
            if type(preset) is not self.config:
                kind, expected = type(preset).__name__, self.config.__name__
                raise ConfigError(f"preset {name!r} of the family {self.name!r} is a {kind}; expected a {expected}")
        for alias, name in self.aliases.items():
            if name not in self.presets:
                known = ", ".join(self.presets)
                raise ConfigError(
                    f"alias {alias!r} of the family {self.name!r} names {name!r}; expected one of its presets: {known}"
                )

    def configure(self, preset: Any = None, /, **values: Any) -> Any:
        """The preset, or by default the config's defaults, with these fields replaced; accepts values from JSON."""
        known = [field.name for field in dataclasses.fields(self.config)]
        values = {name if name in known else AMERICAN_NAMES.get(name, name): each for name, each in values.items()}
        for name in values:
            if name not in known:
                raise unknown_name_error(f"{self.name} field", name, known, synonyms=FOREIGN_FIELD_NAMES)
        return self.config(**values) if preset is None else dataclasses.replace(preset, **values)
