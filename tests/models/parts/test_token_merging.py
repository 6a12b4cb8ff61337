"""Token merging equals loops written from the paper, changes nothing where it must not, and refuses other models."""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import preprocess_image
from vitrail.models.cct import CCT, CCTConfig
from vitrail.models.deit import DeiT, DeiTConfig
from vitrail.models.hybrid import Hybrid, HybridConfig
from vitrail.models.parts.token_merging import (
    MergingBlocks,
    add_token_merging,
    indices_after_merge,
    match_patches,
    merge_matched_patches,
)
from vitrail.models.resnet import ResNet, ResNetConfig
from vitrail.models.vit import ViT, ViTConfig

TOY = ViTConfig(image_size=(16, 20), patch_size=4, width=16, depth=3, heads=2, classes=5)  # 4×5 patches
DEIT = DeiTConfig(image_size=(16, 20), patch_size=4, width=16, depth=3, heads=2, classes=5)
CCT_TOY = CCTConfig(image_size=(16, 20), stem=(8,), width=16, depth=3, heads=2, classes=5, published=False)
HYBRID = HybridConfig(image_size=(16, 20), stages=(), width=16, depth=3, heads=2, classes=5)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "class": lambda: ViT(TOY),
    "one block": lambda: ViT(replace(TOY, depth=1)),
    "registers": lambda: ViT(replace(TOY, registers=2, prefix_positions=False)),
    "swiglu and layer scale": lambda: ViT(replace(TOY, activation="swiglu", mlp_width=24, layer_scale=0.5)),
    "sincos, no qkv bias, mlp head": lambda: ViT(replace(TOY, positions="sincos_2d", qkv_bias=False, head="mlp")),
    "odd number of patches": lambda: ViT(replace(TOY, image_size=(12, 20))),
    "mean": lambda: ViT(replace(TOY, pool="mean", class_token=False)),
    "mean_norm": lambda: ViT(replace(TOY, pool="mean_norm")),
    "map": lambda: ViT(replace(TOY, pool="map", class_token=False, image_size=(12, 20))),
    "DeiT": lambda: DeiT(DEIT),
    "DeiT, distilled": lambda: DeiT(replace(DEIT, distilled=True)),
    "DeiT-III": lambda: DeiT(replace(DEIT, layer_scale=0.1, prefix_positions=False)),
    "hybrid": lambda: Hybrid(HYBRID),
    "cct": lambda: CCT(CCT_TOY),
}


def toy(kind: str) -> Any:
    return add_weight_noise(KINDS[kind](), std=0.2).double()


def images(model: Any, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *model.config.image_size, dtype=next(model.parameters()).dtype)


def stem(model: Any, batch: Tensor) -> Tensor:
    """The tokens at the input of the first block."""
    collected = list[Tensor]()

    def enter(_: nn.Module, given: tuple[Any, ...]) -> None:
        collected.append(given[0])

    with model.blocks[0].register_forward_pre_hook(enter):
        model.tokens(batch)
    return collected[0]


class Token(NamedTuple):
    row: Tensor
    size: int
    places: list[int]


def total(rows: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(rows)).sum(0)


