"""A kind of models for the tests of the service: it reads digits, so that it opens at once and needs no torch."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import CheckpointError, ConfigError, DataError
from vitrail.base.kinds import Kind, ServedTensor
from vitrail.opening import Opened

LABELS = ("zero", "one: <script>", "two")


def save_digits(folder: Path, *, version: int = 1, seconds: float = 0.0) -> Path:
    """A model that takes so long per item; its version is in every answer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": 2, "kind": "digits", "version": version, "seconds": seconds}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


class ServedDigits:
    """The file `7` has the values 7, 14 and 21, times the version of the model."""

    inputs = (ServedTensor(name="file", datatype="BYTES"), ServedTensor(name="pixels", datatype="UINT8", shape=(2,)))
    outputs = (
        ServedTensor(name="logits", datatype="FP32", shape=(3,), labels=LABELS),
        ServedTensor(name="features", datatype="FP32", shape=(2,)),
    )
    features, streams, item_bytes, example = "features", 2, 1000, b"1"

    def __init__(self, model: str, **options: Any) -> None:
        self.opened = Opened(source=model, model=self, kind="digits")
        about = json.loads((Path(model) / "config.json").read_text())
        if about["version"] == "broken":
            raise CheckpointError(f"{model} is broken; train it again")
        self.version, self.seconds, self.options = about["version"], about["seconds"], options
        self.computed = 0

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"kind": "digits", "labels": list(LABELS), "digest": str(self.version), "computed": self.computed}

    def parse_settings(self, given: Mapping[str, Any]) -> int:
        unknown = set(given) - {"top_k"}
        top = str(given.get("top_k", 3))
        if unknown or top not in ("1", "2", "3"):
            raise ConfigError(f"{dict(given)!r}; expected top_k from 1 to 3")
        return int(top)

    def prepare(self, name: str, value: Any, settings: int) -> float:
        del settings
        if name == "pixels":
            return float(value.sum())
        if not value.isdigit() or len(value) > 9:
            raise DataError(f"the file has {len(value)} bytes; expected 1 to 9 digits")
        return float(value)

    def run(self, item: float, outputs: Sequence[str]) -> Mapping[str, NDArray[np.float32]]:
        time.sleep(self.seconds)
        self.computed += 1
        values = {"logits": item * self.version * np.arange(1, 4), "features": np.full(2, item)}
        return {name: values[name].astype(np.float32) for name in outputs}

    def to_json(self, found: Mapping[str, Any], settings: int) -> Any:
        values = found["logits"].tolist()
        order = sorted(range(3), key=lambda index: -values[index])[:settings]
        return [{"label": LABELS[index], "score": values[index]} for index in order]


class DigitsExplorer:
    def __init__(self, model: str, opened: Opened) -> None:
        self.served: ServedDigits = opened.model
        self.about = json.loads((Path(model) / "config.json").read_text())

    def describe(self) -> dict[str, Any]:
        return {"kind": "digits", "parts": {"maps": True}}

    def explore(self, body: bytes, query: Mapping[str, str]) -> bytes:
        time.sleep(self.about["seconds"])
        if not body.isdigit() or len(body) > 9:
            raise DataError("the file has no digits; expected digits")
        found = {"value": int(body), "computed": self.served.computed, **query}
        header = json.dumps({"__metadata__": {"explanation": json.dumps(found)}}).encode()
        return len(header).to_bytes(8, "little") + header


def open_digits(name: str, run: Any = None) -> Opened:
    del run
    return Opened(source=name, model=None, kind="digits")


def refuse(*_: Any, **__: Any) -> Any:
    raise ConfigError("digits are served only")


KIND = Kind(
    name="digits",
    does="reads digits",
    use="vitrail serve",
    commands={"serve": "support.toy_served:ServedDigits", "explore": "support.toy_served:DigitsExplorer"},
    open=open_digits,
    open_source=refuse,
    describe_next_steps=refuse,
)
