"""What an architecture offers to the rest of the package: a config, a module that takes it, and named presets."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vitrail.errors import unknown


@dataclass(frozen=True, kw_only=True)
class Family:
    """The last line of every model file. `build(config)` gives the module, its weights at their starting values."""

    name: str
    config: type[Any]
    build: Callable[[Any], nn.Module]
    presets: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])  # as people write them → the preset's name

    def configure(self, preset: Any = None, **values: Any) -> Any:
        """The preset with these fields replaced, or from the defaults; also reads back what `asdict` and JSON made."""
        known = [field.name for field in dataclasses.fields(self.config)]
        for name in values:
            if name not in known:
                raise unknown(f"field of {self.name}", name, known)
        return self.config(**values) if preset is None else dataclasses.replace(preset, **values)
