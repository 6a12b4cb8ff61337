"""Accumulated metrics, compared with hand calculations and with torch."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import DataError, VitrailError
from vitrail.evaluation.metrics import CALIBRATION_BINS, MAX_CLASSES_IN_CONFUSION, Evaluation, MetricAccumulator


def random_logits_and_labels(images: int = 500, classes: int = 12) -> tuple[Tensor, Tensor]:
    labels = torch.randint(classes, (images,))
    return 3 * torch.randn(images, classes) + 4 * F.one_hot(labels, classes), labels


def compute(logits: Tensor, labels: Tensor, batch: int = 64, **more: Any) -> Evaluation:
    tally = MetricAccumulator(logits.shape[1])
    for start in range(0, len(labels), batch):
        part = slice(start, start + batch)
        tally.add_batch(logits[part], labels[part], **{name: value[part] for name, value in more.items()})
    return tally.compute_evaluation([f"c{n}" for n in range(logits.shape[1])])


@pytest.mark.parametrize("classes", [2, 5, 12, 300])
def test_accuracy_and_loss_match_torch(classes: int) -> None:
    logits, labels = random_logits_and_labels(classes=classes)
    found = compute(logits, labels)
    top = logits.topk(min(5, classes)).indices == labels[:, None]
    assert found.images == 500
    assert found.top1 == top[:, 0].sum().item() / 500
    assert found.top5 == top.any(1).sum().item() / 500
    assert found.loss == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=1e-12)


def test_confusion_and_class_accuracies_match_a_hand_calculation() -> None:
    logits, labels = random_logits_and_labels(classes=4)
    labels[labels == 2] = 1  # a class without images
    found = compute(logits, labels)
    expected = torch.zeros(4, 4, dtype=torch.int64)
    for label, predicted in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        expected[label, predicted] += 1
    assert found.confusion is not None
    assert found.confusion.dtype == torch.int64
    assert found.confusion.equal(expected)
    assert [each.index for each in found.per_class] == [0, 1, 3]
    for each in found.per_class:
        assert each.images == expected[each.index].sum()
        assert each.accuracy == pytest.approx((expected[each.index, each.index] / each.images).item())
    pairs = found.list_confused_pairs()
    assert sum(each.images for each in pairs) == expected.sum() - expected.diagonal().sum()
    assert [each.images for each in pairs] == sorted((each.images for each in pairs), reverse=True)
    assert expected[int(pairs[0].label[1:]), int(pairs[0].taken_for[1:])] == pairs[0].images


def test_calibration_error_matches_a_hand_calculation() -> None:
    logits, labels = random_logits_and_labels()
    found = compute(logits, labels)
    error = 0.0
    confidence, predicted = logits.double().softmax(1).max(1)
    for n in range(CALIBRATION_BINS):
        inside = (confidence > n / CALIBRATION_BINS) & (confidence <= (n + 1) / CALIBRATION_BINS)
        assert found.bins[n].images == inside.sum()
        if inside.any():
            sure, right = confidence[inside].mean().item(), (predicted == labels)[inside].double().mean().item()
            assert (found.bins[n].confidence, found.bins[n].accuracy) == (pytest.approx(sure), pytest.approx(right))
            error += inside.sum().item() / len(labels) * abs(sure - right)
        else:
            assert (found.bins[n].confidence, found.bins[n].accuracy) == (None, None)
    assert found.calibration_error == pytest.approx(error)


def test_bins_include_their_upper_end() -> None:
    sure = compute(torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
    assert [each.images for each in sure.bins] == [0] * (CALIBRATION_BINS - 1) + [1]
    assert sure.calibration_error == 0
    assert compute(torch.tensor([[200.0, 0.0]]), torch.tensor([1])).calibration_error == 1


def test_ties_are_broken_by_class_number() -> None:
    logits = torch.zeros(8, 8)
    found = compute(logits, torch.arange(8))
    assert (found.top1, found.top5) == (1 / 8, 5 / 8)
    assert found.confusion is not None
    assert found.confusion[:, 0].tolist() == [1] * 8


def test_real_accuracy_matches_its_definition() -> None:
    logits = torch.eye(4)[[0, 1, 2, 3, 0]]
    real_labels = [
        (0,),
        (2, 1),
        (3, 0),
        (),
        None,
    ]  # correct, among several, not among them; two without labels are left out
    found = compute(logits, torch.tensor([0, 0, 2, 3, 0]), real_labels=real_labels, batch=2)
    assert (found.real, found.real_images) == (2 / 3, 3)
    assert found.top1 == 4 / 5
    assert "ReaL top-1 66.67% of the 3 images that have ReaL labels" in str(found)
    assert compute(logits, torch.tensor([0, 0, 2, 3, 0])).real is None


def test_sums_of_ranks_add_up_to_those_of_one_process() -> None:
    logits, labels = random_logits_and_labels()
    single, ranks = MetricAccumulator(12), [MetricAccumulator(12) for _ in range(3)]
    single.add_batch(logits, labels, [(n % 12,) for n in range(500)])
    for rank, tally in enumerate(ranks):
        tally.add_batch(logits[rank::3], labels[rank::3], [(n % 12,) for n in range(rank, 500, 3)])
    total = MetricAccumulator(12)
    total.add_sums(torch.stack([tally.get_sums() for tally in ranks]).sum(0))
    assert single.get_sums().dtype == torch.float64
    assert single.get_sums().ndim == 1
    names = [str(n) for n in range(12)]
    one, other = total.compute_evaluation(names).to_json(), single.compute_evaluation(names).to_json()
    assert one.keys() == other.keys()
    for name in one:
        if name != "bins":
            assert one[name] == (pytest.approx(other[name], rel=1e-12) if isinstance(one[name], float) else other[name])
    torch.testing.assert_close(total.get_sums(), single.get_sums(), rtol=1e-12, atol=0)


def test_metrics_of_bfloat16_are_computed_in_float32() -> None:
    logits, labels = random_logits_and_labels()
    half = logits.bfloat16()
    assert compute(half, labels).loss == compute(half.float(), labels).loss


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinite_logits_are_refused(value: float) -> None:
    logits, labels = random_logits_and_labels()
    logits[3, 3] = value
    with pytest.raises(VitrailError, match=r"^the model returns NaN or infinity; expected finite logits: "):
        MetricAccumulator(12).add_batch(logits, labels)


@pytest.mark.parametrize("wrong", [-1, 12])
def test_label_outside_the_classes_is_refused(wrong: int) -> None:
    logits, labels = random_logits_and_labels()
    labels[7] = wrong
    with pytest.raises(DataError, match=f"^a label is {wrong}; expected 0 to 11, the classes of the model$"):
        MetricAccumulator(12).add_batch(logits, labels)


def test_evaluation_without_images_is_an_error() -> None:
    tally = MetricAccumulator(2)
    tally.add_batch(torch.empty(0, 2), torch.empty(0, dtype=torch.int64))
    with pytest.raises(DataError, match=r"^no images to evaluate; expected at least one$"):
        tally.compute_evaluation(["a", "b"])
    with pytest.raises(DataError, match=r"^no images to evaluate; 2 cannot be read, for instance x is not an image"):
        tally.compute_evaluation(["a", "b"], skipped=["x is not an image", "y is not an image"])


def test_confusion_is_omitted_for_very_many_classes() -> None:
    tally = MetricAccumulator(MAX_CLASSES_IN_CONFUSION + 1)
    tally.add_batch(torch.eye(MAX_CLASSES_IN_CONFUSION + 1)[[5, 6]], torch.tensor([5, 5]))
    found = tally.compute_evaluation([str(n) for n in range(MAX_CLASSES_IN_CONFUSION + 1)])
    assert len(tally.get_sums()) < 10_000
    assert (found.confusion, found.list_confused_pairs()) == (None, [])
    assert [(each.index, each.accuracy) for each in found.per_class] == [(5, 0.5)]
    assert "most confused" not in str(found)


def test_report() -> None:
    logits, labels = torch.eye(3)[[0, 0, 1, 1, 2]], torch.tensor([0, 1, 1, 1, 2])
    tally = MetricAccumulator(3)
    tally.add_batch(logits, labels)
    found = tally.compute_evaluation(
        ["ant", "bee\x1b[31m", "wasp"], skipped=[f"{n}.jpg is not an image" for n in range(12)], seconds=2
    )
    lines = str(found).splitlines()
    assert lines[0] == "top-1 80.00%, loss 0.7514, calibration error 0.2239; 5 images, 2 images/s"
    assert lines[2].split() == ["class", "images", "right"]
    assert lines[4].split() == [r"bee\x1b[31m", "3", "66.7%"]
    assert [line.split()[0] for line in lines[5:7]] == ["ant", "wasp"]
    assert lines[8:11] == [
        "most confused  taken for  images",
        "─────────────  ─────────  ──────",
        r"bee\x1b[31m    ant             1",
    ]
    assert lines[12:] == [
        "skipped, 12 unreadable:",
        *(f"{n}.jpg is not an image" for n in range(10)),
        "and 2 more",
    ]


def test_report_of_many_classes_lists_the_worst() -> None:
    logits, labels = random_logits_and_labels(classes=21)
    report = str(compute(logits, labels))
    assert ", top-5 " in report.splitlines()[0]
    assert "worst of 21 classes  images" in report
    assert report.split("most confused")[0].count("%\n") == 10


def test_json_has_all_results() -> None:
    logits, labels = random_logits_and_labels(classes=6)
    found = compute(logits, labels)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (data["top1"], data["images"], len(data["classes"]), len(data["bins"])) == (
        found.top1,
        500,
        6,
        CALIBRATION_BINS,
    )
    right = sum(round(each["images"] * each["accuracy"]) for each in data["classes"])
    assert right + sum(each["images"] for each in data["confused"]) == 500
