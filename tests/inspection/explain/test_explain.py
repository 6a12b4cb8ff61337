"""Explanations equal maps computed by a reference from the captured parts."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.attention_models import (
    ATTENTION_CASES,
    count_hooks,
    make_attention_model,
    random_image_batch,
    unfused_attention,
)

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, compute_visible_box, preprocess_image
from vitrail.inspection.explain.explain_options import ExplainMethod, ExplainOptions
from vitrail.inspection.explain.explainer import Explainer

PREPROCESSING = Preprocessing(crop=0.8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
LABELS = ("tench", "goldfish", "crane", "ant", "bee")


def make_image(rows: int = 50, columns: int = 70, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def explainer(case: str = "learned stem", **fields: Any) -> Explainer:
    labels = LABELS if fields.get("classes", 5) else None
    return Explainer(make_attention_model(case, **fields), preprocessing=PREPROCESSING, labels=labels)


def pixels_of(subject: Explainer, *sources: Any) -> torch.Tensor:
    shown = [preprocess_image(open_image(each), subject.loaded.preprocessing) for each in sources]
    return torch.from_numpy(np.stack(shown))


def attended(model: Any, pixels: torch.Tensor) -> tuple[Any, Any, Any]:
    """Maps of all layers, (B, L, H, N, N), and gradients of the top class."""
    with unfused_attention() as whole:
        model.tokens(pixels)
    with unfused_attention() as weights:
        logits = model(pixels)
    logits.amax(-1).sum().backward()
    model.zero_grad(set_to_none=True)
    maps = torch.stack([each.detach() for each in whole], dim=1).double().numpy()
    gradients = np.zeros_like(maps)
    for layer, each in enumerate(weights):
        assert each.grad is not None
        gradients[:, layer, :, : each.shape[2]] = each.grad.numpy()
    return maps, gradients, logits.detach()


def read(model: Any, tokens: int, token: str) -> Any:
    """Weights of all tokens for the query token, independent of the implementation: (N,)."""
    prefix, answer = tokens - 6, getattr(model.config, "answer", "both")
    row = np.zeros(tokens)
    if "," in token:
        row[prefix + 3 * int(token[0]) + int(token[2])] = 1
    elif token == "head" and getattr(model.config, "pool", "class") != "class":
        row[prefix:] = 1 / 6
    elif token == "head" and prefix == 2 and model.config.distilled and answer == "both":
        row[:2] = 0.5
    else:
        row[1 if token == "distill" or (token == "head" and answer == "distill") else 0] = 1
    return row


def one_of(heads: Any, choice: Any) -> Any:
    """One head, or all heads fused: (H, N, N) → (N, N)."""
    return heads[choice] if isinstance(choice, int) else getattr(heads, choice)(0)


def rolled(maps: Any, choice: Any) -> Any:
    result = np.eye(maps.shape[-1])
    for layer in maps:
        chosen = one_of(layer, choice)
        result = (np.eye(maps.shape[-1]) / 2 + chosen / chosen.sum(-1, keepdims=True) / 2) @ result
    return result


def by_hand(options: ExplainOptions, model: Any, maps: Any, gradients: Any) -> Any:
    """Reference maps of one image: (L, H, N, N) → (layers, heads, 2, 3)."""
    depth, heads, tokens, _ = maps.shape
    asked = range(depth) if options.layer == "all" else [options.layer % depth]
    choices: list[Any] = list(range(heads)) if options.head == "all" else [options.head]
    rows = list[Any]()
    for layer in asked:
        if options.method == "rollout":
            rows.append([rolled(maps[: layer + 1], choice) for choice in choices])
        elif options.method == "attention":
            rows.append([one_of(maps[layer], choice) for choice in choices])
        else:
            result = np.eye(tokens)
            for each, gradient in zip(maps[: layer + 1], gradients[: layer + 1], strict=True):
                result = result + np.clip(each * gradient, 0, None).mean(0) @ result
            rows.append([result - np.eye(tokens)])
    found = np.array(rows)  # (layers, heads, N, N)
    found = np.einsum("n,lhnm->lhm", read(model, tokens, options.token), found)[..., -6:]
    return (found / found.sum(-1, keepdims=True)).reshape(*found.shape[:2], 2, 3)


QUESTIONS = [
    ExplainOptions(method=method, layer=layer, head=head, token=token)
    for method, layer, head, token in itertools.product(
        ("rollout", "attention"), (-1, 0, "all"), ("mean", "max", "min", 1, "all"), ("head", "class", "1,2")
    )
] + [
    ExplainOptions(method="grad-rollout", layer=layer, token=token)
    for layer, token in itertools.product((-1, 1, "all"), ("head", "class"))
]


def test_every_option_matches_the_reference() -> None:
    subject = explainer()
    pixels = pixels_of(subject, make_image(), make_image(60, 40, seed=1))
    maps, gradients, logits = attended(subject.model, pixels)
    for options in QUESTIONS:
        found, mine = subject.compute_maps(pixels, subject.resolve_options(options))
        assert torch.allclose(found, logits, atol=1e-5)
        layers, heads = 3 if options.layer == "all" else 1, 2 if options.head == "all" else 1
        assert mine.shape == (2, layers, heads, 2, 3)
        np.testing.assert_allclose(mine.sum((-1, -2)), 1, atol=1e-5)
        for image in range(2):
            expected = by_hand(options, subject.model, maps[image], gradients[image])
            np.testing.assert_allclose(mine[image], expected, atol=1e-5, err_msg=str(options))


@pytest.mark.parametrize("method", ["rollout", "attention", "grad-rollout"])
@pytest.mark.parametrize(
    "case",
    [
        "relative with registers",
        "rotary",
        "mean",
        "mean, then norm",
        "distilled",
        "distilled, distillation head",
        "hybrid",
    ],
)
def test_other_families_match_the_reference(case: str, method: Any) -> None:
    subject = explainer(case)
    pixels = pixels_of(subject, make_image())
    maps, gradients, _ = attended(subject.model, pixels)
    for token in ("head", *(("distill",) if "distilled" in case else ())):
        options = ExplainOptions(method=method, token=token)
        _, mine = subject.compute_maps(pixels, subject.resolve_options(options))
        np.testing.assert_allclose(mine[0], by_hand(options, subject.model, maps[0], gradients[0]), atol=1e-5)


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_every_family_can_be_explained(case: str) -> None:
    subject = explainer(case)
    methods: list[Any] = ["rollout", "grad-rollout", "attention", "norms", *["pool"] * ("map" in case or "cct" in case)]
    for method in methods:
        found = subject.explain(make_image(), method)
        assert found.maps.shape == (1, 1, 2, 3)
        assert np.isfinite(found.maps).all()
        assert method == "norms" or found.map.sum() == pytest.approx(1, abs=1e-5)
        assert found.map.std() > 1e-4 * found.map.mean()
    assert count_hooks(subject.model) == 0


@pytest.mark.parametrize("case", ["map", "map with class token and registers", "cct"])
def test_pool_maps_are_the_weights_of_the_head(case: str) -> None:
    subject = explainer(case)
    pixels = pixels_of(subject, make_image(), make_image(seed=1))
    logits, mine = subject.compute_maps(pixels, subject.resolve_options(ExplainOptions(method="pool")))
    with torch.no_grad():
        tokens = subject.model.tokens(pixels)
        shares = subject.model.attn_pool.weights(tokens[:, tokens.shape[1] - 6 :]).mean(1)[:, 0]
    assert torch.allclose(logits, subject.model(pixels), atol=1e-6)
    np.testing.assert_allclose(mine.reshape(2, 6), shares.numpy(), atol=1e-6)
    maps, _, _ = attended(subject.model, pixels)
    _, rollout = subject.compute_maps(pixels, subject.resolve_options(ExplainOptions()))
    for image in range(2):
        made_of = rolled(maps[image], "mean")
        expected = shares[image].numpy() @ made_of[-6:, -6:]
        np.testing.assert_allclose(rollout[image].ravel(), expected / expected.sum(), atol=1e-5)


@pytest.mark.parametrize("case", ["learned with registers", "cct", "distilled"])
def test_norms_are_those_of_the_patch_tokens(case: str) -> None:
    subject = explainer(case)
    pixels = pixels_of(subject, make_image(), make_image(seed=1))
    logits, mine = subject.compute_maps(pixels, subject.resolve_options(ExplainOptions(method="norms", layer="all")))
    _, second = subject.compute_maps(pixels, subject.resolve_options(ExplainOptions(method="norms", layer=1)))
    made = list[torch.Tensor]()
    for block in subject.model.blocks:
        block.register_forward_hook(lambda _, __, out: made.append(out))  # pyright: ignore[reportUnknownLambdaType]
    with torch.no_grad():
        subject.model.tokens(pixels)
        assert torch.allclose(subject.model(pixels), logits, atol=1e-5)
    expected = torch.stack([each[:, -6:].norm(dim=-1) for each in made[:3]], dim=1).reshape(2, 3, 1, 2, 3)
    np.testing.assert_allclose(mine, expected.numpy(), rtol=1e-5)
    np.testing.assert_allclose(second, mine[:, 1:2])


def test_classes_by_number_and_label() -> None:
    subject = explainer()
    maps = dict[int, Any]()
    for index, label in enumerate(LABELS):
        found = subject.explain(make_image(), "grad-rollout", of_class=label)
        by_number = subject.explain(make_image(), "grad-rollout", of_class=str(index))
        np.testing.assert_array_equal(found.maps, by_number.maps)
        assert found.explained_class is not None
        assert found.prediction is not None
        assert (found.explained_class.index, found.explained_class.label) == (index, label)
        assert found.explained_class in found.prediction.top
        maps[index] = found.map
    assert all(not np.allclose(maps[a], maps[b]) for a, b in itertools.combinations(maps, 2))
    likeliest = subject.explain(make_image(), "grad-rollout")
    assert likeliest.explained_class is not None
    assert likeliest.prediction is not None
    assert likeliest.explained_class == likeliest.prediction.top[0]
    np.testing.assert_array_equal(likeliest.map, maps[likeliest.explained_class.index])
    predicted = vitrail.Predictor(subject.model, preprocessing=PREPROCESSING, labels=LABELS).predict(make_image())
    for ours, other in zip(
        likeliest.prediction.top, predicted.top, strict=True
    ):  # whose pixels have another memory layout
        assert (ours.index, ours.label) == (other.index, other.label)
        assert ours.probability == pytest.approx(other.probability, abs=1e-6)


def test_a_predictor_is_explained_without_loading_its_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_attention_model("learned stem")
    predictor = vitrail.Predictor(model, preprocessing=PREPROCESSING, labels=LABELS)
    monkeypatch.setattr("vitrail.opening.open_checkpoint", None)
    found = Explainer(predictor)
    assert (found.model is model, found.loaded.labels, found.loaded.preprocessing.crop) == (True, LABELS, 0.8)
    expected = Explainer(model, preprocessing=PREPROCESSING, labels=LABELS).explain(make_image())
    np.testing.assert_array_equal(found.explain(make_image()).map, expected.map)
    assert Explainer(predictor, preprocessing={"crop": 1.0}).loaded.preprocessing.crop == 1.0
    compiled: Any = torch.compile(model, backend="eager")
    of_compiled = Explainer(vitrail.Predictor(compiled, preprocessing=PREPROCESSING))
    np.testing.assert_array_equal(of_compiled.explain(make_image()).map, expected.map)


def test_an_explanation_is_saved_by_its_suffix(tmp_path: Path) -> None:
    found = explainer().explain(make_image())
    for name, start in (("why.png", b"\x89PNG"), ("new/why.SVG", b"<?xml"), ("why.png", b"\x89PNG")):
        found.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    for name in ("why", "why.bmp"):
        with pytest.raises(ConfigError, match=rf"{name}; expected a name that ends in .png, .svg, .pdf"):
            found.save(str(tmp_path / name))
    with pytest.raises(ConfigError, match="the path is None"):
        found.save(None)  # pyright: ignore[reportArgumentType]
    assert {path.name for path in tmp_path.rglob("*.*")} == {"why.png", "why.SVG"}


def test_the_repr_of_an_explanation_is_one_short_line() -> None:
    line = repr(explainer().explain(make_image(), of_class="bee"))
    assert len(line) < 120
    for word in ("image", "bee", "%", "(1, 1, "):
        assert word in line


def test_what_cannot_be_explained_is_one_line() -> None:
    for given in (7, None, b"model", ["a"]):
        with pytest.raises(VitrailError, match="expected a name, a path, a module"):
            Explainer(given)  # pyright: ignore[reportArgumentType]


def test_discard() -> None:
    subject = explainer()
    plain, some, most = (subject.explain(make_image(), discard=share).map for share in (0.0, 0.5, 0.9))
    assert not np.allclose(plain, some)
    assert not np.allclose(some, most)
    assert some.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("method", ["rollout", "attention", "norms"])
def test_a_model_without_a_head(method: Any) -> None:
    for case in ("learned stem", "distilled", "cct"):
        found = explainer(case, classes=0).explain(make_image(), method)
        assert found.explained_class is None
        assert found.prediction is None
        assert found.map.shape == (2, 3)
        assert found.figure.caption == "image."


@pytest.mark.parametrize("frozen", [False, True])
def test_model_and_image_are_not_changed(frozen: bool) -> None:
    model = make_attention_model(dropout=0.5, attention_dropout=0.5).train().requires_grad_(not frozen)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    subject = Explainer(model, preprocessing=PREPROCESSING)
    assert not model.training
    pixels = random_image_batch()
    for method in ("rollout", "grad-rollout", "norms", "attention"):
        subject.explain(make_image(), method)
        once, again = (
            subject.compute_maps(pixels, subject.resolve_options(ExplainOptions(method=method)))[1] for _ in range(2)
        )
        np.testing.assert_array_equal(once, again)
        assert not pixels.requires_grad
        assert all(each.grad is None for each in (pixels, *model.parameters()))
        assert all(each.requires_grad != frozen for each in model.parameters())
        assert count_hooks(model) == 0
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_pixels_that_require_gradients() -> None:
    """As in an adversarial attack: their graph stays intact."""
    subject = explainer()
    start = random_image_batch().requires_grad_()
    pixels = start * 1.0
    for method in ("rollout", "grad-rollout"):
        logits, maps = subject.compute_maps(pixels, subject.resolve_options(ExplainOptions(method=method)))
        assert not logits.requires_grad
        np.testing.assert_allclose(
            maps,
            subject.compute_maps(pixels.detach(), subject.resolve_options(ExplainOptions(method=method)))[1],
            atol=1e-6,
        )
    assert pixels.requires_grad
    assert start.grad is None


def test_no_grad_and_inference_mode(tmp_path: Path) -> None:
    subject = explainer()
    methods: tuple[ExplainMethod, ...] = ("rollout", "grad-rollout", "norms")
    expected: dict[ExplainMethod, Any] = {method: subject.explain(make_image(), method).maps for method in methods}
    vitrail.save(subject.model, tmp_path / "model", preprocessing=PREPROCESSING)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            opened = Explainer(tmp_path / "model")
            for method, maps in expected.items():
                np.testing.assert_allclose(subject.explain(make_image(), method).maps, maps, atol=1e-6)
                np.testing.assert_allclose(opened.explain(make_image(), method).maps, maps, atol=1e-6)
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    with torch.inference_mode():
        stale = explainer()
    assert stale.explain(make_image()).map.shape == (2, 3)
    with pytest.raises(ConfigError, match=r"create the model outside of torch\.inference_mode"):
        stale.explain(make_image(), "grad-rollout")


@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks in place"])
def test_compiled_models(how: str) -> None:
    plain, model = explainer(), make_attention_model()
    model.load_state_dict(plain.model.state_dict())
    if how == "wrapped":
        wrapped: Any = torch.compile(model, backend="aot_eager")
        model = wrapped
    else:
        for part in [model] if how == "in place" else model.blocks:
            part.compile(backend="aot_eager")
    with torch.no_grad():
        model(random_image_batch(1))  # compiled now, without hooks
    subject = Explainer(model, preprocessing=PREPROCESSING, labels=LABELS)
    for method in ("rollout", "grad-rollout", "norms"):
        np.testing.assert_allclose(
            subject.explain(make_image(), method).maps, plain.explain(make_image(), method).maps, atol=1e-5
        )
    with torch.no_grad():
        assert torch.allclose(model(random_image_batch(1)), plain.model(random_image_batch(1)), atol=1e-5)


def test_half_precision() -> None:
    subject = explainer()
    for method in ("rollout", "grad-rollout", "attention", "norms"):
        expected = subject.explain(make_image(), method).map
        half = Explainer(explainer().model.bfloat16(), preprocessing=PREPROCESSING).explain(make_image(), method).map
        assert half.dtype == np.float32
        assert method == "norms" or half.sum() == pytest.approx(1, abs=1e-5)
        assert half.shape == expected.shape
    pooled = Explainer(make_attention_model("map").bfloat16(), preprocessing=PREPROCESSING).explain(
        make_image(), "pool"
    )
    assert pooled.map.sum() == pytest.approx(1, abs=1e-5)


def test_gray_models_and_gray_photos() -> None:
    gray = Explainer(make_attention_model(channels=1), preprocessing=Preprocessing(mean=(0.5,), std=(0.5,)))
    for source in (make_image(), make_image()[:, :, 0], Image.fromarray(make_image()).convert("L")):
        found = gray.explain(source, "grad-rollout")
        assert found.photo.shape == (50, 70, 3)
        assert explainer().explain(source).map.shape == (2, 3)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 640), (900, 11), (1500, 2000), (33, 47)])
def test_photos_of_odd_sizes(size: tuple[int, int]) -> None:
    found = explainer().explain(make_image(*size))
    assert found.map.sum() == pytest.approx(1, abs=1e-5)
    scale = min(1, 512 / max(size))
    assert found.photo.shape == (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)), 3)
    box = compute_visible_box(size, explainer().loaded.preprocessing)
    across, down = found.photo.shape[1] / size[1], found.photo.shape[0] / size[0]
    np.testing.assert_allclose(found.box, (box[0] * across, box[1] * down, box[2] * across, box[3] * down))


def test_dynamic_models_use_the_preprocessing_size() -> None:
    for case in ("learned stem", "relative", "cct with neighbors", "hybrid", "distilled"):
        model = make_attention_model(case, dynamic=True)
        subject = Explainer(model, preprocessing=Preprocessing(image_size=(64, 16)))
        for method in ("rollout", "grad-rollout", "norms"):
            found = subject.explain(make_image(), method)
            assert found.maps.shape == (1, 1, 4, 1)
        assert subject.explain(make_image(), token="3,0").map.argmax() in range(4)


def test_titles_of_maps() -> None:
    subject = explainer()
    assert subject.explain(make_image()).titles == (("up to layer 2",),)
    assert subject.explain(make_image(), "rollout").titles == (("up to layer 2, mean over heads",),)
    found = subject.explain(make_image(), "attention", layer="all", head="all")
    assert found.titles == tuple(tuple(f"layer {a}, head {b}" for b in range(2)) for a in range(3))
    assert subject.explain(make_image(), layer=0, head=1).titles == (("up to layer 0, head 1",),)
    assert subject.explain(make_image(), "norms", layer=-2).titles == (("layer 1",),)
    assert subject.explain(make_image(), "grad-rollout", layer="all").titles == tuple(
        (f"up to layer {n}",) for n in range(3)
    )
    assert explainer("cct").explain(make_image(), "pool").titles == (("attention pool",),)


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    model = make_attention_model()
    vitrail.save(model, tmp_path / "model", preprocessing=PREPROCESSING, labels=list(LABELS))
    path = tmp_path / "my photo.png"
    Image.fromarray(make_image()).save(path)
    expected = Explainer(model, preprocessing=PREPROCESSING, labels=LABELS).explain(make_image())
    for source in (path, str(path), path.read_bytes()):
        found = Explainer(tmp_path / "model").explain(source)
        np.testing.assert_allclose(found.maps, expected.maps, atol=1e-6)
        assert str(found.prediction) == str(expected.prediction)
    assert Explainer(str(tmp_path / "model")).explain(path).figure.name == "my photo.grad-rollout"
    assert expected.figure.name == "image.grad-rollout"


def test_errors() -> None:
    subject = explainer()
    with pytest.raises(DataError, match=r"'none\.jpg' does not exist"):
        subject.explain("none.jpg")
    with pytest.raises(ConfigError, match="layer is 9; expected 0 to 2"):
        subject.explain("none.jpg", layer=9)  # options are checked first
    with torch.no_grad():
        next(subject.model.parameters()).fill_(float("nan"))
    with pytest.raises(VitrailError, match="the model returns NaN"):
        subject.explain(make_image())
    assert count_hooks(subject.model) == 0
