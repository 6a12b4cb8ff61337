"""CCT: published counts, outputs equal to vit-pytorch, and the variant for CPUs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn
from vit_pytorch.cct import CCT as Peer  # noqa: N811

from vitrail.base.errors import ConfigError
from vitrail.checkpoint import load, write
from vitrail.layers.attention import merge_heads
from vitrail.models.cct import CCT, NEIGHBOR_OFFSETS, CCTConfig, LocalAttention

TOY = CCTConfig(image_size=(16, 8), stem=(64,), width=16, depth=2, heads=2, classes=5)
VARIANT = replace(TOY, stem=(4, 8), pools=2, batch_norm=True, published=False, neighbors=True, heads=8)


def from_peer(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Map the names of vit-pytorch, which are those of the authors, to ours."""
    names = {
        "classifier.positional_emb": "pos_embed",
        "classifier.attention_pool": "attn_pool",
        "classifier.fc": "head",
        "classifier.": "",
        "self_attn": "attn",
        "norm1": "norm2",
        "pre_norm": "norm1",
        "linear1": "mlp.fc1",
        "linear2": "mlp.fc2",
        "tokenizer.conv_layers.0.0": "patch_embed.layers.0",
        "tokenizer.conv_layers.1.0": "patch_embed.layers.3",
    }
    ours: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, our in names.items():
            name = name.replace(theirs, our)
        ours[name] = tensor
    return ours


@pytest.mark.parametrize(
    ("kernel", "stride", "stem", "size"), [(3, 1, (), (8, 12)), (3, 1, (64,), (16, 8)), (7, 2, (64,), (32, 32))]
)
@pytest.mark.parametrize("positions", ["learnable", "sine"])
def test_output_equals_vit_pytorch(
    kernel: int, stride: int, stem: tuple[int, ...], size: tuple[int, int], positions: str
) -> None:
    peer: nn.Module = add_weight_noise(
        Peer(
            img_size=size,  # pyright: ignore[reportArgumentType]
            embedding_dim=16,
            n_conv_layers=len(stem) + 1,
            kernel_size=kernel,
            stride=stride,
            padding=kernel // 2,
            num_layers=2,
            num_heads=2,
            mlp_ratio=2,
            num_classes=5,
            positional_embedding=positions,
        )
    )
    config = replace(TOY, image_size=size, stem=stem, kernel=kernel, stride=stride)
    model = CCT(replace(config, learned_positions=positions == "learnable")).eval()
    drawn = model.pos_embed.clone()
    model.load_state_dict(from_peer(peer.state_dict()))
    assert (
        positions == "learnable" or (model.pos_embed - drawn).abs().max() < 0.5
    )  # the same sinusoids, before the noise
    images = torch.randn(3, 3, *size)
    torch.testing.assert_close(model(images), peer(images), rtol=1e-4, atol=1e-5)


def test_shapes() -> None:
    images = torch.randn(2, 3, 16, 8)
    model = CCT(TOY).eval()
    assert model.grid == (4, 2)
    assert model.tokens(images).shape == (2, 8, 16)
    assert CCT(replace(TOY, classes=0))(images).shape == (2, 16)
    assert CCT(VARIANT).grid == (4, 2)
    assert CCT(replace(VARIANT, pools=3)).grid == (2, 1)
    kinds = [type(layer).__name__ for layer in CCT(replace(VARIANT, pools=(1, 3))).patch_embed.layers]
    assert [kind for kind in kinds if kind.endswith("2d")] == [
        *("Conv2d", "BatchNorm2d", "MaxPool2d"),
        *("Conv2d", "BatchNorm2d"),
        *("Conv2d", "BatchNorm2d", "MaxPool2d"),
    ]
    add_weight_noise(model)
    torch.testing.assert_close(model(images), model.logits(model.tokens(images)))


def test_heads_attend_to_neighbors_initially() -> None:
    model = CCT(replace(VARIANT, image_size=32, depth=1)).eval()
    attention = model.blocks[0].attn
    assert isinstance(attention, LocalAttention)
    nn.init.zeros_(attention.qkv.weight)
    weights = attention.weights(torch.randn(1, 64, 16), (8, 8))[0]  # (H, n, n)
    torch.testing.assert_close(weights.sum(-1), torch.ones(8, 64))
    for head, (row, column) in enumerate(NEIGHBOR_OFFSETS):
        assert weights[head, 3 * 8 + 4].argmax() == (3 + row) * 8 + 4 + column
    x = torch.randn(2, 64, 16)
    _, _, v, _ = attention.project(x, (8, 8))
    torch.testing.assert_close(attention(x, (8, 8)), attention.proj(merge_heads(attention.weights(x, (8, 8)) @ v)))
    larger = attention.weights(torch.randn(1, 100, 16), (10, 10))[0]
    assert larger[0, 34].argmax() == 35  # an offset has the same bias on any grid


def test_whitened_filters_have_equal_variance() -> None:
    torch.manual_seed(0)
    images = torch.randn(64, 3, 16, 8).cumsum(-1)  # neighboring pixels are similar, as in a photo
    tokenizer = CCT(replace(VARIANT, stem=(48, 8))).patch_embed
    tokenizer.whiten(images.chunk(3))
    answers = tokenizer.layers[0](images)[:, :24, 1:-1, 1:-1].transpose(0, 1).flatten(1)  # (24, m) inside the border
    torch.testing.assert_close(answers @ answers.T / answers.shape[1], torch.eye(24), rtol=0, atol=0.01)
    weight = tokenizer.layers[0].get_parameter("weight")
    torch.testing.assert_close(weight[24:], -weight[:24])
    wide = CCT(replace(VARIANT, stem=(64, 8))).patch_embed
    wide.whiten([images])  # only 27 components of 3×3×3: the other filters stay unchanged
    assert wide.layers[0].get_parameter("weight")[54:].std() > 0.1


@pytest.mark.parametrize("config", [TOY, VARIANT], ids=["published", "variant"])
def test_dynamic_size(config: CCTConfig) -> None:
    model = add_weight_noise(CCT(replace(config, dynamic=True)))
    assert model.tokens(torch.randn(2, 3, 12, 24)).shape == (2, 18, 16)
    with pytest.raises(ConfigError, match=r"12×10 pixels; expected a multiple of 4×4"):
        model(torch.randn(1, 3, 12, 10))


def test_our_layout_keeps_it(tmp_path: Path) -> None:
    model = add_weight_noise(CCT(VARIANT))
    write(model, tmp_path / "ours")
    back = load(tmp_path / "ours")
    images = torch.randn(2, 3, 16, 8)
    assert torch.equal(back(images), model.eval()(images))
