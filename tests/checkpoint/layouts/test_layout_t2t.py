"""yitu's T2T-ViT: a copy of its modules, its files in both directions, and both of its attention scales."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layout_round_trip import assert_same_tensors, max_output_difference, write_checkpoint
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.config_from_shapes import infer_config
from vitrail.checkpoint.layouts.state_dicts import SCALE_WARNING
from vitrail.models.catalog.families import find_preset

TOY: dict[str, Any] = {"image_size": 32, "stage_width": 6, "width": 16, "depth": 2, "classes": 5, "mlp_width": 32}


class Performer(nn.Module):
    """A stage with the names and the order k, q, v of the published code."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.kqv, self.proj = nn.Linear(inside, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(inside), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Dropout(0.1))
        self.w = nn.Parameter(torch.randn(width // 2, width), requires_grad=False)

    def features(self, x: Tensor) -> Tensor:
        return ((x @ self.w.T) - (x * x).sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(self.w))

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm1(x)).chunk(3, -1)
        shares = self.features(q) @ self.features(k).mT
        x = v + self.proj(shares @ v / (shares.sum(-1, keepdim=True) + 1e-8))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, inside: int, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(inside, 3 * width, bias=False), nn.Linear(width, width)
        self.heads, self.scale, self.changes = heads, scale, inside != width

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.proj(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return v[:, 0] + mixed if self.changes else mixed


class Layer(nn.Module):
    """A token transformer, or a block of the backbone."""

    def __init__(self, inside: int, width: int, hidden: int, heads: int, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(inside), nn.LayerNorm(width)
        self.attn = Attention(inside, width, heads, scale)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attn(self.norm1(x))
        x = mixed if self.attn.changes else x + mixed
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))


class Splits(nn.Module):
    def __init__(self, stage: str, width: int) -> None:
        super().__init__()
        widths = (147, 54)
        if stage == "performer":
            self.attention1, self.attention2 = (Performer(each, 6) for each in widths)
        else:
            self.attention1, self.attention2 = (Layer(each, 6, 6, 1, each**-0.5) for each in widths)
        self.project = nn.Linear(54, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention1(nn.functional.unfold(x, 7, padding=2, stride=4).mT)
        for after in (self.attention2, self.project):
            side = math.isqrt(x.shape[1])
            x = after(nn.functional.unfold(x.mT.unflatten(2, (side, side)), 3, padding=1, stride=2).mT)
        return x


class Published(nn.Module):
    def __init__(
        self, stage: str, *, by_width: bool = False, heads: int = 2, width: int = 16, hidden: int = 32
    ) -> None:
        super().__init__()
        scale = width**-0.5 if by_width else (width // heads) ** -0.5
        self.tokens_to_token = Splits(stage, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width), requires_grad=False)
        self.blocks = nn.ModuleList(Layer(width, width, hidden, heads, scale) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens_to_token(x)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def make_published(stage: str, **fields: Any) -> Published:
    torch.manual_seed(0)
    return add_weight_noise(Published(stage, **fields), std=0.2)


def save_published(model: nn.Module, path: Path, wrapper: str = "state_dict_ema", prefix: str = "") -> Path:
    torch.save({wrapper: {f"{prefix}{name}": each for name, each in model.state_dict().items()}, "epoch": 3}, path)
    return path


@pytest.mark.parametrize(("wrapper", "prefix"), [("state_dict_ema", ""), ("state_dict", "module.")])
@pytest.mark.parametrize("stage", ["performer", "transformer"])
def test_round_trip_and_outputs(stage: str, wrapper: str, prefix: str, tmp_path: Path) -> None:
    theirs = make_published(stage)
    checkpoint = read(save_published(theirs, tmp_path / "model.pth.tar", wrapper, prefix), heads=2)
    assert (checkpoint.layout, checkpoint.description.family, checkpoint.model.config.stage) == ("t2t", "t2t", stage)
    assert checkpoint.report.warnings == (SCALE_WARNING,)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    write_checkpoint(checkpoint, tmp_path / "own", "vitrail")
    write_checkpoint(read(tmp_path / "own"), tmp_path / "back.pth", "t2t")
    assert_same_tensors(torch.load(tmp_path / "back.pth", weights_only=True)["state_dict_ema"], theirs.state_dict())


@pytest.mark.parametrize("heads", [2, 4])
def test_scale_by_model_width_must_be_named(heads: int, tmp_path: Path) -> None:
    theirs = make_published("performer", by_width=True, heads=heads)
    path = save_published(theirs, tmp_path / "model.pth")
    checkpoint = read(path, source="t2t_by_width", heads=heads)
    assert checkpoint.layout == checkpoint.description.provenance["source"]["layout"] == "t2t_by_width"
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    assert max_output_difference(read(path, heads=heads).model, theirs) > 0.01  # the file does not tell
    write_checkpoint(checkpoint, tmp_path / "back.pth", "t2t_by_width")
    back = torch.load(tmp_path / "back.pth", weights_only=True)["state_dict_ema"]
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(back[name], tensor, rtol=3e-7, atol=0)  # a square root of 2 is rounded twice


def test_averaged_weights_are_preferred(tmp_path: Path) -> None:
    one, other = make_published("performer").state_dict(), add_weight_noise(Published("performer")).state_dict()
    torch.save({"state_dict": other, "state_dict_ema": one}, tmp_path / "both.pth")
    checkpoint = read(tmp_path / "both.pth", heads=2)
    assert torch.equal(checkpoint.model.cls_token, one["cls_token"])
    assert checkpoint.report.warnings == (
        SCALE_WARNING,
        "its weights are read from 'state_dict_ema'; the file also has state_dict",
    )


def test_preprocessing_and_policy_of_the_layout(tmp_path: Path) -> None:
    checkpoint = read(save_published(make_published("performer"), tmp_path / "model.pth"), heads=2)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.image_size, preprocessing.crop, preprocessing.interpolation, preprocessing.mean[0]) == (
        (32, 32),
        0.9,
        "bicubic",
        0.485,
    )
    assert checkpoint.description.resampling == "deit"
    assert not checkpoint.model.pos_embed.requires_grad


def test_another_size_and_other_classes(tmp_path: Path) -> None:
    path = save_published(make_published("performer"), tmp_path / "model.pth")
    checkpoint = read(path, heads=2, image_size=(48, 64), classes=3)
    assert checkpoint.report.resized == {"pos_embed": "deit positions, 2×2 to 3×4"}
    assert checkpoint.report.initialized == ("head.weight", "head.bias")
    assert not checkpoint.model(torch.randn(1, 3, 48, 64)).any()
    with pytest.raises(ConfigError, match="expected a multiple of 16×16"):
        read(path, heads=2, image_size=40)


@pytest.mark.parametrize("name", vitrail.list_models("t2t_*"))
def test_presets_are_inferred_from_their_shapes(name: str) -> None:
    family, preset = find_preset(name)
    with torch.device("meta"):
        tensors = vitrail.create(name).state_dict()
    assert family.configure(**infer_config(tensors, family, {}).config) == preset


def test_heads_are_known_only_for_published_shapes(tmp_path: Path) -> None:
    wide = make_published("performer", width=64, heads=1)
    checkpoint = read(save_published(wide, tmp_path / "wide.pth"))
    assert checkpoint.report.warnings == (SCALE_WARNING,)
    assert checkpoint.report.assumed == {"heads": 1}
    assert max_output_difference(checkpoint.model, wide) <= 1e-5
    known = make_published("performer", width=256, heads=4, hidden=512)
    checkpoint = read(save_published(known, tmp_path / "known.pth"))
    assert (checkpoint.model.config.heads, checkpoint.report.warnings) == (4, (SCALE_WARNING,))
    with pytest.raises(CheckpointError, match=r"number of heads for width 16; expected heads=…"):
        read(save_published(make_published("performer"), tmp_path / "model.pth"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_to_token.attention2.w": None}, r"1 missing \(tokens_to_token\.attention2\.w\) of \d+ tensors"),
        ({"tokens_to_token.attention1.kqv.weight": torch.ones(18)}, r"expected 2 dimensions"),
        ({"tokens_to_token.attention1.w": None}, r"\d tensors that are not part of a t2t"),
        ({"blocks.0.attn.qkv.bias": torch.ones(48)}, r"1 tensors that are not part of a t2t"),
        ({"blocks.0.mlp.fc1.weight": None}, r"blocks\.0\.mlp\.fc1\.weight is missing"),
        ({"pos_embed": torch.ones(1, 7, 16)}, r"pos_embed has 7 rows, 1 of them for prefix tokens"),
        ({"cls_token": None}, r"1 missing \(cls_token\)"),
    ],
)
@pytest.mark.parametrize("source", ["t2t", "t2t_by_width"])
def test_wrong_tensors_are_refused_in_one_line(
    source: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = {
        name: each for name, each in {**make_published("performer").state_dict(), **change}.items() if each is not None
    }
    torch.save({"state_dict": tensors}, tmp_path / "bad.pth")
    with pytest.raises(CheckpointError, match=message) as error:
        read(tmp_path / "bad.pth", source=source, heads=2)
    assert "\n" not in str(error.value)


def test_lost_fields_give_a_warning_and_other_families_are_refused(tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("t2t_vit_7", **TOY, heads=2, norm_eps=0.1))
    with pytest.warns(UserWarning, match=r"t2t cannot store norm_eps=0\.1, and its readers use 1e-05"):
        write(model, tmp_path / "model.safetensors", "t2t")
    checkpoint = read(tmp_path / "model.safetensors", heads=2, norm_eps=0.1)
    assert checkpoint.layout == "t2t"
    assert checkpoint.model.config == replace(model.config, norm_eps=0.1)
    with pytest.raises(CheckpointError, match="t2t cannot represent a model of the family 'vit'"):
        write(vitrail.create("ViT-Ti/16", depth=1), tmp_path / "vit.pth", "t2t")
    assert not (tmp_path / "vit.pth").exists()
