"""torchvision's own VisionTransformer at toy size, in both directions; also with the names of its first files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.layout_round_trip import check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from torchvision.models import VisionTransformer

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write


def toy(**fields: Any) -> Any:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    fields = {**sizes, "num_classes": 5, **fields}
    return add_weight_noise(VisionTransformer(**fields))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("fields", [{}, {"representation_size": 32}], ids=["", "pre_logits"])
def test_round_trip_and_outputs(fields: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    theirs = toy(**fields)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    checkpoint = check_round_trip(tmp_path / "weights.pth", tmp_path / f"back{suffix}", to="torchvision", heads=4)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    theirs.load_state_dict(read_tensors(tmp_path / f"back{suffix}"))


def test_old_names_of_the_mlp_are_read(tmp_path: Path) -> None:
    theirs = toy()
    old = {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."}
    tensors = theirs.state_dict()
    for new, name in old.items():
        tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
    torch.save(tensors, tmp_path / "weights.pth")
    assert max_output_difference(read(tmp_path / "weights.pth", heads=4).model, theirs) <= 1e-5


def test_preprocessing_and_policy_of_the_layout(tmp_path: Path) -> None:
    torch.save(toy().state_dict(), tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth", heads=4, image_size=64)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (
        preprocessing.fit,
        preprocessing.crop,
        preprocessing.interpolation,
        preprocessing.mean[0],
        preprocessing.image_size,
    ) == (
        "short_side",
        0.875,
        "bilinear",
        0.485,
        (64, 64),
    )
    assert "torchvision positions" in checkpoint.report.resized["pos_embed"]
    assert checkpoint.model.config.activation == "gelu"


def test_a_representation_of_another_width_is_refused(tmp_path: Path) -> None:
    torch.save(toy(representation_size=24).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"pre_logits\.weight"):
        read(tmp_path / "weights.pth", heads=4)


def test_writing_another_activation_warns_with_the_output_difference(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"image_size": 32, "width": 32, "heads": 2, "depth": 2, "classes": 5}
    tanh = add_weight_noise(vitrail.create("ViT-Ti/16", **fields, activation="gelu_tanh"), 0.3)
    with pytest.warns(UserWarning, match=r"cannot store activation='gelu_tanh', .* differ by up to .*e-0[2-7]"):
        write(tanh, tmp_path / "weights.pth", "torchvision")
    exact = read(tmp_path / "weights.pth", heads=2).model
    assert exact.config.activation == "gelu"
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (exact(images) - tanh(images)).abs().max().item()
    with pytest.warns(UserWarning, match=f"up to {difference:.1e}"):
        write(tanh, tmp_path / "weights.pth", "torchvision")
    with pytest.warns(UserWarning, match=r"google cannot store activation='gelu'"):
        write(exact, tmp_path / "weights.npz", "google")


def test_writing_another_norm_eps_gives_a_warning(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"image_size": 32, "width": 32, "heads": 2, "depth": 2, "classes": 5}
    with pytest.warns(UserWarning, match=r"torchvision cannot store norm_eps=0\.01, and its readers use 1e-06"):
        write(
            add_weight_noise(vitrail.create("ViT-Ti/16", **fields, norm_eps=0.01)),
            tmp_path / "weights.pth",
            "torchvision",
        )
