"""Features of every kind of model: what its head reads, the output of a block, pixels, and an untrained model."""

from functools import cache
from typing import Any

import pytest
import torch
from support.toy_exports import PREPROCESSING, SIZE, TOY_FIELDS, ExportFinder, make_toy_model
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.evaluation.probes.feature_sources import (
    FeatureSource,
    make_model_source,
    make_pixel_source,
    make_untrained_source,
)
from vitrail.opening import Opened

IMAGES = torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@cache
def open_toy_model(name: str, **fields: Any) -> Opened:
    return vitrail.open_model(make_toy_model(name, **fields), preprocessing=PREPROCESSING)


def compute(source: FeatureSource | None) -> Tensor:
    assert source is not None
    with torch.inference_mode():
        return source.compute(IMAGES)


@pytest.mark.parametrize("name", TOY_FIELDS)
def test_the_head_of_every_model_makes_logits_of_its_features(name: str) -> None:
    loaded = open_toy_model(name)
    model: Any = loaded.model
    found = compute(make_model_source(loaded, name))
    assert found.ndim == 2
    if len(model.classifiers) == 1:
        head = model.get_submodule(model.classifiers[0][1])
        with torch.inference_mode():
            torch.testing.assert_close(head(found), model(IMAGES), rtol=0, atol=1e-5)
    else:
        tokens = model.encode(IMAGES)[:, :2]  # the class and the distillation token
        torch.testing.assert_close(found, tokens.mean(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in TOY_FIELDS if name != "crossvit"])  # its blocks have two widths
def test_every_model_has_features_of_its_middle_block(name: str) -> None:
    loaded = open_toy_model(name)
    model: Any = loaded.model
    found = compute(make_model_source(loaded, name, "middle"))
    blocks = [block for level in model.levels for block in level.blocks]
    assert torch.equal(found, compute(make_model_source(loaded, name, (len(blocks) - 1) // 2)))
    assert found.shape == (3, model.levels[0].width)
    assert found.isfinite().all()


def test_blocks_are_pooled_as_the_head_reads_them() -> None:
    vit, pooled = open_toy_model("vit"), open_toy_model("mean")
    with torch.inference_mode():
        for loaded in (vit, pooled):
            model: Any = loaded.model
            x, grid = model.embed(IMAGES)
            for layer, tokens in ((0, model.blocks[0](x, grid)), (-1, model.run(x, grid))):
                expected = tokens[:, 0] if loaded is vit else tokens.mean(1)
                torch.testing.assert_close(compute(make_model_source(loaded, "m", layer)), expected)
    for layer in (2, -3, "first"):
        with pytest.raises(ConfigError, match=rf"`layer` is {layer}; .* 2 blocks of m, from 0 to 1"):
            make_model_source(vit, "m", layer)


def test_a_model_without_a_head_is_its_own_features() -> None:
    loaded = open_toy_model("cct", classes=0)
    assert torch.equal(compute(make_model_source(loaded, "cct")), loaded.module(IMAGES))


def make_fresh_model(fields: dict[str, Any]) -> Any:
    given: dict[str, Any] = {"image_size": SIZE, "classes": 5, **fields}
    return vitrail.create(given.pop("preset"), **given)


def test_an_untrained_model_has_the_initial_weights_of_seed_0() -> None:
    loaded = open_toy_model("vit")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        fresh = make_fresh_model(TOY_FIELDS["vit"])
    state = torch.get_rng_state()
    found = make_untrained_source(loaded, "untrained")
    assert torch.equal(torch.get_rng_state(), state)
    expected = vitrail.open_model(fresh, preprocessing=PREPROCESSING)
    assert torch.equal(compute(found), compute(make_model_source(expected, "fresh")))
    assert found is not None
    assert found.digest != make_model_source(loaded, "vit").digest
    assert found.digest == make_model_source(expected, "fresh").digest


def test_the_digest_tells_parts_and_code_apart() -> None:
    class OwnNorm(nn.LayerNorm):
        pass

    def compute_digest(kind: type[nn.LayerNorm], eps: float) -> str | None:
        model: Any = make_toy_model("vit")
        model.norm = kind(model.config.width, eps=eps)
        return make_model_source(vitrail.open_model(model, preprocessing=PREPROCESSING), "vit").digest

    assert compute_digest(nn.LayerNorm, 1e-6) == compute_digest(nn.LayerNorm, 1e-6)
    assert compute_digest(nn.LayerNorm, 1e-1) not in (None, compute_digest(nn.LayerNorm, 1e-6))
    assert compute_digest(OwnNorm, 1e-6) is None


def test_pixels_are_averaged_to_at_most_32_per_side() -> None:
    source = make_pixel_source(PREPROCESSING, "raw pixels")  # 48×32
    assert torch.equal(compute(source), nn.functional.avg_pool2d(IMAGES, 2).flatten(1))
    small = make_pixel_source(vitrail.Preprocessing(image_size=32), "raw pixels")
    assert torch.equal(small.compute(IMAGES), IMAGES.flatten(1))


def test_modules_of_other_libraries_and_exports(exported: ExportFinder) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3 * SIZE[0] * SIZE[1], 7), nn.Linear(7, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.body(images.flatten(1)))

    net = Net()
    other = Opened(source="net", model=net, preprocessing=PREPROCESSING, classes=5)
    assert torch.equal(compute(make_model_source(other, "net")), net.body(IMAGES.flatten(1)))
    assert make_untrained_source(other, "untrained") is None
    assert make_model_source(other, "net").digest is None  # its code may change, and its weights stay equal
    with pytest.raises(ConfigError, match="net has no blocks that can be accessed, so `layer` middle"):
        make_model_source(other, "net", "middle")
    with pytest.raises(ConfigError, match="net has no linear layer of 6 outputs"):
        make_model_source(Opened(source="net", model=net, preprocessing=PREPROCESSING, classes=6), "net")
    for name, output in (("onnx", "logits"), ("tokens", "tokens")):
        with pytest.raises(ConfigError, match=f"was exported with {output}; expected features"):
            make_model_source(vitrail.open_model(exported(name)), "exported")
