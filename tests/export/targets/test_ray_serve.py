"""The application of Ray Serve: its class runs without Ray, and its configuration names it."""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from support.target_folders import WriteTarget

from vitrail.base.errors import ConfigError
from vitrail.data.photos import list_example_photos
from vitrail.predict.predictor import Predictor


def test_the_class_predicts(write_target: WriteTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write_target("ray")
    config = yaml.safe_load((folder / "serve_config.yaml").read_text())
    (application,) = config["applications"]
    module, _, attribute = application["import_path"].partition(":")

    def deployment(kind: Any) -> Any:
        kind.bind = kind
        return kind

    ray = ModuleType("ray")
    ray.serve = SimpleNamespace(deployment=deployment)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "ray", ray)
    space: dict[str, Any] = {"__file__": str(folder / f"{module}.py")}
    exec(compile((folder / f"{module}.py").read_text(), module, "exec"), space)
    assert application["deployments"][0]["name"] == type(space[attribute]).__name__

    def ask(photo: bytes, **query: str) -> Any:
        async def body() -> bytes:
            return photo

        return asyncio.run(space[attribute](SimpleNamespace(body=body, query_params=query)))

    photo = list_example_photos()[0]
    expected = Predictor(folder / "model").predict(photo, top=2).top
    assert json.loads(ask(photo.read_bytes(), top_k="2").body) == [
        {"label": each.name, "score": pytest.approx(each.probability, abs=1e-6)} for each in expected
    ]
    for wrong, query in ((b"no photo", {}), (photo.read_bytes(), {"top_k": "many"})):
        refused = ask(wrong, **query)
        assert refused.status_code == 400
        assert json.loads(refused.body)["error"]


def test_features_are_refused(write_target: WriteTarget) -> None:
    with pytest.raises(ConfigError, match="`for_target` ray with `features`"):
        write_target("ray", "tokens")