def by_hand(model: Any, tokens: Tensor, per_layer: int) -> Tensor:
    """The paper's algorithm with loops for one image: (N, D) → (N, D)."""
    held = [Token(row, 1, [place]) for place, row in enumerate(tokens)]
    for block in model.blocks:
        heads, vectors = block.attn.heads, torch.stack([token.row for token in held])
        queries, keys, values = block.attn.qkv(block.norm1(vectors)).chunk(3, dim=-1)
        width = queries.shape[-1] // heads
        after = list[Tensor]()
        for query in queries:
            parts = list[Tensor]()
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                scores = [(query[part] @ key[part]).item() / math.sqrt(width) for key in keys]
                shares = [token.size * math.exp(score) for score, token in zip(scores, held, strict=True)]
                parts.append(total(s * v[part] for s, v in zip(shares, values, strict=True)) / sum(shares))
            after.append(block.attn.proj(torch.cat(parts)))
        held = [each._replace(row=each.row + block.ls1(new)) for each, new in zip(held, after, strict=True)]

        metric = [total(key.split(width)) / heads for key in keys]
        even = [i for i in range(len(held)) if i % 2 == 0 and i >= model.prefix]
        odd = [i for i in range(len(held)) if i % 2 == 1 and i >= model.prefix]
        edges = list[tuple[float, int, int]]()
        for i in even if odd else ():
            alike = {j: (metric[i] @ metric[j] / metric[i].norm() / metric[j].norm()).item() for j in odd}
            best = max(alike, key=alike.__getitem__)
            edges.append((alike[best], i, best))
        edges = sorted(edges, reverse=True)[: min(per_layer, (len(held) - model.prefix) // 2)]
        for j in odd:
            group = [held[j]] + [held[i] for _, i, into in edges if into == j]
            size = sum(each.size for each in group)
            mean = total(each.row * each.size for each in group) / size
            held[j] = Token(mean, size, [place for each in group for place in each.places])
        gone = {i for _, i, _ in edges}
        held = [held[i] for i in (*range(model.prefix), *(i for i in even if i not in gone), *odd)]
        held = [each._replace(row=each.row + block.ls2(block.mlp(block.norm2(each.row)))) for each in held]
    out = torch.empty_like(tokens)
    for each in held:
        assert each.size == len(each.places)
        out[each.places] = each.row
    return out


@torch.no_grad()
@pytest.mark.parametrize("per_layer", [3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_equal_loops_written_from_the_paper(kind: str, per_layer: int) -> None:
    model = toy(kind)
    batch = images(model)
    fewer: Any = add_token_merging(model, per_layer)
    expected = model.norm(torch.stack([by_hand(model, tokens, per_layer) for tokens in stem(model, batch)]))
    torch.testing.assert_close(fewer.tokens(batch), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fewer(batch), model.logits(expected), rtol=1e-9, atol=1e-9)
    if kind != "one block":  # with one block, attention comes before any merge
        assert (fewer(batch) - model(batch)).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_zero_merges_return_the_model_and_merging_does_not_change_it(kind: str) -> None:
    model = toy(kind)
    batch, names = images(model), list(model.state_dict())
    before = model(batch)
    assert add_token_merging(model, 0) is model
    fewer = add_token_merging(model, 3).train()
    assert not any(module.training for module in model.modules())
    assert list(model.state_dict()) == names
    assert torch.equal(model(batch), before)
    assert {id(each) for each in fewer.parameters()} == {id(each) for each in model.parameters()}
    assert {id(each) for each in fewer.buffers()} == {id(each) for each in model.buffers()}


def repeated(image: Tensor, kinds: Tensor, patch: int) -> Tensor:
    """An image whose patches are those of `image` in the order of `kinds`, (rows, columns)."""
    cut = image.unfold(2, patch, patch).unfold(3, patch, patch).flatten(2, 3)  # (B, C, n, P, P)
    rows, columns = kinds.shape
    chosen = cut[:, :, kinds.flatten()].unflatten(2, (rows, columns))
    return chosen.permute(0, 1, 2, 4, 3, 5).flatten(2, 3).flatten(3, 4)


@torch.no_grad()
@pytest.mark.parametrize("pool", ["class", "mean", "mean_norm", "map"])
def test_merging_equal_patches_changes_nothing(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = add_weight_noise(ViT(replace(TOY, positions="none", pool=pool)), std=0.2)  # float32
    kinds = torch.tensor([[0, 0, 1, 1, 0], [0, 2, 2, 2, 0], [1, 1, 2, 0, 0], [0, 0, 0, 0, 0]])
    alike = repeated(images(model), kinds, 4)
    fewer: Any = add_token_merging(model, 3)
    torch.testing.assert_close(fewer.tokens(alike), model.tokens(alike), rtol=0, atol=1e-5)
    torch.testing.assert_close(fewer(alike), model(alike), rtol=0, atol=1e-5)
    assert (fewer(images(model)) - model(images(model))).abs().max() > 1e-3

    def ignored(sizes: Tensor) -> Tensor:
        return torch.zeros_like(sizes)

    monkeypatch.setattr(Tensor, "log", ignored)  # ignore the sizes of tokens
    assert (fewer(alike) - model(alike)).abs().max() > 1e-4


def test_most_similar_pairs_are_merged_and_weighted_by_size() -> None:
    angles = torch.tensor([0.0, 10, 90, 91, 12, 200, 205]) * math.pi / 180  # class token, 6 patches; odd: 1, 3, 5
    keys = (
        torch.stack([angles.cos(), angles.sin()], -1)[None] * torch.arange(1, 8)[:, None]
    )  # only the direction matters
    order, into = match_patches(keys, prefix=1)
    assert order.tolist() == [[0, 1, 2]]  # 2 and 3 differ by 1 degree, 4 and 1 by 2, 6 and 5 by 5
    assert into.tolist() == [[1, 0, 2]]
    x = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6]])[..., None]
    sizes = torch.tensor([[1.0, 1, 3, 1, 1, 2, 2]])[..., None]
    y, grown = merge_matched_patches(x, sizes, order, into, 2, prefix=1)
    assert y[..., 0].tolist() == [[9, 6, 2.5, 2.25, 5]]  # class; the remaining even one; 1 with 4, 3 with three of 2, 5
    assert grown[..., 0].tolist() == [[1, 2, 2, 4, 2]]
    assert indices_after_merge(order, into, 2, prefix=1, patches=6).tolist() == [[1, 2, 2, 1, 3, 0]]


@torch.no_grad()
@pytest.mark.parametrize(("per_layer", "expected"), [(4, [22, 18, 14, 10]), (10, [22, 12, 7, 5]), (9, [22, 13, 8, 5])])
def test_each_layer_removes_the_given_number_up_to_half(per_layer: int, expected: list[int]) -> None:
    fewer: Any = add_token_merging(DeiT(replace(DEIT, depth=4, distilled=True)), per_layer)
    collected = list[int]()

    def leave(_: nn.Module, __: tuple[Any, ...], made: Tensor) -> None:
        collected.append(made.shape[1])

    for block in fewer.blocks[0].blocks:
        block.norm1.register_forward_hook(leave)
    fewer(torch.randn(1, 3, 16, 20))
    assert collected == expected


@torch.no_grad()
def test_at_least_one_patch_is_left() -> None:
    fewer: Any = add_token_merging(add_weight_noise(ViT(replace(TOY, depth=9))), 10)
    tokens = fewer.tokens(torch.randn(2, 3, 16, 20))
    assert (tokens[:, 1:] - tokens[:, 1:2]).abs().max() == 0
    assert tokens.isfinite().all()


@torch.no_grad()
def test_threads_can_share_it_and_images_are_independent() -> None:
    model = toy("class")
    fewer = add_token_merging(model, 5)
    batches = [images(model, 1 + number % 3) for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(torch.no_grad()(fewer), batches))
    for batch, answer in zip(batches, answers, strict=True):
        torch.testing.assert_close(answer, torch.cat([fewer(image[None]) for image in batch]))


@torch.no_grad()
def test_dynamic_image_sizes() -> None:
    model = add_weight_noise(ViT(replace(TOY, dynamic=True)), std=0.2).double()
    batch = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    expected = model.norm(torch.stack([by_hand(model, tokens, 4) for tokens in stem(model, batch)]))
    torch.testing.assert_close(add_token_merging(model, 4)(batch), model.logits(expected))


def test_gradients_flow_through_merged_tokens() -> None:
    model = add_weight_noise(ViT(replace(TOY, dropout=0.1, attention_dropout=0.1, stochastic_depth=0.1)))
    add_token_merging(model, 3).train()(images(model)).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("given", [-1, True, 1.0, "2", None])
def test_invalid_counts_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"merge is {given!r}; expected the number of patches"):
        add_token_merging(toy("class"), given)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ViT(replace(TOY, positions="relative", pool="mean")), "positions 'relative' need the position"),
        (lambda: ViT(replace(TOY, width=16, positions="rotary")), "positions 'rotary' need the position"),
        (lambda: ViT(replace(TOY, positions_at="layers")), "positions_at 'layers' adds a position in every layer"),
        (lambda: ViT(replace(TOY, positions_at="shared")), "positions_at 'shared' adds a position in every layer"),
        (lambda: CCT(replace(CCT_TOY, published=True)), "CCT has its own kind of blocks"),
        (lambda: CCT(replace(CCT_TOY, neighbors=True)), "CCT has its own kind of blocks"),
        (lambda: ResNet(ResNetConfig(image_size=32, stages=(1, 1), width=8)), "ResNet has no blocks of tokens"),
        (lambda: nn.Linear(2, 2), "Linear has no blocks of tokens"),
        (
            lambda: add_token_merging(ViT(TOY), 2),
            "this ViT merges tokens already; expected the model it was made from",
        ),
        (lambda: ViT(replace(TOY, image_size=(8, 4))), "merge is 2 of the 2 patches of an image; expected at most 1"),
    ],
)
def test_unsupported_models_are_refused(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        add_token_merging(build(), 2)


def test_merging_model_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        vitrail.save(add_token_merging(ViT(TOY), 2), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_torch_export_with_any_batch() -> None:
    model = add_weight_noise(ViT(TOY), std=0.2)
    fewer = add_token_merging(model, 3).eval()
    assert isinstance(fewer.get_submodule("blocks.0"), MergingBlocks)
    program = torch.export.export(fewer, (images(model),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    for batch in (images(model, 1), images(model, 5)):
        torch.testing.assert_close(program.module()(batch), fewer(batch))


ONNX = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))), reason="needs the extra export"
)


