"""CrossViT: logits of timm's, the exchange by explicit sums, two grids, counts, files and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, write_checkpoint
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.evaluation.probes.feature_sources import compute_head_inputs, find_block
from vitrail.export.torch_modules import check_output_available
from vitrail.models.crossvit import CrossViT, CrossViTConfig
from vitrail.models.parts.token_merging import add_token_merging
from vitrail.train.optim import list_weights

TOY = CrossViTConfig(
    image_size=48,
    patch_sizes=(12, 16),
    scales=(1.0, 32 / 48),
    widths=(16, 32),
    heads=(2, 4),
    branch_depths=(1, 2),
    depth=2,
    classes=5,
)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (48, 48)))


def make_timm_model(*, dagger: bool = False, **fields: Any) -> Any:
    toy: dict[str, Any] = {
        "img_size": 48,
        "img_scale": (1.0, 32 / 48),
        "embed_dim": [16, 32],
        "num_heads": [2, 4],
        "depth": [[1, 2, 0], [1, 2, 0]],
        "num_classes": 5,
    }
    name = "crossvit_9_dagger_240" if dagger else "crossvit_tiny_240"
    return add_weight_noise(timm.create_model(name, **{**toy, **fields}), std=0.2)


@pytest.mark.parametrize("dagger", [False, True])
def test_logits_are_those_of_timm_and_its_file_comes_back(dagger: bool, tmp_path: Path) -> None:
    theirs = make_timm_model(dagger=dagger)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    found = check_round_trip(tmp_path / "theirs.pth", tmp_path / "back.pth", to="timm", heads=(2, 4))
    config = found.model.config
    assert found.description.family == "crossvit"
    assert (config.convolutions, config.mlp_ratio, config.image_size) == (dagger, 3 if dagger else 4, (48, 48))
    assert config.scales == (1.0, 32 / 48)
    assert max_output_difference(found.model, theirs, (48, 48)) <= 1e-5


def test_features_without_a_head_are_those_of_timm() -> None:
    theirs = make_timm_model(num_classes=0)
    ours = CrossViT(replace(TOY, classes=0)).eval()
    ours.load_state_dict(theirs.state_dict())
    assert ours.feature_width == 48
    assert max_output_difference(ours, theirs, (48, 48)) <= 1e-5


def test_file_of_the_authors(tmp_path: Path) -> None:
    """Theirs are timm's names, with a list of tables."""
    theirs = make_timm_model()
    names = {
        name: name.replace("pos_embed_", "pos_embed.").replace("cls_token_", "cls_token.")
        for name in theirs.state_dict()
    }
    tensors = {names[name]: tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"model": tensors}, tmp_path / "theirs.pth")
    found = read(tmp_path / "theirs.pth", heads=(2, 4))
    assert found.layout == "authors"
    assert max_output_difference(found.model, theirs, (48, 48)) <= 1e-5
    write_checkpoint(found, tmp_path / "back.pth", "authors")
    assert_same_tensors(torch.load(tmp_path / "back.pth", weights_only=True)["model"], tensors)


