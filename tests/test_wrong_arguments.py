"""A wrong argument of a public function is one line that says what was given and what is expected."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import vitrail

PUBLIC: Any = vitrail  # without types, as a beginner calls it
GRAY = vitrail.Preprocessing(image_size=28, mean=(0.5,), std=(0.5,))


@cache
def toy() -> Any:
    fields: dict[str, Any] = {
        "image_size": 28,
        "patch_size": 14,
        "channels": 1,
        "depth": 1,
        "width": 12,
        "heads": 3,
        "classes": 10,
    }
    return vitrail.create("ViT-Ti/16", **fields)


@cache
def predictor(**settings: Any) -> Any:
    return PUBLIC.Predictor(toy(), preprocessing=GRAY, **settings)


@cache
def explainer() -> Any:
    return vitrail.Explainer(predictor())


def images() -> Any:
    return vitrail.open_data("fashion").val


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "Predictor(None)": (lambda: PUBLIC.Predictor(None), "the model is None; expected a name, a path"),
    "Predictor('')": (lambda: PUBLIC.Predictor(""), "the model is ''; expected a name, a path"),
    "Predictor(class)": (lambda: PUBLIC.Predictor(type(toy())), "expected a name, a path, a module"),
    "Predictor(Predictor)": (lambda: PUBLIC.Predictor(predictor()), "the model is Predictor("),
    "threads": (lambda: predictor(threads="a"), "`threads` is 'a'; expected 1 or more"),
    "streams": (lambda: predictor(streams=0), "`streams` is 0; expected 1 or more"),
    "limits": (lambda: predictor(limits=5), "`limits` is 5; expected ImageLimits"),
    "merge": (lambda: predictor(merge="a"), "merge is 'a'"),
    "labels": (lambda: predictor(labels=7), "labels is 7; expected a list of strings"),
    "fields": (lambda: PUBLIC.open_model("x", fields=7), "`fields` is 7; expected a dictionary"),
    "device": (lambda: PUBLIC.open_model(toy(), preprocessing=GRAY, device=7.5), "`device` 7.5 is not a device"),
    "preprocessing": (lambda: PUBLIC.open_model(toy(), preprocessing=7), "preprocessing is 7"),
    "predict list": (lambda: predictor().predict(["a.jpg"]), "the image is a list; expected a path"),
    "predict example": (lambda: predictor().predict("example:cta"), "did you mean 'example:cat'?"),
    "explain image": (lambda: explainer().explain(7), "the image is a int"),
    "explain method": (lambda: explainer().explain("example:cat", 7), "unknown method 7"),
    "explain layer": (lambda: explainer().explain("example:cat", layer=1.5), "layer is 1.5; expected a number"),
    "explain token": (lambda: explainer().explain("example:cat", token=5), "token is 5; expected one of head"),
    "explain discard": (lambda: explainer().explain("example:cat", discard="a"), "discard is 'a'; expected 0 or more"),
    "load(module)": (lambda: PUBLIC.load(toy()), "the checkpoint is a ViT; expected a path or a name"),
    "load('')": (lambda: PUBLIC.load(""), "the checkpoint is ''; expected a path or a name"),
    "describe": (lambda: PUBLIC.describe(7), "the checkpoint is 7; expected a path or a name"),
    "create": (lambda: PUBLIC.create(["ViT-Ti/16"]), "the model name is ['ViT-Ti/16']; expected a string"),
    "list_models": (lambda: PUBLIC.list_models(7), "the pattern is 7; expected a string"),
    "save": (lambda: PUBLIC.save("name", "folder"), "str is not a model of the package"),
    "open_data": (lambda: PUBLIC.open_data(None), "the data is a NoneType; expected 'fashion'"),
    "open_recipe": (lambda: PUBLIC.open_recipe(7), "the recipe is 7; expected a name"),
    "evaluate name": (lambda: PUBLIC.evaluate("name", images()), "str has no config"),
    "evaluate data": (lambda: PUBLIC.evaluate(toy(), "fashion"), "the data is a str; expected images with labels"),
    "evaluate splits": (lambda: PUBLIC.evaluate(toy(), vitrail.open_data("fashion")), "open_data(…).val"),
    "evaluate preprocessing": (lambda: PUBLIC.evaluate(toy(), images(), 7), "`preprocessing` is 7"),
    "evaluate batch": (lambda: PUBLIC.evaluate(toy(), images(), batch=0), "`batch` is 0; expected 1 or more"),
    "fit name": (lambda: PUBLIC.fit("ViT-Ti/16", "fashion", steps=1), "str has no config"),
    "fit steps": (lambda: PUBLIC.fit(toy(), "fashion", steps=0), "`steps` is 0; expected 1 or more"),
    "fit run": (lambda: PUBLIC.fit(toy(), "fashion", run=5), "`run` is 5; expected a folder"),
    "fit callbacks": (lambda: PUBLIC.fit(toy(), "fashion", callbacks=7), "a callback is a int; expected on_start"),
    "summarize": (lambda: PUBLIC.summarize("ViT-Ti/16"), "str has no config"),
    "summarize depth": (lambda: PUBLIC.summarize(toy(), depth="a"), "`depth` is 'a'; expected 1 or more"),
    "look images": (lambda: PUBLIC.look(explainer(), "photo.jpg"), "images is one str; expected several"),
    "look batch": (lambda: PUBLIC.look(explainer(), batch="a"), "`batch` is 'a'; expected 1 or more"),
    "compare": (lambda: PUBLIC.compare(7), "the models are 7; expected a list"),
    "export name": (lambda: PUBLIC.export_model("ViT-Ti/16", "out", preprocessing=GRAY), "the model is a str"),
    "export folder": (lambda: PUBLIC.export_model(toy(), 7, preprocessing=GRAY), "the folder is 7"),
    "export preprocessing": (lambda: PUBLIC.export_model(toy(), "out", preprocessing=None), "`preprocessing` is None"),
    "export to": (lambda: PUBLIC.export_model(toy(), "out", preprocessing=GRAY, to="tflite"), "'tflite'; expected one"),
    "Teacher": (lambda: PUBLIC.Teacher(model=7, preprocessing=GRAY), "the teacher's model is a int"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, expected = CALLS[name]
    with pytest.raises(vitrail.VitrailError) as caught:
        call()
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert len(message) < 300
    assert not list(tmp_path.iterdir()), "nothing is written"
