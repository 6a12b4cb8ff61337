"""Comparisons match an independent computation: votes, matched classes and token similarity."""

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.figure_checks import check_texts
from support.noisy_weights import add_weight_noise
from support.toy_datasets import write_class_folders
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.evaluation.evaluate import evaluate
from vitrail.opening import Opened
from vitrail.predict.engine_selection import EngineOptions
from vitrail.study.compare import (
    ClassDistillationSimilarity,
    ComparedModel,
    Comparison,
    Voter,
    compare,
    draw_comparison,
    predict_classes,
)

CLASSES = tuple("abcdefg")
WIDE = Preprocessing(image_size=32, crop=1.0)
NARROW = Preprocessing(image_size=32, crop=0.6, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def toy(name: str, preset: str = "vit_tiny_patch16_224", preprocessing: Preprocessing = WIDE, **fields: Any) -> Opened:
    fields = {"image_size": 32, "classes": 7, "depth": 2, "width": 16, "heads": 2, **fields}
    model = add_weight_noise(vitrail.create(preset, **fields), std=0.3)
    return Opened(source=name, model=model, preprocessing=preprocessing, classes=7, labels=CLASSES)


def student(name: str = "runs/student", **fields: Any) -> Opened:
    return toy(name, "deit_tiny_distilled_patch16_224", NARROW, **{"depth": 3, **fields})


@pytest.fixture
def dataset() -> ArrayDataset:
    draw = np.random.default_rng(0)
    return ArrayDataset(draw.integers(0, 256, (23, 40, 50, 3), dtype=np.uint8), draw.integers(0, 7, 23), CLASSES)


def inputs(dataset: ArrayDataset, preprocessing: Preprocessing) -> Tensor:
    pixels = [
        torch.from_numpy(preprocess_image(open_image(dataset.source(n)), preprocessing)) for n in range(len(dataset))
    ]
    return torch.stack(pixels)


def by_hand(opened: Opened, dataset: ArrayDataset) -> list[list[int]]:
    model: Any = opened.model
    with torch.inference_mode():
        images = inputs(dataset, opened.preprocessing)
        if not getattr(model.config, "distilled", False):
            return [model(images).argmax(1).tolist()]
        first, second = model.head_logits(model.encode(images, queries=2))
        return [each.argmax(1).tolist() for each in (first, second, model(images))]


def test_engines_give_the_same_comparison(dataset: ArrayDataset) -> None:
    models = [toy("runs/teacher"), student()]
    expected = compare(models, dataset)
    found = compare(models, dataset, options=EngineOptions(engine="eager", streams=2, threads=1))
    assert (found.disagreement, found.voters) == (expected.disagreement, expected.voters)
    assert found.similarities == expected.similarities, "a model with two heads stays in torch"
    quick = compare(models, dataset, options=EngineOptions(engine="bfloat16", streams=1, threads=1))
    assert quick.voters[0] == expected.voters[0]


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (5, 0), (64, 0), (5, 1)])
def test_matrix_matches_a_reference(dataset: ArrayDataset, batch: int, workers: int) -> None:
    teacher, learner, counts = toy("runs/teacher"), student(), list[int]()
    found = compare([teacher, learner], dataset, batch=batch, workers=workers, progress=counts.append)
    votes = [[dataset.label(n) for n in range(23)], *by_hand(teacher, dataset), *by_hand(learner, dataset)]
    for row, mine in enumerate(votes):
        for column, theirs in enumerate(votes):
            differ = sum(one != other for one, other in zip(mine, theirs, strict=True))
            assert found.disagreement[row][column] == differ / 23
    assert (found.images, sum(counts), found.data) == (23, 46, "ArrayDataset")
    assert found.names == (
        "ground truth",
        "teacher",
        "student, class head",
        "student, distillation head",
        "student, both heads",
    )
    assert [each.head for each in found.voters][1:3] == [None, "class head"]
    assert [each.model for each in found.voters] == [None, "teacher", "student", "student", "student"]
    assert len(set(map(tuple, votes))) == 5, "the test can fail"


