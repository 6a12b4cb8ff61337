"""Options are resolved before any image is read; invalid ones are refused with the valid range."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_models import make_attention_model, random_image_batch
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.inspection.explain.explain_options import (
    EXPLAIN_METHODS,
    ExplainOptions,
    default_method,
    find_class_index,
    find_token_index,
)
from vitrail.inspection.explain.explainer import Explainer
from vitrail.layers.attention import SelfAttention
from vitrail.models.base.contract import ImageModel, ImageSizes, Level

LABELS = ("tench, Tinca tinca", "goldfish", "crane, bird", "crane", "3-toed sloth, ai")


def resolve(case: str = "learned stem", labels: Any = LABELS, fields: Any = None, **options: Any) -> ExplainOptions:
    model = make_attention_model(case, **(fields or {}))
    return Explainer(model, preprocessing=Preprocessing(), labels=labels).resolve_options(ExplainOptions(**options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"layer": 2, "head": "mean", "of_class": None}),
        ({"layer": -1, "head": -2}, {"layer": 2, "head": 0}),
        ({"layer": "1", "head": "1", "of_class": "4"}, {"layer": 1, "head": 1, "of_class": 4}),  # from the command line
        ({"layer": "-3", "head": "max"}, {"layer": 0, "head": "max"}),
        ({"layer": np.int64(2), "head": np.int64(1), "of_class": np.int64(3)}, {"layer": 2, "head": 1, "of_class": 3}),
        ({"of_class": torch.tensor(2).item()}, {"of_class": 2}),
        ({"layer": "all", "head": "all"}, {"layer": "all", "head": "all"}),
        ({"of_class": "goldfish"}, {"of_class": 1}),
        ({"of_class": " TINCA tinca"}, {"of_class": 0}),
        ({"of_class": "tench, tinca tinca"}, {"of_class": 0}),
        ({"of_class": "Crane"}, {"of_class": 3}),  # a complete label before one of several names
        ({"of_class": "3-toed sloth"}, {"of_class": 4}),
        ({"token": "class"}, {"token": "class"}),
        ({"token": "1,2"}, {"token": "1,2"}),
        ({"token": "1, 2"}, {"token": "1, 2"}),
        ({"discard": 0.9}, {"discard": 0.9}),
        ({"method": "attention", "layer": 0, "token": "0,0"}, {"layer": 0}),
        ({"method": "norms", "layer": "all"}, {"layer": "all"}),
        ({"method": "grad-rollout", "of_class": 0}, {"of_class": 0}),
    ],
)
def test_valid_options(options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = resolve(**options)
    for name, value in expected.items():
        assert getattr(found, name) == value
    for name in ("layer", "head", "of_class"):
        assert type(getattr(found, name)) in (int, str, type(None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rolout"}, "unknown method 'rolout'; did you mean 'rollout'?"),
        ({"layer": 3}, "layer is 3; expected 0 to 2, or -1 for the last: there are 3"),
        ({"layer": "-4"}, "layer is -4; expected 0 to 2, or -1 for the last: there are 3"),
        ({"layer": "first"}, "layer is 'first'; expected a number, or all"),
        ({"layer": 1.5}, "layer is 1.5; expected a number, or all"),
        ({"head": 2}, "head is 2; expected 0 to 1, or -1 for the last: there are 2"),
        ({"head": "median"}, "head is 'median'; expected a number, or mean, max, min, all"),
        ({"head": ""}, "head is ''; expected a number, or mean, max, min, all"),
        ({"method": "grad-rollout", "head": 0}, "head 0 cannot be combined with method 'grad-rollout'"),
        ({"method": "norms", "head": "all"}, "head all cannot be combined with method 'norms'"),
        ({"method": "norms", "token": "class"}, "token 'class' cannot be combined with method 'norms'"),
        (
            {"method": "attention", "discard": 0.5},
            "discard 0.5 cannot be combined with method 'attention'; it applies to 'rollout'",
        ),
        ({"method": "grad-rollout", "discard": 0.5}, "discard 0.5 cannot be combined with method 'grad-rollout'"),
        ({"discard": 1.0}, "discard is 1.0; expected 0 or more, and less than 1"),
        ({"discard": -0.1}, "discard is -0.1"),
        ({"discard": float("nan")}, "discard is nan"),
        ({"method": "pool"}, "method 'pool' needs a model with attention pooling"),
        ({"method": "windows"}, "method 'windows' is undefined for this model: it has no windows that attend to each"),
        ({"token": "2,0"}, "token is '2,0'; expected one of head, class, or a patch as row,column from 0,0 to 1,2"),
        ({"token": "0,3"}, "token is '0,3'; expected"),
        ({"token": "-1,0"}, "token is '-1,0'; expected"),
        ({"token": "1"}, "token is '1'; expected"),
        ({"token": "1,1,1"}, "token is '1,1,1'; expected"),
        ({"token": "1,"}, "token is '1,'; expected"),
        ({"token": "²,0"}, "token is '²,0'; expected"),
        ({"token": "0," + "9" * 5000}, "token is '0,9999"),
        ({"token": "distill"}, "token is 'distill'; expected one of head, class, or a patch"),
        ({"token": "register0"}, "token is 'register0'; expected one of head, class, or a patch"),
        ({"of_class": 5}, "class is 5; expected 0 to 4: there are 5"),
        ({"of_class": -1}, "class is -1; expected 0 to 4: there are 5"),
        ({"of_class": "-1"}, "class is -1; expected 0 to 4"),
        ({"of_class": "--1"}, "unknown class '--1'"),
        ({"of_class": "9" * 5000}, "unknown class '9999"),
        ({"of_class": "goldfsh"}, "unknown class 'goldfsh'; did you mean 'goldfish'?"),
        ({"of_class": ""}, "unknown class ''"),
        (
            {"of_class": "cat", "labels": None},
            "class is 'cat', but the classes of this model have no names; expected 0 to 4",
        ),
        ({"fields": {"classes": 0}, "labels": None, "of_class": 0}, "class 0 needs a model with classes"),
        (
            {"fields": {"classes": 0}, "labels": None, "method": "grad-rollout"},
            "method 'grad-rollout' needs a model with classes",
        ),
        (
            {"case": "cct", "method": "pool", "layer": 1},
            "layer 1 cannot be combined with method 'pool', which comes after",
        ),
        ({"case": "cct", "method": "pool", "head": "max"}, "head max cannot be combined with method 'pool'"),
        ({"case": "cct", "method": "pool", "token": "0,0"}, "token '0,0' cannot be combined with method 'pool'"),
        ({"case": "cct", "token": "class"}, "token is 'class'; expected one of head, or a patch as row,column"),
        ({"case": "distilled", "token": "register0"}, "token is 'register0'; expected one of head, class, distill, or"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def resmlp() -> Any:
    """The family of the example, which has patches but no attention."""
    path = Path(__file__).parents[3] / "examples" / "own_family.py"
    spec = importlib.util.spec_from_file_location("own_family_without_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ResMLP(module.ResMLPConfig(image_size=32, width=16, depth=1))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: vitrail.create("resnet18", image_size=32), "ResNet"),
        (lambda: vitrail.create("regnety_040", stages=(1,), widths=(64,)), "RegNetY"),
    ],
)
def test_models_without_attention(make: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name} has no attention maps: it has no attention; expected a model whose"
    ):
        Explainer(make(), preprocessing=Preprocessing())


def test_tokens_without_attention_have_norms() -> None:
    explainer = Explainer(resmlp(), preprocessing=Preprocessing())
    assert explainer.default_method == "norms"
    _, maps = explainer.compute_maps(
        random_image_batch(2, (32, 32)), explainer.resolve_options(ExplainOptions(method="norms"))
    )
    assert maps.shape == (2, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match="method 'rollout' is undefined for this model: it has no attention"):
        explainer.resolve_options(ExplainOptions(method="rollout"))


def test_indices_of_tokens() -> None:
    vit, deit = make_attention_model("learned with registers"), make_attention_model("distilled")
    names = vit.prefix_tokens
    assert find_token_index("head", names, (2, 3)) is None
    tokens = ("class", "register0", "register1", "0,0", "0,2", "1,0")
    places = [find_token_index(token, names, (2, 3)) for token in tokens]
    assert places == [0, 1, 2, 3, 5, 6]
    assert [find_token_index(token, deit.prefix_tokens, (2, 3)) for token in ("class", "distill", "1,2")] == [0, 1, 7]


def test_numbers_take_precedence_over_labels() -> None:
    assert find_class_index("1", 3, ("2", "0", "1")) == 1
    assert find_class_index(2, 3, None) == 2
    with pytest.raises(ConfigError, match="class 'Crane' is the name of 2 classes; use a number: 0 or 2"):
        find_class_index("Crane", 3, ("crane, bird", "goldfish", "crane, machine"))
    with pytest.raises(ConfigError, match=r"'Dog'.*'West Highland dog'"):
        find_class_index("Dog", 2, ("n02098286 West Highland dog, Westie", "Tabby"))


def test_tokens_of_a_dynamic_model_are_checked_after_the_pass() -> None:
    model = make_attention_model(dynamic=True)
    explainer = Explainer(model, preprocessing=Preprocessing(image_size=(64, 16)))
    question = explainer.resolve_options(ExplainOptions(token="3,0"))
    _, maps = explainer.compute_maps(random_image_batch(1, (64, 16)), question)
    assert maps.shape == (1, 1, 1, 4, 1)
    with pytest.raises(ConfigError, match=r"token is '3,0'; expected one of head, class, or a patch .* to 1,2"):
        explainer.compute_maps(random_image_batch(1), question)


def test_a_custom_model() -> None:
    """It has attention, but neither blocks nor a final norm."""

    class Own(ImageModel):
        prefix_tokens = classifier_tokens = ("class",)
        sizes = ImageSizes()
        final_norm = ""

        def __init__(self) -> None:
            super().__init__(make_attention_model().config)
            self.levels = (Level(grid=(2, 3), stride=(16, 16), width=16, blocks=("attn",)),)
            self.linear, self.cls_token = nn.Linear(768, 16), nn.Parameter(torch.randn(1, 1, 16))
            self.attn, self.head = SelfAttention(16, 2), nn.Linear(16, 5)

        def forward(self, images: Tensor) -> Tensor:
            patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
            x = torch.cat([self.cls_token.expand(len(images), -1, -1), self.linear(patches)], dim=1)
            return self.head(self.attn(x, (2, 3))[:, 0])

    explainer = Explainer(Own(), preprocessing=Preprocessing())
    for method in ("rollout", "grad-rollout", "attention"):
        for token in ("head", "class", "1,2"):
            _, maps = explainer.compute_maps(
                random_image_batch(), explainer.resolve_options(ExplainOptions(method=method, token=token))
            )
            assert maps.shape == (2, 1, 1, 2, 3)
    with pytest.raises(ConfigError, match="token is '2,0'"):
        explainer.compute_maps(random_image_batch(), ExplainOptions(token="2,0"))
    with pytest.raises(ConfigError, match="method 'norms' needs a model with blocks"):
        explainer.resolve_options(ExplainOptions(method="norms"))


def test_descriptions_and_titles() -> None:
    assert ExplainOptions().description == "rollout over all layers, mean over heads"
    assert ExplainOptions(method="grad-rollout", layer=11).description == "gradient rollout over 12 layers"
    assert ExplainOptions(method="grad-rollout", layer=0).description == "gradient rollout over 1 layer"
    assert (
        ExplainOptions(method="attention", layer="all", head="all").description == "attention in each layer, each head"
    )
    assert ExplainOptions(discard=0.9, layer=1).description.endswith(", without the smallest 90% of each row")
    assert ExplainOptions(method="norms", layer=3).description == "token norms after layer 3"
    assert ExplainOptions(method="pool").description == "weights of the attention pool"
    assert ExplainOptions().looks == "What the model looked at"
    assert ExplainOptions(token="1,2").looks == "What patch 1,2 looked at"
    assert ExplainOptions(method="windows", token="1,2", layer=3).looks == "What window 1,2 looked at in layer 3"
    assert ExplainOptions(method="attention", token="distill").looks == "What the distill token looked at"
    assert EXPLAIN_METHODS == ("rollout", "grad-rollout", "attention", "heads", "windows", "pool", "norms")


def test_default_method() -> None:
    """grad-rollout by default; options that only rollout has, and a model without classes or gradients, select it."""
    model, headless = make_attention_model(), make_attention_model(classes=0)
    subject = Explainer(model, preprocessing=Preprocessing())
    assert subject.default_method == "grad-rollout"
    assert default_method(model, subject.layers, head=1) == "rollout"
    assert default_method(model, subject.layers, discard=0.5) == "rollout"
    assert default_method(headless, subject.layers) == "rollout"
    assert default_method(model, []) == "norms"
    with torch.inference_mode():
        assert default_method(make_attention_model(), subject.layers) == "rollout"
