"""Adaptive token sampling: the authors' logits, loops written from the paper, batches that change nothing, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.models.cct import CCT, CCTConfig
from vitrail.models.deit import DeiT, DeiTConfig
from vitrail.models.parts.token_sampling import add_token_sampling, find_kept_patches, sample_patches
from vitrail.models.resnet import ResNet, ResNetConfig
from vitrail.models.vit import ViT, ViTConfig

TOY = ViTConfig(image_size=(24, 32), patch_size=4, width=16, depth=4, heads=2, classes=5)  # 6×8 patches
DEIT = DeiTConfig(image_size=(24, 32), patch_size=4, width=16, depth=4, heads=2, classes=5, distilled=True)


def toy(**fields: Any) -> ViT:
    return add_weight_noise(ViT(replace(TOY, **fields)), std=0.3)


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 24, 32)


@torch.no_grad()
def test_logits_are_those_of_the_authors_in_a_batch_too(shared: Callable[[str], Path]) -> None:
    """vit-pytorch samples at random, in eval mode too."""
    reference = read_reference(shared, "ats_one_by_one")
    theirs = reference.config
    config = ViTConfig(image_size=64, patch_size=8, width=48, depth=theirs["DEPTH"], heads=3, classes=7)
    model = ViT(config).eval()
    model.load_state_dict(reference.tensors)
    sampling = add_token_sampling(model, first=theirs["ATS_BLOCKS"][0])
    assert (sampling(reference.images) - reference.logits).abs().max() <= 2e-5
    assert (model(reference.images) - reference.logits).abs().max() > 1e-2
    assert torch.equal(sampling(reference.images), sampling(reference.images))


def sample_by_hand(scores: list[float], samples: int) -> set[int]:
    order = sorted(range(len(scores)), key=scores.__getitem__)
    total, cumulative = 0.0, list[float]()
    for patch in order:
        total += scores[patch] / sum(scores)
        cumulative.append(total)
    cumulative = [(each - cumulative[0]) / (cumulative[-1] - cumulative[0]) for each in cumulative]
    kept = set[int]()
    for number in range(samples):
        value = cumulative[1] + (1 - cumulative[1]) * number / (samples - 1)
        kept.add(order[min(range(len(order)), key=lambda place: abs(value - cumulative[place]))])
    return kept


@pytest.mark.parametrize("samples", [2, 4, 12])
def test_samples_equal_loops_written_from_the_paper(samples: int) -> None:
    torch.manual_seed(0)
    scores = torch.rand(6, 12, dtype=torch.float64) ** 4
    real = torch.ones(6, 12, dtype=torch.bool)
    real[3:, 8:] = False  # padding, whose scores do not count
    kept = sample_patches(scores, real, samples)
    for row, mine in enumerate(kept):
        count = 12 if row < 3 else 8
        assert set(mine.nonzero()[:, 0].tolist()) == sample_by_hand(scores[row, :count].tolist(), samples)


def test_concentrated_scores_keep_few_patches() -> None:
    scores = torch.tensor([[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 9.0]])
    kept = sample_patches(scores, torch.ones(2, 6, dtype=torch.bool), 6)
    assert kept.sum(1).tolist() == [5, 3]
    assert kept[1, 5]
    for patches in (1, 2):
        assert sample_patches(torch.rand(1, patches), torch.ones(1, patches, dtype=torch.bool), 4).sum() == 1


@pytest.mark.parametrize("build", [lambda: toy(registers=2), lambda: add_weight_noise(DeiT(DEIT), std=0.3)])
@torch.no_grad()
def test_other_images_in_the_batch_change_nothing(build: Callable[[], Any]) -> None:
    model = build()
    sampling, batch = add_token_sampling(model, first=1), images()
    alone = torch.cat([sampling(image[None]) for image in batch])
    torch.testing.assert_close(sampling(batch), alone, rtol=1e-4, atol=1e-5)
    counts = find_kept_patches(sampling, batch).flatten(2).sum(2)  # (B, L)
    assert (counts[:, 0] == 48).all()
    assert (counts.diff(dim=1) <= 0).all()
    assert len(set(counts[:, -1].tolist())) > 1  # as many as each image needs
    assert {id(each) for each in sampling.parameters()} == {id(each) for each in model.parameters()}


@torch.no_grad()
def test_dropped_patches_do_not_matter_later_and_fewer_samples_keep_fewer() -> None:
    model, batch = toy(), images(2)
    many, few = (find_kept_patches(add_token_sampling(model, 0, samples), batch).flatten(2) for samples in (48, 6))
    assert few.sum(2).max() <= 6
    assert many.sum(2).min() > 6
    for kept in (many, few):
        assert not (kept[:, 1:] & ~kept[:, :-1]).any()  # what is dropped stays dropped


@torch.no_grad()
def test_half_precision() -> None:
    sampling = add_token_sampling(toy().bfloat16(), first=1)
    logits = sampling(images(2).bfloat16())
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_gradients_flow() -> None:
    model = toy(stochastic_depth=0.1)
    add_token_sampling(model).train()(images()).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize(
    ("build", "fields", "words"),
    [
        (lambda: toy(pool="mean"), {}, "the head of this ViT does not read a class token; expected a ViT, DeiT"),
        (lambda: toy(positions="rotary"), {}, "positions 'rotary' need the position .* so none can be dropped"),
        (lambda: CCT(CCTConfig(image_size=32, stem=(8,), width=16, depth=1, heads=2)), {}, "CCT has its own kind of"),
        (lambda: ResNet(ResNetConfig(image_size=32, stages=(1, 1), width=8)), {}, "ResNet has no blocks of tokens"),
        (lambda: add_token_sampling(toy()), {}, "this ViT samples tokens already; expected the model it was made"),
        (toy, {"first": 4}, "first is 4; expected 0 to 3, a block of the model"),
        (toy, {"samples": 49}, "samples is 49; expected 2 to 48, the patches of an image"),
    ],
)
def test_unsupported_models_and_wrong_values_are_refused(
    build: Callable[[], nn.Module], fields: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        add_token_sampling(build(), **fields)


def test_what_needs_all_tokens_is_refused(tmp_path: Path) -> None:
    sampling = add_token_sampling(toy())
    for refused in (sampling.tokens, sampling.feature_maps):
        with pytest.raises(
            ConfigError, match=r"not return a token for every patch: its layers drop tokens, .* use its log"
        ):
            refused(images())
    how = vitrail.Preprocessing(image_size=(24, 32))
    with pytest.raises(ConfigError, match="undefined for this model: its layers drop tokens"):
        vitrail.Explainer(sampling, preprocessing=how).explain(torch.rand(24, 32, 3).numpy(), "rollout")
    with pytest.raises(ConfigError, match="cannot be exported: its layers drop tokens, more or fewer for each image"):
        vitrail.export_model(sampling, tmp_path / "exported", preprocessing=how)
    with pytest.raises(CheckpointError):
        vitrail.save(sampling, tmp_path / "model")
    with pytest.raises(ConfigError, match="ViT does not sample tokens; expected a model of add_token_sampling"):
        find_kept_patches(toy(), images())