def test_accuracy_is_that_of_evaluate(dataset: ArrayDataset) -> None:
    learner = student()
    found = compare([toy("one"), learner], dataset)
    model: Any = learner.model
    for voter, answer in zip(found.voters[2:], ("class", "distill", "both"), strict=True):
        model.config = replace(model.config, answer=answer)
        assert voter.accuracy == evaluate(model, dataset, NARROW).top1
        assert compare([learner], dataset).names[1:] == found.names[2:], "independent of the head that the model uses"
    assert found.voters[0].accuracy == 1
    for row, voter in enumerate(found.voters):
        assert voter.accuracy == pytest.approx(1 - found.disagreement[0][row], abs=1e-12)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_disagreement_is_a_metric(models: int, count: int, batch: int, seed: int) -> None:
    """Symmetric, 0 on the diagonal, triangle inequality; independent of the batch size."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 2, 2, 3), generator=draw, dtype=torch.uint8).numpy()
    dataset = ArrayDataset(pixels, torch.randint(3, (count,), generator=draw).numpy(), tuple("abc"))
    how = Preprocessing(image_size=2, crop=1.0)
    voters = list[Opened]()
    for number in range(models):
        head = nn.Linear(12, 3)
        nn.init.normal_(head.weight, generator=draw)
        model = nn.Sequential(nn.Flatten(), head)
        voters.append(Opened(source=f"{number}", model=model, preprocessing=how, classes=3, labels=("a", "b", "c")))
    found = compare(voters, dataset, batch=batch)
    matrix = torch.tensor(found.disagreement, dtype=torch.float64)
    assert torch.equal(matrix, matrix.T)
    assert not matrix.diagonal().any()
    assert (matrix[:, None] <= matrix[:, :, None] + matrix[None] + 1e-12).all()
    assert len(found.pairs()) == models * (models - 1) // 2
    assert sorted(found.pairs(), key=lambda each: each.disagreement) == found.pairs()
    assert found.disagreement == compare(voters, dataset, batch=count).disagreement


def test_classes_are_matched_by_name(dataset: ArrayDataset) -> None:
    one, learner = toy("one"), student()
    expected = compare([one, learner], dataset)
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    with torch.no_grad():
        for model in (one.model, learner.model):
            for name in ("head", "head_dist"):
                head = getattr(model, name, None)
                if isinstance(head, nn.Linear):
                    head.weight.copy_(head.weight[order])
                    head.bias.copy_(head.bias[order])
    labels = tuple(CLASSES[n] for n in order.tolist())
    found = compare([replace(one, labels=labels), replace(learner, labels=labels)], dataset)
    assert (found.disagreement, found.voters) == (expected.disagreement, expected.voters)
    assert found.notes == ()
    wrong = compare([one, learner], dataset)
    assert wrong.disagreement != expected.disagreement, "the test can fail"


def test_models_with_more_classes_predict_among_those_of_the_data(dataset: ArrayDataset) -> None:
    large = toy("large", classes=9)
    large = replace(large, classes=9, labels=("x", *CLASSES, "y"))
    found = compare([large], dataset)
    with torch.inference_mode():
        best = large.module(inputs(dataset, WIDE))[:, 1:8].argmax(1)
    labels = torch.tensor([dataset.label(n) for n in range(23)])
    assert found.voters[1].accuracy == (best == labels).double().mean().item()
    assert found.notes == ("large: of its 9 classes only the data's 7 are compared",)


def test_token_similarity_matches_the_parts_of_the_model(dataset: ArrayDataset) -> None:
    learner = student("student.pth")
    model: Any = learner.model
    (found,) = compare([toy("one"), learner], dataset, batch=5).similarities
    with torch.inference_mode():
        images = inputs(dataset, NARROW)
        patches = model.patch_embed(images)
        first, second = model.cls_token + model.pos_embed[:, :1], model.dist_token + model.pos_embed[:, 1:2]
        x = torch.cat([first.expand(23, -1, -1), second.expand(23, -1, -1), patches + model.pos_embed[:, 2:]], 1)
        layers = [x]
        for block in model.blocks:
            layers.append(block(layers[-1], (2, 2)))

        def cosine(tokens: Tensor) -> float:
            return F.cosine_similarity(tokens[:, 0], tokens[:, 1], dim=-1).mean().item()

        assert found.layers == pytest.approx([cosine(each) for each in layers], abs=1e-6)
        assert found.layers[0] == pytest.approx(F.cosine_similarity(first, second, dim=-1).item(), abs=1e-6)
        assert found.end == pytest.approx(cosine(model.tokens(images)), abs=1e-6)
        learned = F.cosine_similarity(model.cls_token[0, 0], model.dist_token[0, 0], dim=0)
        assert found.tokens == pytest.approx(learned.item(), abs=1e-6)
    assert found.model == "student.pth"
    assert len(found.layers) == 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())  # pyright: ignore[reportPrivateUsage]


def test_distilled_models_vote_three_times_in_one_pass(dataset: ArrayDataset) -> None:
    learner, passes = student(), list[int]()
    learner.module.train()
    part: Any = learner.module.patch_embed

    def count(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        passes.append(len(given[0]))

    part.register_forward_pre_hook(count)
    compare([learner], dataset, batch=10)
    assert passes == [10, 10, 3]
    assert all(module.training for module in learner.module.modules()), "the mode is restored"


def test_unreadable_images_are_excluded_for_all(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "photos", a=4, b=4, c=4)
    models = [toy("one"), student()]
    assert compare(models, folder).images == 12
    for name in ("a/0.png", "a/1.png", "c/3.png"):
        (folder / name).write_bytes(b"not an image")
    for batch in (1, 2, 5, 64):
        counts = list[int]()
        found = compare(models, folder, batch=batch, progress=counts.append)
        assert (found.images, sum(counts)) == (9, 24)
        assert [each.split("'")[1] for each in found.skipped] == [
            str(folder / name) for name in ("a/0.png", "a/1.png", "c/3.png")
        ]
        assert "\n3 unreadable, excluded for all models:\n" in str(found)
        assert all(map(isfinite, found.similarities[0].layers))
    for name in ("a/0.png", "a/1.png", "c/3.png"):
        (folder / name).unlink()
    assert replace(found, skipped=(), seconds=0) == replace(compare(models, folder), seconds=0)
    (folder / "b" / "1.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"b/1\.png' is not an image"):
        compare(models, folder, strict=True)


def test_images_unreadable_for_one_model_are_excluded_for_all() -> None:
    """An image that is too large for one model only."""
    pixels = [np.zeros((40, 40, 3), np.uint8), np.zeros((1, 20_000, 3), np.uint8), np.zeros((40, 40, 3), np.uint8)]

    class Mixed:
        classes = CLASSES

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return Image.fromarray(pixels[index]), index

    squashed = replace(toy("squashed"), preprocessing=replace(WIDE, fit="squash"))
    assert compare([squashed], Mixed()).images == 3
    learner = replace(student(), preprocessing=replace(NARROW, crop=0.1))
    found = compare([squashed, learner], Mixed())
    assert (found.images, len(found.skipped)) == (2, 1)
    assert "would be resized" in found.skipped[0]


def test_no_readable_image_is_an_error(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "photos", a=2, b=2)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"not an image")
    model = replace(toy("one", classes=2), classes=2, labels=("a", "b"))
    with pytest.raises(DataError, match=r"^no image of photos can be read, for instance: .*0\.png' is not an image"):
        compare([model], folder)


def test_runs_are_compared_on_held_out_images(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "photos", a=10, b=10)
    first, second = (
        replace(
            toy(name, classes=2),
            classes=2,
            labels=("a", "b"),
            run=FinishedRun(model=tmp_path, data=str(folder), seed=seed, val_share=0.3),
        )
        for name, seed in (("runs/first", 1), ("runs/second", 2))
    )
    for data in (None, folder, f"{folder}/../photos"):
        found = compare([first], data)
        assert found.images == 6
        assert found.notes == ("photos: 6 of 20 images held out for validation, by seed 1",)
    both = compare([first, second])
    assert both.notes[1:] == ("runs/second: held out other images, and was trained on some of these",)
    assert compare([replace(first, run=None), second]).notes[0].endswith("by seed 2")
    assert compare([replace(first, run=None)], folder).images == 20
    for part in ("train", "val"):  # a validation part that all held out
        write_class_folders(tmp_path / "parted" / part, a=3, b=3)
    runs = [replace(each, run=replace(each.run, data=str(tmp_path / "parted"))) for each in (first, second) if each.run]
    assert compare(runs).notes == ()


def test_text_fits_into_100_columns(dataset: ArrayDataset) -> None:
    models = [toy(f"{'long' * 20}/{number}/{'longer' * 9}") for number in range(6)]
    models += [student(f"{number}{'student' * 9}", depth=number + 1) for number in range(4)]
    found = compare(models, dataset)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("ArrayDataset, 23 images: accuracy and disagreement in %\n\n")
    assert "most similar of 153 pairs" in text
    assert text.count("…, distillation head") >= 4, "the model's name is cut, not the head's"
    right = f"{100 * found.voters[1].accuracy:.2f}"
    assert any(line.split()[0] == "1" and line.split()[2] == right for line in text.splitlines() if line.strip())
    assert str(compare(models[:1], dataset)).count("\n") == 5, "no pairs and no tokens"


def test_json_round_trip(dataset: ArrayDataset) -> None:
    found = compare([toy("one"), student()], dataset)
    data = json.loads(json.dumps(found.to_json()))
    assert data == found.to_json()
    again = Comparison(
        data=data["data"],
        images=data["images"],
        voters=tuple(Voter(**each) for each in data["voters"]),
        disagreement=tuple(map(tuple, data["disagreement"])),
        similarities=tuple(
            replace(ClassDistillationSimilarity(**e), layers=tuple(e["layers"])) for e in data["similarities"]
        ),
        skipped=tuple(data["skipped"]),
        notes=tuple(data["notes"]),
        seconds=data["seconds"],
    )
    assert again == found
    assert data["pairs"][0] == vars(found.pairs()[0])


def is_drawn(path: Path) -> bool:
    with Image.open(path) as image:
        return len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3) @ [1, 256, 65536])) > 50


def test_plots(dataset: ArrayDataset, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    names = ("one", "_hidden", "a $x_1^$", "日本語 \n\x1b", 99 * "long")
    plain, learners = [toy(name) for name in names], [student(name) for name in names]
    for number, models in enumerate(([plain[0]], [learners[0]], [*plain, *learners], 12 * plain)):
        _, path = compare(models, dataset).write({}, tmp_path / "new" / str(number))
        assert is_drawn(path)
    same = compare([plain[0]], dataset)
    agreed = replace(same, disagreement=((0.0, 0.0), (0.0, 0.0)))
    assert draw_comparison(agreed).axes


def test_long_names_are_not_cut_in_the_plot() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    names = ["ground truth", *(f"deit_tiny_distilled_patch16_224.fb_in1k.safetensors, head {n}" for n in range(5))]
    voters = tuple(Voter(name=name, model=name, head=None, accuracy=0.5) for name in names)
    result = Comparison(data="toys", images=10, voters=voters, disagreement=((0.5,) * 6,) * 6)
    figure = draw_comparison(result)
    check_texts(figure)
    shown = [label.get_text().replace("\n", "").replace(" ", "") for label in figure.axes[0].get_yticklabels()]
    assert shown == [f"{number}{name}".replace(" ", "") for number, name in enumerate(names)]


def test_errors(dataset: ArrayDataset, tmp_path: Path) -> None:
    one, nothing = toy("one"), DatasetSplits(name="no", train=dataset, val=None, classes=CLASSES)
    sick = toy("sick")
    with torch.no_grad():
        next(sick.module.parameters()).fill_(float("nan"))
    headless = replace(toy("headless", classes=0), classes=0, labels=None)
    cases: list[tuple[Any, Any, str]] = [
        ([], dataset, r"^no models were given; expected at least one"),
        ([one], None, r"^no `data`; expected fashion"),
        ([one], tmp_path / "nowhere", r"nowhere' does not exist; expected 'fashion'"),
        ([tmp_path / "nowhere"], dataset, r"nowhere does not exist; expected a checkpoint"),
        ([one], nothing, r"^no has no validation images; expected some"),
        (
            [one, replace(one, source="far/other", labels=tuple("hijklmn"))],
            dataset,
            r"^far/other cannot predict the classes of ArrayDataset: 7 of the data's 7 classes \(a, b, c and 4 more\)",
        ),
        ([headless], dataset, r"^headless has no head"),
        ([sick], dataset, r"^sick predicts NaN or infinity"),
        (
            [replace(one, classes=8, labels=(*CLASSES, "h"))],
            dataset,
            r"returns a tensor of shape \(23, 7\); expected logits",
        ),
        ([3], dataset, r"^the model is 3; expected a name, or a vitrail.Teacher"),
    ]
    for models, data, message in cases:
        with pytest.raises(VitrailError, match=message):
            compare(models, data)
    with pytest.raises(ConfigError, match=r"cuda:77 cannot be used"):
        compare([one], dataset, device="cuda:77")


def test_one_model_by_name(dataset: ArrayDataset, tmp_path: Path) -> None:
    one = toy("one")
    vitrail.save(one.module, tmp_path / "one", labels=CLASSES, preprocessing=WIDE)
    expected = compare([one], dataset)
    for models in (tmp_path / "one", str(tmp_path / "one"), [tmp_path / "one"], one):
        assert replace(vitrail.compare(models, dataset), seconds=expected.seconds) == expected


def test_only_classes_are_stored(dataset: ArrayDataset) -> None:
    one = toy("one")
    compared = ComparedModel(name="one", model=one.model, preprocessing=WIDE, classes=7, class_columns=tuple(range(7)))
    found = predict_classes(compared, dataset, 5, 0, "cpu", False, lambda _: None)
    assert (found.predicted.dtype, tuple(found.predicted.shape), found.cosines) == (torch.int32, (1, 23), None)
