"""The palette of Image GPT: k-means of the colors of training images, a function of these images and a seed.

M points, K centers, C channels.
"""

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.tasks.image_source import ImageSource

Points = NDArray[np.float64]
MAX_IMAGES, MAX_PIXELS = 4096, 2**17  # of which the palette is made
MAX_ITERATIONS, TOLERANCE = 50, 1e-4  # the tolerance is relative to the inertia


def sample_pixels(source: ImageSource, seed: int) -> Points:
    """The colors of random pixels of evenly spaced training images, without augmentation: (M, C)."""
    random, rows = np.random.default_rng(seed), list[Points]()
    count = min(MAX_IMAGES, source.example_count)
    for images in source.load_evenly_spaced_images(count):
        pixels = images.double().flatten(2).transpose(1, 2).numpy()  # (B, n, C)
        most = max(MAX_PIXELS // count, 1)
        for each in pixels:
            rows.append(each if len(each) <= most else each[random.choice(len(each), most, replace=False)])
    return np.concatenate(rows)


def make_palette(pixels: Points, colors: int, seed: int) -> Points:
    """The centers of the clusters of pixels, from dark to bright: (M, C) → (K, C)."""
    points, counts = np.unique(pixels, axis=0, return_counts=True)
    if len(points) < colors:
        raise ConfigError(
            f"`colors` is {colors}, but {len(pixels):,} pixels of the training images have only {len(points)} "
            f"different colors; use {len(points)} or less",
            fields=("colors",),
        )
    weights = counts.astype(np.float64)
    centers, _ = run_kmeans(points, weights, choose_spread_points(points, weights, colors, seed))
    return centers[np.lexsort((*centers.T, centers.sum(1)))]


def choose_spread_points(points: Points, weights: Points, count: int, seed: int) -> Points:
    """The first centers by k-means++ (Arthur 2007): each is drawn by its squared distance to those before."""
    random = np.random.default_rng(seed)
    chosen = [points[random.choice(len(points), p=weights / weights.sum())]]
    nearest = np.square(points - chosen[0]).sum(1)
    while len(chosen) < count:
        shares = nearest * weights
        chosen.append(points[random.choice(len(points), p=shares / shares.sum())])
        nearest = np.minimum(nearest, np.square(points - chosen[-1]).sum(1))
    return np.stack(chosen)


def run_kmeans(points: Points, weights: Points, centers: Points) -> tuple[Points, float]:
    """Lloyd's algorithm: the centers, and their inertia, the weighted sum of squared distances of all points.

    An empty cluster gets the point that is farthest from its center.
    """
    before = np.inf
    for _ in range(MAX_ITERATIONS):
        nearest, distances = assign_points(points, centers)
        inertia = float(distances @ weights)
        sizes = np.bincount(nearest, weights, len(centers))
        for empty in np.flatnonzero(sizes == 0):
            farthest = int(np.argmax(distances * (sizes[nearest] > weights)))  # not alone in its cluster
            sizes[nearest[farthest]] -= weights[farthest]
            nearest[farthest], distances[farthest], sizes[empty] = empty, 0.0, weights[farthest]
        sums = [np.bincount(nearest, weights * channel, len(centers)) for channel in points.T]
        centers = np.stack(sums, axis=1) / sizes[:, None]
        if before - inertia <= TOLERANCE * inertia:
            break
        before = inertia
    return centers, float(assign_points(points, centers)[1] @ weights)


def assign_points(points: Points, centers: Points) -> tuple[NDArray[np.intp], Points]:
    """The nearest center of each point, and the squared distance to it."""
    nearest, step = list[NDArray[np.intp]](), 2**22 // len(centers) + 1  # bounds the memory
    for start in range(0, len(points), step):
        products = points[start : start + step] @ centers.T
        nearest.append(np.argmin(np.square(centers).sum(1) - 2 * products, axis=1))
    found = np.concatenate(nearest)
    return found, np.square(points - centers[found]).sum(1)


def compute_color_entropy(pixels: Points, palette: Points) -> float:
    """The entropy of the frequencies of palette colors, in nats: the loss of a model that knows nothing else."""
    counts = np.bincount(assign_points(pixels, palette)[0], minlength=len(palette))
    shares = counts[counts > 0] / len(pixels)
    return float(-(shares * np.log(shares)).sum())
