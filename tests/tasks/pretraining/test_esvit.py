"""EsViT: its region loss against a direct loop over pairs of crops and patches."""

import pytest
import torch
import torch.nn.functional as F
from support.pretraining_cases import CROPS, SMALL_HEAD
from support.toy_task import RECIPE, make_backbone, make_data

import vitrail
from vitrail.distributed import Ranks
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import EsvitSettings
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.esvit import Esvit, cross_entropy_between_patches, match_patches
from vitrail.train.fit import fit

SMALL_CCT = {"width": 12, "heads": 2, "depth": 1, "stem": (4, 4), "classes": 0, "image_size": 8}


def test_region_loss_is_that_of_a_loop_over_patches() -> None:
    torch.manual_seed(0)
    counts, size, width, prototypes = (4, 4, 2, 2), 3, 5, 7  # patches of two global and two local crops
    features = [torch.randn(size, count, width) for count in counts]
    outputs = [torch.randn(size, count, prototypes) for count in counts]
    teacher = [torch.randn(size, 4, width) for _ in range(2)]
    targets = torch.randn(2, size, 4, prototypes).softmax(-1)
    found = cross_entropy_between_patches(outputs, targets, match_patches(features, teacher), 0.1)
    pairs = []
    for q in range(2):
        for v, count in enumerate(counts):
            if v == q:
                continue
            losses = []
            for image in range(size):
                for patch in range(count):
                    cosines = F.cosine_similarity(features[v][image, patch][None], teacher[q][image])
                    target = targets[q, image, cosines.argmax()]
                    losses.append(-(target * (outputs[v][image, patch] / 0.1).log_softmax(-1)).sum())
            pairs.append(torch.stack(losses).mean())
    assert len(pairs) == 6
    torch.testing.assert_close(found, torch.stack(pairs).mean(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["vit", "cct"])
def test_loss_has_its_two_shares_and_trains_every_weight(family: str) -> None:
    backbone = make_backbone(dynamic=True) if family == "vit" else vitrail.create("cct_cpu_32", **SMALL_CCT)
    task = Esvit(backbone, EsvitSettings(**SMALL_HEAD, **CROPS, region_weight=0.25))
    source = open_image_source(task, make_data(), RECIPE)
    task.setup(source, RECIPE)
    batch = next(source.load_batches(range(1), ranks=Ranks()))
    loss, metrics = task.train()(batch, Clock(step=0, steps=9, steps_per_epoch=3))
    torch.testing.assert_close(loss.detach(), 0.75 * metrics["view_loss"] + 0.25 * metrics["region_loss"])
    loss.backward()
    assert not [name for name, weight in task.named_parameters() if weight.requires_grad and weight.grad is None]
    task.before_step(Clock(step=0, steps=9, steps_per_epoch=3))
    assert task.centres["head"].mean.shape == task.centres["head_dense"].mean.shape == (16,)
    assert not torch.equal(task.centres["head"].mean, task.centres["head_dense"].mean)


def test_result_is_the_teacher() -> None:
    task = Esvit(make_backbone(dynamic=True), EsvitSettings(**SMALL_HEAD, **CROPS))
    result = fit(task, make_data(), RECIPE, device="cpu", steps=2)
    assert result.model is task.teacher["backbone"]
    assert {"view_loss", "region_loss", "region_entropy", "prototypes"} <= set(result.evaluation.metrics)
