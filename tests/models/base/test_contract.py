"""What models declare, measured on the models themselves."""

from typing import Any

import pytest
import torch
from support.family_cases import CASES, SIZE, build_case
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.models import FAMILIES
from vitrail.models.base.contract import ImageModel, Model, check_reads_images
from vitrail.models.catalog.families import load_built_in_families
from vitrail.models.parts.stages import ConvNet


def test_every_family_that_reads_images_is_measured() -> None:
    text = {family.name for family in load_built_in_families() if not issubclass(family.build, ImageModel)}
    assert {name for name, _ in CASES.values()} == set(FAMILIES) - text


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_levels_have_the_declared_grid_width_and_stride(case: str) -> None:
    model = build_case(case)
    larger = model if model.sizes.dynamic else build_case(case, (64, 192))
    maps, larger_maps = model.feature_maps(torch.zeros(1, 3, *SIZE)), larger.feature_maps(torch.zeros(1, 3, 64, 192))
    assert len(maps) == len(larger_maps) == len(model.levels)
    for level, small, large in zip(model.levels, maps, larger_maps, strict=True):
        assert small.shape == (1, level.width, *level.grid)
        rows, columns = (large.shape[axis] - small.shape[axis] for axis in (2, 3))
        assert (32 / rows, 128 / columns) == level.stride
    assert model.grid == model.levels[-1].grid
    if not model.sizes.dynamic and "dynamic" in vars(model.config):
        resized = build_case(case, dynamic=True).feature_maps(torch.zeros(1, 3, 64, 192))
        assert [each.shape for each in resized] == [each.shape for each in larger_maps]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_declared_modules_exist_and_blocks_run_in_their_order(case: str) -> None:
    model, images = build_case(case), torch.randn(1, 3, *SIZE)
    names = [*model.sequence, *(name for level in model.levels for name in level.blocks)]
    called = list[str]()
    modules = {model.get_submodule(name): name for name in names}

    def record(module: nn.Module, *_: object) -> None:
        called.append(modules[module])

    for module in modules:
        module.register_forward_hook(record)
    model(images)
    for ordered in (model.sequence, *(level.blocks for level in model.levels)):
        assert [name for name in called if name in ordered] == list(ordered)
    if model.first_filters:
        assert model.get_parameter(model.first_filters).shape[1] == 3
    parts = [part for _, name in model.classifiers for part in model.get_submodule(name).modules()]
    assert {len(each) for part in parts if isinstance(part, nn.Linear) for each in part.parameters()} == {5}
    assert not build_case(case, classes=0).classifiers
    assert build_case(case, classes=0)(images).shape == (1, model.feature_width)
    if model.no_tokens_reason:
        with pytest.raises(ConfigError, match=f"has no sequence of tokens: {model.no_tokens_reason}"):
            model.tokens(images)
        return
    tokens = model.tokens(images)
    width = model.feature_width if isinstance(model, ConvNet) else model.levels[-1].width
    assert tokens.shape[1:] == (model.prefix + model.grid[0] * model.grid[1], width)
    for queries in (None, model.prefix or None):
        each = model.head_logits(model.encode(images, queries))
        assert len(each) == len(model.classifiers)
        assert {logits.shape for logits in each} == {(1, 5)}
    if isinstance(model, ConvNet):
        last = model.run_end(model.feature_maps(images)[-1])
    elif not model.final_norm or model.normed_maps:
        last = model.feature_maps(images)[-1]
    else:
        norm: Any = model.get_submodule(model.final_norm)
        last = norm(model.feature_maps(images)[-1].movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(last.flatten(2).mT, tokens[:, model.prefix :])


@pytest.mark.parametrize("case", CASES)
def test_the_classifier_reads_the_declared_tokens(case: str) -> None:
    model = build_case(case)
    if model.no_tokens_reason:
        return
    tokens = model.tokens(torch.randn(1, 3, *SIZE)).detach().requires_grad_()
    model.logits(tokens).square().sum().backward()
    assert tokens.grad is not None
    read = {n for n, gradient in enumerate(tokens.grad[0]) if gradient.abs().sum() > 0}
    patches = set(range(model.prefix, tokens.shape[1]))
    assert read == ({model.prefix_tokens.index(name) for name in model.classifier_tokens} or patches)
    if model.attention_pool:
        pool: Any = model.get_submodule(model.attention_pool)
        torch.testing.assert_close(pool.weights(tokens[:, model.prefix :]).sum(-1).mean(), torch.tensor(1.0))


@pytest.mark.parametrize("case", CASES)
def test_hidden_and_dropped_patches_have_no_influence(case: str) -> None:
    model, images = build_case(case), torch.randn(2, 3, *SIZE, requires_grad=True)
    patches = model.grid[0] * model.grid[1]
    hidden = torch.zeros(2, patches, dtype=torch.bool)
    hidden[:, 0] = True
    kept = torch.arange(1, patches).expand(2, -1)
    if model.no_masking_reason:
        if model.final_norm:
            with pytest.raises(ConfigError, match=f"cannot be masked: {model.no_masking_reason}"):
                model.embed(images, hidden, torch.zeros(16))
        return
    x, grid = model.embed(images, hidden, torch.full((16,), 0.5))
    model.run(x, grid).square().sum().backward()
    assert images.grad is not None
    corner = images.grad[:, :, :8, :16]
    assert corner.abs().sum() == 0
    assert (images.grad.abs().sum((0, 1)) > 0).sum() == 32 * 64 - 8 * 16
    if model.no_dropping_reason:
        with pytest.raises(ConfigError, match=f"cannot be dropped: {model.no_dropping_reason}"):
            model.embed(images, kept=kept)
        return
    every, _ = model.embed(images)
    fewer, grid = model.embed(images, kept=kept)
    first = fewer.shape[1] - len(kept[0])  # the class token of a CaiT joins later
    torch.testing.assert_close(fewer, torch.cat([every[:, :first], every[:, first + 1 :]], dim=1))
    assert model.run(fewer, grid).shape == (2, model.prefix + patches - 1, 16)


def test_masks_that_torch_would_broadcast_are_refused() -> None:
    """A mask without its token would be ignored, and a mask of bools would be read as indices."""
    model = vitrail.create("vit_tiny_patch16_224", image_size=32, width=16, depth=1, heads=2)
    images, token = torch.randn(2, 3, 32, 32), torch.zeros(16)
    hidden, kept = torch.zeros(2, 4, dtype=torch.bool), torch.tensor([[0, 1], [2, 3]])
    refused: dict[str, dict[str, Tensor]] = {
        "hidden without mask_token": {"hidden": hidden},
        "mask_token without hidden": {"mask_token": token},
        r"hidden is .*\(1, 4\); expected .*\(2, 4\)": {"hidden": hidden[:1], "mask_token": token},
        "hidden is a tensor of torch.int64": {"hidden": hidden.long(), "mask_token": token},
        r"mask_token has the shape \(1,\); expected \(16,\)": {"hidden": hidden, "mask_token": token[:1]},
        r"kept is .*\(1, 2\); expected .*\(2, ": {"kept": kept[:1]},
        "kept is a tensor of torch.bool": {"kept": hidden},
    }
    for message, wrong in refused.items():
        with pytest.raises(ConfigError, match=message):
            model.embed(images, **wrong)
    with pytest.raises(RuntimeError, match="-1 is out of bounds"):  # not the class token
        model.embed(images, kept=kept - 1)


class Reader(Model):
    reads = "text"

    def forward(self, text: Tensor) -> Tensor:
        return text


def test_a_text_model_is_refused_where_images_are_expected() -> None:
    with pytest.raises(ConfigError, match=r"Reader reads text; expected a model that reads images"):
        check_reads_images(Reader(None))
    check_reads_images(nn.Identity())
    check_reads_images(vitrail.create("resnet20_cifar"))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("forward_features", r"tokens\(images\)"),
        ("reset_classifier", r"vitrail.load\(…, classes=10\)"),
        ("num_features", "feature_width"),
        ("img_size", "config.image_size"),
    ],
)
def test_a_name_of_timm_says_ours(name: str, ours: str) -> None:
    model: Any = build_case("resnet")
    with pytest.raises(AttributeError, match=f"ResNet has no {name}; use {ours}"):
        getattr(model, name)
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match="no attribute 'forward_feature'"):
        _ = model.forward_feature


def test_blocks_are_named_by_levels_where_a_model_has_no_list_of_them() -> None:
    assert len(build_case("vit").blocks) == 2
    with pytest.raises(AttributeError, match="ResNet has no blocks; use levels"):
        _ = build_case("resnet").blocks


def test_heads_is_the_old_name_of_classifiers() -> None:
    model = build_case("vit")
    with pytest.warns(FutureWarning, match="`heads` of a model is now `classifiers`"):
        assert model.heads == model.classifiers == (("class", "head"),)
    with pytest.warns(FutureWarning, match="`heads` of ViT is now `classifiers`"):
        model.heads = (("mean", "head"),)
    assert model.classifiers == (("mean", "head"),)
