"""CIFAR-10 with 1% of the labels: a supervised model, from scratch or pre-trained, on the images of few-shot probes.

    python benchmarks/few_labels.py --data cifar-10-batches-bin
    python benchmarks/few_labels.py --data cifar-10-batches-bin --init runs/simclr/model --lr 1e-3 --epochs 40

Compare the accuracies with the column `50-shot` of `vitrail probe RUN --data … --shots 50` for a run of
`vitrail pretrain simclr`: the labeled images of each seed are the same, and so is the architecture.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch

import vitrail
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.evaluation.probes.feature_measures import permute_classes
from vitrail.recipes.recipe import Recipe


def choose_images(data: ArrayDataset, shots: int, seed: int) -> ArrayDataset:
    """As many images of each class, the same as those of a few-shot probe with this seed."""
    chosen = np.concatenate([each[:shots] for each in permute_classes(data.labels, len(data.classes), seed)])
    return ArrayDataset(data.images[chosen], data.labels[chosen], data.classes, f"{shots} per class")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--init", help="model to start from; default: cct_cpu_32 from scratch")
    parser.add_argument("--lr", type=float, help="default: that of cifar10-cpu")
    parser.add_argument("--shots", type=int, default=50)
    parser.add_argument("--epochs", type=float, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data = vitrail.open_data(given.data)
    assert isinstance(data.train, ArrayDataset)
    recipe: Recipe = vitrail.open_recipe("cifar10-cpu").with_settings(
        {"minutes": None, "epochs": given.epochs, "precision": "float32"}
    )
    recipe = recipe.with_settings({"warmup": given.epochs / 16, "batch": 50})  # of an epoch, as in the recipe
    recipe = recipe if given.lr is None else recipe.with_settings({"lr": given.lr})
    how = vitrail.Preprocessing(image_size=32).with_fields(recipe.preprocessing)
    found = list[float]()
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        classes = len(data.classes)
        model = (
            vitrail.load(given.init, classes=classes) if given.init else vitrail.create("cct_cpu_32", classes=classes)
        )
        few = replace(data, train=choose_images(data.train, given.shots, seed))
        result = vitrail.fit(model, few, recipe.with_settings({"seed": seed}), preprocessing=how, device="cpu")
        found.append(result.evaluation.metrics["top1"])
        print(f"seed {seed}: {found[-1]:.2%} of the test images, {result.steps} steps", flush=True)
    print(f"{given.shots} labels per class: {np.mean(found):.2%} ± {np.std(found):.2%}")


if __name__ == "__main__":
    main()
