"""MAE's files: pre-trained, with and without the decoder, and fine-tuned; timm's models at toy size."""

from pathlib import Path
from typing import Any

import timm
import torch
from support.layout_round_trip import check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise

from vitrail.checkpoint import read

TOY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def toy(**fields: Any) -> Any:
    fields = {**TOY, **fields}
    return add_weight_noise(timm.create_model("vit_base_patch16_224", **fields))


def test_round_trip_of_the_encoder(tmp_path: Path) -> None:
    theirs = toy(num_classes=0)
    torch.save({"model": theirs.state_dict()}, tmp_path / "mae_pretrain.pth")
    checkpoint = check_round_trip(tmp_path / "mae_pretrain.pth", tmp_path / "back.pth", to="mae", heads=4)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
    assert checkpoint.description.resampling == "deit"
    assert checkpoint.description.preprocessing is not None
    assert checkpoint.description.preprocessing.mean[0] == 0.485


def test_the_decoder_is_ignored(tmp_path: Path) -> None:
    theirs = toy(num_classes=0)
    decoder = {"mask_token": torch.zeros(1, 1, 16), "decoder_embed.weight": torch.zeros(16, 32)}
    decoder |= {"decoder_blocks.0.norm1.weight": torch.zeros(16), "decoder_pos_embed": torch.zeros(1, 17, 16)}
    torch.save({"model": {**theirs.state_dict(), **decoder}, "epoch": 1}, tmp_path / "mae_full.pth")
    checkpoint = read(tmp_path / "mae_full.pth", heads=4)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
    assert sorted(checkpoint.report.ignored) == sorted(decoder)


def test_round_trip_of_a_fine_tuned_model(tmp_path: Path) -> None:
    theirs = toy(num_classes=5, global_pool="avg")
    torch.save({"model": theirs.state_dict()}, tmp_path / "mae_finetuned.pth")
    checkpoint = check_round_trip(tmp_path / "mae_finetuned.pth", tmp_path / "back.pth", to="mae", heads=4)
    assert checkpoint.model.config.pool == "mean_norm"
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