@ONNX
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # from torch's exporter
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_onnx_runtime_gives_the_same_output(pool: Any, opset: int, tmp_path: Path) -> None:
    import onnxruntime

    model = add_weight_noise(ViT(replace(TOY, pool=pool)), std=0.2)
    fewer, path = add_token_merging(model, 3).eval(), tmp_path / "model.onnx"
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    torch.onnx.export(
        fewer, (images(model),), path, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (images(model, 1), images(model, 5)):
        answer = session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(answer), fewer(batch).detach(), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights", ["vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", "deit_tiny_patch16_224.pth"]
)
def test_public_weights_predict_the_same_with_a_quarter_less_work(weights: str, shared: Callable[[str], Path]) -> None:
    photos = sorted(shared("imagenet-val-1000").rglob("*.JPEG"))[::10]
    checkpoint = read(shared(f"weights/{weights}"))
    assert checkpoint.description.preprocessing is not None
    preprocessing = replace(checkpoint.description.preprocessing, crop=0.875)  # 224 of the stored 256 pixels
    batch = torch.stack([torch.from_numpy(preprocess_image(open_image(photo), preprocessing)) for photo in photos])
    with torch.inference_mode():
        whole, fewer = (
            torch.cat([model(part) for part in batch.split(10)]).argmax(-1)
            for model in (checkpoint.model.eval(), add_token_merging(checkpoint.model, 8).eval())
        )
    assert len(photos) == 100
    assert (whole == fewer).double().mean() >= 0.88
