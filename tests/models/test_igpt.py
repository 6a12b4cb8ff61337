"""Image GPT: parity with transformers, parameter counts, causality, sampling and its checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layout_round_trip import check_round_trip
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.models.igpt import IGPT, make_cube_palette

TOY: dict[str, Any] = {"image_size": 4, "colors": 7, "width": 12, "depth": 3, "heads": 2}


def make_model(**fields: Any) -> IGPT:
    torch.manual_seed(0)
    model = add_weight_noise(vitrail.create("igpt_cpu", **{**TOY, **fields})).eval()
    assert isinstance(model, IGPT)
    return model


def draw_colors(count: int = 2) -> Tensor:
    return torch.randint(7, (count, 16), generator=torch.Generator().manual_seed(1))


def write_transformers_folder(folder: Path) -> Any:
    """A model of transformers with random weights, as it saves it; its biases are zero, as in the published weights."""
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

    torch.manual_seed(0)
    config = ImageGPTConfig(
        vocab_size=8, n_positions=16, n_embd=12, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = add_weight_noise(ImageGPTForCausalImageModeling(config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
    model.save_pretrained(folder)
    palette = {"clusters": torch.linspace(-1, 1, 21).reshape(7, 3).tolist()}
    (folder / "preprocessor_config.json").write_text(json.dumps(palette))
    return model


def test_logits_are_those_of_transformers_and_its_folder_comes_back(tmp_path: Path) -> None:
    theirs = write_transformers_folder(tmp_path / "theirs")
    found = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="imagegpt")
    config, colors = found.model.config, draw_colors()
    assert (config.image_size, config.colors, config.depth, config.heads, config.causal) == ((4, 4), 7, 3, 2, True)
    start = torch.full((2, 1), 7)
    with torch.no_grad():
        expected = theirs(input_ids=torch.cat([start, colors[:, :-1]], dim=1)).logits
        torch.testing.assert_close(found.model.color_logits(colors), expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.1
    palette = torch.linspace(-1, 1, 21).reshape(7, 3)
    assert torch.equal(found.model.palette, palette)
    assert torch.equal(read(tmp_path / "back").model.palette, palette)


def test_files_that_would_be_another_model_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_transformers_folder(tmp_path)
    weights, processor = tmp_path / "model.safetensors", tmp_path / "preprocessor_config.json"
    tensors, name = load_file(weights), "transformer.h.1.mlp.c_fc.bias"
    save_file({**tensors, name: torch.ones(48)}, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is not zero"):
        read(tmp_path)
    save_file(tensors, weights, {"format": "pt"})
    for text, message in (("{}", "no palette; expected 'clusters'"), ('{"clusters": [[0], [1, 2]]}', "not a list of")):
        processor.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


def test_a_logit_does_not_depend_on_its_own_pixel_or_later_ones() -> None:
    model, colors = make_model(), draw_colors(1)
    embedded = model.embed_colors(colors).detach().requires_grad_()  # token j is pixel j − 1
    logits, _ = model.predict(embedded + model.pos_embed)
    for pixel in (0, 5, 15):
        (gradient,) = torch.autograd.grad(logits[0, pixel].square().sum(), embedded, retain_graph=True)
        reached = gradient[0].abs().sum(-1)
        assert (reached[: pixel + 1] > 0).all()
        assert (reached[pixel + 1 :] == 0).all()
    changed = colors.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 7
    before, after = model.color_logits(colors), model.color_logits(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], atol=0, rtol=0)
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    both = make_model(causal=False)
    assert not torch.allclose(both.color_logits(colors)[:, 0], both.color_logits(changed)[:, 0])


def test_sampling_with_a_cache_is_sampling_without_one() -> None:
    model, given = make_model(), draw_colors(3)[:, :5]
    found = model.sample(given, torch.Generator().manual_seed(3), temperature=0.7)
    generator, colors = torch.Generator().manual_seed(3), given
    for pixel in range(5, 16):
        padded = torch.cat([colors, torch.zeros(3, 16 - pixel, dtype=torch.int64)], dim=1)
        shares = (model.color_logits(padded)[:, pixel] / 0.7).softmax(-1)
        drawn = torch.searchsorted(shares.cumsum(-1), torch.rand(3, 1, generator=generator))
        colors = torch.cat([colors, drawn.clamp(max=6)], dim=1)
    assert torch.equal(found, colors)
    assert found[:, 5:].unique().numel() > 2
    with pytest.raises(ConfigError, match="causal=False"):
        make_model(causal=False).sample(given, generator)


def test_pixels_get_the_nearest_color() -> None:
    model = make_model()
    images = torch.rand(2, 3, 4, 4) * 2 - 1
    colors = model.quantize(images)
    distances = torch.cdist(images.flatten(2).mT, model.palette)
    assert torch.equal(colors, distances.argmin(-1))
    assert torch.equal(model.quantize(model.paint(colors)), colors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.quantize(images), colors)
    assert make_cube_palette(512, 3).unique(dim=0).shape == (512, 3)
    assert make_cube_palette(3, 1).flatten().tolist() == [-1, 0, 1]


def test_features_are_the_mean_of_a_middle_layer() -> None:
    model, images = make_model(depth=4), torch.rand(2, 3, 4, 4) * 2 - 1
    x = model.embed_colors(model.quantize(images)) + model.pos_embed
    states = [x := block(x) for block in model.blocks]
    torch.testing.assert_close(model(images), model.blocks[2].norm1(states[1]).mean(1))
    torch.testing.assert_close(model.predict(model.embed(images)[0])[1], model(images))
    last = make_model(depth=4, feature_layer=4)
    torch.testing.assert_close(last(images), last.norm(states[3]).mean(1))


def test_a_head_is_trained_with_the_layers_below_it_and_the_palette_is_kept(tmp_path: Path) -> None:
    model = make_model(depth=4)
    model.palette.copy_(torch.rand(7, 3))
    vitrail.save(model, tmp_path / "model")
    tuned = vitrail.load(tmp_path / "model", classes=5, feature_layer=3)
    assert torch.equal(tuned.palette, model.palette)
    tuned(torch.rand(2, 3, 4, 4)).square().sum().backward()  # the head is zero: only it gets a gradient that is not 0
    trained = {name for name, weight in tuned.named_parameters() if weight.requires_grad}
    assert trained == {name for name, weight in tuned.named_parameters() if weight.grad is not None}
    assert "blocks.3.norm1.weight" in trained
    assert not {"blocks.3.mlp.fc1.weight", "norm.weight", "output.weight"} & trained
    larger = vitrail.load(tmp_path / "model", image_size=8)
    assert larger.pos_embed.shape == (1, 64, 12)


def test_other_sizes_and_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="image of 8×8 pixels; expected 4×4"):
        make_model()(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ConfigError, match="feature_layer is 4; expected at most 3"):
        make_model(feature_layer=4)