def test_timm_opens_our_folder(tmp_path: Path) -> None:
    model = add_weight_noise(CrossViT(TOY))
    vitrail.save(model, tmp_path / "folder", to="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, theirs, (48, 48)) <= 1e-5
    assert read(tmp_path / "folder").model.config == TOY


def test_grids_and_strides_of_the_presets() -> None:
    """The second branch reads 224 pixels of an image of 240; its stride is rounded to whole pixels."""
    with torch.device("meta"):
        model = vitrail.create("CrossViT-S")
        assert [(level.grid, level.stride) for level in model.levels] == [((20, 20), (12, 12)), ((14, 14), (17, 17))]
        maps = model.feature_maps(torch.zeros(1, 3, 240, 240))
    assert [each.shape for each in maps] == [(1, 192, 20, 20), (1, 384, 14, 14)]


@torch.no_grad()
def test_only_class_tokens_are_exchanged() -> None:
    model: Any = add_weight_noise(CrossViT(TOY), std=0.2)
    block = model.blocks[0]
    tokens = [torch.randn(2, 17, 16), torch.randn(2, 5, 32)]
    found = block(tokens, [(4, 4), (2, 2)])
    own = [tokens[0], tokens[1]]
    for branch in (0, 1):
        for each in block.blocks[branch]:
            own[branch] = each(own[branch])
        assert torch.equal(found[branch][:, 1:], own[branch][:, 1:])
    for branch, other in ((0, 1), (1, 0)):
        fusion = block.fusion[branch]
        joined = torch.cat([block.projs[branch](own[branch][:, :1]), own[other][:, 1:]], dim=1)
        normed = fusion.norm1(joined)
        q, k, v = (layer(normed) for layer in (fusion.attn.wq, fusion.attn.wk, fusion.attn.wv))
        width = k.shape[-1] // fusion.attn.heads
        heads = [
            (q[:, :1, n : n + width] @ k[..., n : n + width].mT / width**0.5).softmax(-1) @ v[..., n : n + width]
            for n in range(0, k.shape[-1], width)
        ]
        token = joined[:, :1] + fusion.attn.proj(torch.cat(heads, dim=-1))
        torch.testing.assert_close(found[branch][:, :1], block.revert_projs[branch](token))


def test_attention_is_shown_by_branch(tmp_path: Path) -> None:
    """Layers 0 to 3 are on the grid of small patches: a block, the other branch's token, and again."""
    vitrail.save(add_weight_noise(CrossViT(TOY)), tmp_path / "own", preprocessing=Preprocessing(image_size=(48, 48)))
    explainer = vitrail.Explainer(str(tmp_path / "own"))
    assert explainer.default_method == "attention"
    grids = [explainer.explain("example:cat", layer=layer).maps.shape[-2:] for layer in range(len(explainer.layers))]
    assert grids == [(4, 4)] * 4 + [(2, 2)] * 6
    assert explainer.explain("example:cat", "heads").maps.shape[-2:] == (2, 2)


def test_gradients_and_initial_weights() -> None:
    torch.manual_seed(0)
    model: Any = CrossViT(TOY)
    fusion = vitrail.create("CrossViT-S", depth=1).blocks[0].fusion[0]
    assert fusion.attn.wk.weight.std().item() == pytest.approx(0.02, rel=0.02)
    add_weight_noise(model, std=0.1).train()
    model(images()).square().sum().backward()
    idle = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not idle


def test_layer_decay_counts_multi_scale_blocks() -> None:
    levels = {weight.name: weight.level for weight in list_weights(CrossViT(TOY))}
    assert {levels[name] for name in ("cls_token_0", "pos_embed_1", "patch_embed.1.proj.weight")} == {0}
    assert levels["blocks.0.blocks.1.1.norm1.weight"] == levels["blocks.0.fusion.1.norm1.weight"] == 1
    assert levels["blocks.1.projs.0.0.weight"] == 2
    assert levels["head.0.weight"] == levels["norm.1.weight"] == 3


def test_another_size_resamples_both_tables(tmp_path: Path) -> None:
    model = add_weight_noise(CrossViT(TOY))
    write(model, tmp_path / "own")
    loaded = read(tmp_path / "own", image_size=(96, 48), classes=3)
    assert loaded.report.resized == {
        "pos_embed_0": "timm positions, 4×4 to 8×4",
        "pos_embed_1": "timm positions, 2×2 to 4×2",
    }
    assert loaded.report.initialized == ("head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias")
    same = add_weight_noise(CrossViT(replace(TOY, dynamic=True)))
    same.load_state_dict(model.state_dict())
    larger = images(96, 48)
    for ours, theirs in zip(loaded.model.feature_maps(larger), same.feature_maps(larger), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert same(images(50, 41)).shape == (2, 5)  # any size: the image is resized for each branch


def test_probes_read_both_class_tokens() -> None:
    model = add_weight_noise(CrossViT(TOY))
    features = compute_head_inputs(model, ("head",), images())
    assert features.shape == (2, 48)
    with pytest.raises(
        ConfigError, match="`layer` is middle; expected last for it: its two branches have tokens of two"
    ):
        find_block(model, "it", "middle")


def test_what_is_not_possible_is_refused(tmp_path: Path) -> None:
    model = add_weight_noise(CrossViT(TOY))
    with pytest.raises(ConfigError, match=r"no sequence of tokens: its two branches have .*; use `feature_maps`"):
        model.tokens(images())
    with pytest.raises(ConfigError, match="features 'class' of a CrossViT: its two branches have tokens"):
        check_output_available(model, "class")
    with pytest.raises(ConfigError, match="CrossViT has no blocks of tokens to merge"):
        add_token_merging(model, 1)
    vitrail.save(model, tmp_path / "own", preprocessing=Preprocessing(image_size=(48, 48)))
    explainer = vitrail.Explainer(str(tmp_path / "own"))
    with pytest.raises(ConfigError, match=r"'rollout' is undefined .* the grid changes from 4×4 to 2×2"):
        explainer.explain("example:cat", method="rollout")
    with pytest.raises(ConfigError, match="method 'norms' needs a model with blocks and a final norm"):
        explainer.explain("example:cat", method="norms")
    with pytest.raises(ConfigError, match=r"40×48 pixels; expected 48×48"):
        model(images(40, 48))


def test_files_without_heads_or_of_wrong_positions_are_refused(tmp_path: Path) -> None:
    tensors = make_timm_model().state_dict()
    torch.save(tensors, tmp_path / "theirs.pth")
    with pytest.raises(CheckpointError, match=r"does not specify the heads for widths \(16, 32\); expected heads="):
        read(tmp_path / "theirs.pth")
    for rows in (1, 15):
        torch.save({**tensors, "pos_embed_0": torch.zeros(1, rows, 16)}, tmp_path / "theirs.pth")
        with pytest.raises(CheckpointError, match=f"positions of {rows} and 5 tokens; expected two squares and 1 more"):
            read(tmp_path / "theirs.pth", heads=(2, 4))
