"""The page of `vitrail export --for web` in Chromium, compared with Python: classes, logits, seconds.

vitrail export ViT-Ti/16 page --for web
PYTHONPATH=tests python benchmarks/web_export.py ViT-Ti/16 page photos
"""

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from support.chromium import open_chromium
from support.web_page import host_folder

import vitrail
from vitrail.data.images.decoding.model_input import decode_for_model

PHOTOS = 32
READ = "async () => (await import('./main.js')).lastLogits()"


def main(model: str, folder: str, photos: str) -> None:
    predictor = vitrail.Predictor(model)
    paths = sorted(each for each in Path(photos).rglob("*") if each.suffix.lower() in (".jpg", ".jpeg", ".png"))
    chosen = paths[:: max(1, len(paths) // PHOTOS)][:PHOTOS]
    rows, times = list[tuple[bool, float]](), list[float]()
    first = 0.0
    with host_folder(Path(folder)) as address, open_chromium() as browser:
        page: Any = browser.new_page()
        start = perf_counter()
        page.goto(address)
        page.wait_for_selector("body[data-ready]", timeout=300_000)
        loaded = perf_counter() - start
        for number, path in enumerate(chosen, 1):
            page.set_input_files("#file", path)
            page.wait_for_selector(f"body[data-shown='{number}']", timeout=300_000)
            times.append(float(page.inner_text("#time").split()[0]))
            first = first or perf_counter() - start
            found = np.array(page.evaluate(READ))
            pixels = decode_for_model(path, predictor.preprocessing)[None].copy()
            expected = predictor.engine.run(pixels)[0]
            rows.append((bool(found.argmax() == expected.argmax()), float(np.abs(found - expected).max())))
    same, differences = zip(*rows, strict=True)
    print(f"model loaded after {loaded:.1f} s, first prediction after {first:.1f} s")
    print(f"{np.median(times):.0f} ms per photo (median)")
    print(f"same top-1 on {sum(same)} of {len(rows)}")
    print(f"logits differ by {max(differences):.2e}, median {np.median(differences):.2e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
