"""Models whose attention has no maps: the other figures are drawn, and the missing ones are explained."""

from typing import Any

import numpy as np
import pytest

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.inspection.attention.capture import capture_attention, capture_tokens, why_no_attention_maps
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.model_figures import look
from vitrail.report.model_report import build_model_report

WHY = "its keys are mixtures of all tokens, so there are no weights per token"


def explainer(**fields: Any) -> Explainer:
    toy = {"image_size": (32, 48), "depth": 2, "width": 16, "heads": 2, "projected": 4, "classes": 3, **fields}
    model = vitrail.create("linformer_tiny_patch16_224", **toy)
    return Explainer(model, preprocessing=vitrail.Preprocessing(image_size=(32, 48)))


def make_images(count: int) -> list[Any]:
    return [np.random.default_rng(n).random((40, 60, 3)) for n in range(count)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_default_method_is_norms(dynamic: bool) -> None:
    subject = explainer(dynamic=dynamic)
    found, (photo,) = subject.explain(make_images(1)[0], layer="all"), make_images(1)
    assert (subject.default_method, found.options.method, found.maps.shape) == ("norms", "norms", (2, 1, 2, 3))
    with capture_tokens(subject.model) as states:
        subject.model.tokens(subject.loaded.make_batch([photo]))
    expected = [state[0, 1:].norm(dim=-1).reshape(1, 2, 3).detach().numpy() for state in states[1:3]]
    np.testing.assert_allclose(found.maps, expected, rtol=1e-5)


@pytest.mark.parametrize("method", ["rollout", "grad-rollout", "attention"])
def test_maps_are_refused_with_the_reason(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"^method '{method}' is undefined for this model: {WHY}; use 'norms'$"):
        explainer().explain(make_images(1)[0], method)


def test_layers_are_the_blocks() -> None:
    with pytest.raises(ConfigError, match=r"^layer is 2; expected 0 to 1, or -1 for the last: there are 2$"):
        explainer().explain(make_images(1)[0], layer=2)


def test_look_draws_the_other_figures_with_notes() -> None:
    result = look(explainer(), make_images(5))
    assert {figure.name for figure in result.figures} == {
        *("position_similarity", "filters", "token_norms", "patch_pca", "alignment")
    }
    assert result.notes == (
        f"attention distance: not defined, since {WHY}",
        f"occlusion check: not possible, since {WHY}",
    )


def test_a_report() -> None:
    _, _, sections = build_model_report(explainer(), "linear")
    table = next(section.table for section in sections if section.title == "Model")
    assert table is not None
    assert ("attention layers and heads", "2, 2 each") in table[1]


def test_only_the_grid_can_be_captured() -> None:
    subject = explainer()
    model = subject.model
    assert subject.no_maps_reason == why_no_attention_maps(model) == WHY
    with capture_attention(model, []) as result:
        model(subject.loaded.make_batch(make_images(1)))
    assert (result.patch_grid, result.prefix, result.maps) == ((2, 3), 1, [])
    with pytest.raises(ConfigError, match="Linformer has no attention maps"), capture_attention(model, [0]):
        raise AssertionError("not reached")
    assert (
        why_no_attention_maps(vitrail.create("ViT-Ti/16", depth=1))
        == why_no_attention_maps(vitrail.create("t2t_vit_7", depth=1))
        == ""
    )
