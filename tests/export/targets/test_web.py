"""The page that runs a model in the browser: its preprocessing equals Python's, its predictions `vitrail predict`."""

from base64 import b64encode
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.browser_pages import INSPECT_SCRIPT
from support.chromium import open_chromium
from support.target_folders import WriteTarget
from support.web_page import host_folder, require_runtime

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.preprocessing import Preprocessing, compute_visible_box, resize_and_crop
from vitrail.data.photos import list_example_photos
from vitrail.export.targets.web import DOWN_FIRST, PAGE_FOLDER, RUNTIME_FILES, find_runtime

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MODEL = "vit_fashion"
HOW = {
    "timm": Preprocessing(image_size=224, crop=0.9),
    "wide": Preprocessing(image_size=(48, 80), crop=0.8, interpolation="bilinear"),
    "border": Preprocessing(image_size=64, crop=1.2, middle="floored"),
    "squash": Preprocessing(image_size=(90, 40), crop=0.7, fit="squash"),
    "gray": Preprocessing(image_size=28, crop=1.0, mean=(0.5,), std=(0.5,)),
    "enlarged": Preprocessing(image_size=300, crop=1.0),
}
PREPROCESS_SCRIPT = """async ([address, rgba, size, how]) => {
  const { preprocess, visibleBox } = await import(address + "preprocessing.js");
  const bytes = Uint8Array.from(atob(rgba), (each) => each.charCodeAt(0));
  return [Array.from(preprocess(bytes, size, how)), visibleBox(size, how)];
}"""
DECODE_SCRIPT = """async ([address, file]) => {
  const { decode } = await import(address + "preprocessing.js");
  const { rgba, size } = await decode(await (await fetch("data:image/*;base64," + file)).blob());
  return [Array.from(rgba), size];
}"""


@pytest.fixture(scope="module")
def browser() -> "Generator[Browser]":
    with open_chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(browser: "Browser") -> "Generator[tuple[Page, str]]":
    with host_folder(PAGE_FOLDER) as address:
        opened = browser.new_page()
        opened.goto(address + "style.css")
        yield opened, address
        opened.close()


def describe(how: Preprocessing) -> dict[str, Any]:
    given = {name: getattr(how, name) for name in ("crop", "fit", "middle", "interpolation")}
    size = np.broadcast_to(how.image_size, 2).tolist()
    return {**given, "size": size, "channels": len(how.mean), "down_first": DOWN_FIRST}


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("size", [(61, 90), (121, 50)])
def test_preprocessing_is_bit_identical(page: "tuple[Page, str]", name: str, size: tuple[int, int]) -> None:
    how, rng = HOW[name], np.random.default_rng(size[0])
    photo = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    rgba = b64encode(photo.convert("RGBA").tobytes()).decode()
    found, box = page[0].evaluate(PREPROCESS_SCRIPT, [page[1], rgba, list(size), describe(how)])
    assert np.array_equal(np.array(found), np.asarray(resize_and_crop(photo, how)).ravel())
    left, top, right, bottom = compute_visible_box(size, how)
    assert box == pytest.approx([top, left, bottom - top, right - left])


def encode(image: Image.Image, tmp_path: Path, name: str, **options: Any) -> Path:
    image.save(tmp_path / name, **options)
    return tmp_path / name


def decode_in_page(page: "tuple[Page, str]", path: Path) -> NDArray[Any]:
    values, size = page[0].evaluate(DECODE_SCRIPT, [page[1], b64encode(path.read_bytes()).decode()])
    return np.array(values).reshape(*size, 4)[..., :3]


def test_photos_are_decoded_as_in_python(page: "tuple[Page, str]", tmp_path: Path) -> None:
    """JPEGs within 2 of 255; PNGs exactly, if opaque; upright; transparent parts over white."""
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.open(list_example_photos()[3]).resize((60, 40))
    clear = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    cases = {
        encode(photo, tmp_path, "a.png"): 0,
        encode(photo.convert("L"), tmp_path, "b.png"): 0,
        encode(photo, tmp_path, "c.jpg", quality=90): 2,
        encode(photo, tmp_path, "turned.jpg", exif=exif): 2,
        encode(Image.fromarray(clear), tmp_path, "clear.png"): 2,
    }
    for path, bound in cases.items():
        expected = np.asarray(vitrail.data.images.decoding.rgb_image.open_image(path)).astype(int)
        found = decode_in_page(page, path)
        assert found.shape == expected.shape, path.name
        assert np.abs(found - expected).max() <= bound, path.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small model of the package."""
    from vitrail.cli.output.results import make_message_callbacks
    from vitrail.opening import run_command

    place = tmp_path_factory.mktemp("web") / "fashion"
    runtime = require_runtime()
    lines = run_command(
        "export", MODEL, out=place, for_target="web", web_runtime=runtime, messages=make_message_callbacks()
    )
    assert "overlay: rollout of its attention" in lines
    return place


def test_the_folder_predicts_without_a_browser(folder: Path) -> None:
    photo = list_example_photos()[0]
    found = vitrail.Predictor(folder / "model").predict(photo)
    assert found.top[0].name == vitrail.Predictor(MODEL).predict(photo).top[0].name


def test_the_page_predicts_as_python(browser: "Browser", folder: Path) -> None:
    """Logits within 1e-3 and the map within 1e-3 of its sum, with nothing from other hosts."""
    predictor = vitrail.Predictor(MODEL)
    explainer = vitrail.Explainer(MODEL)
    with host_folder(folder) as address:
        opened = browser.new_page(viewport={"width": 360, "height": 800})
        errors, requests = list[str](), list[str]()
        opened.on("console", lambda each: errors.append(each.text) if each.type in ("error", "warning") else None)
        opened.on("pageerror", lambda each: errors.append(str(each)))
        opened.on("request", lambda each: requests.append(each.url))
        opened.goto(address)
        opened.wait_for_selector("body[data-ready]", timeout=120_000)
        for number, photo in enumerate(list_example_photos()[:3], 1):
            opened.set_input_files("#file", photo)
            opened.wait_for_selector(f"body[data-shown='{number}']", timeout=60_000)
            logits, relevance = opened.evaluate(
                "async () => { const { lastLogits, lastRelevance } = await import('./main.js');"
                " return [lastLogits(), lastRelevance()]; }"
            )
            expected = predictor.engine.run(decode_for_model(photo, predictor.preprocessing)[None].copy())[0]
            assert np.abs(np.array(logits) - expected).max() < 1e-3
            assert opened.locator("li .name").first.inner_text() == predictor.predict(photo).top[0].name
            rollout = np.asarray(explainer.explain(photo, method="rollout").map).ravel()
            assert np.abs(np.array(relevance) / sum(relevance) - rollout / rollout.sum()).max() < 1e-3
        found = opened.evaluate(INSPECT_SCRIPT)
        assert found["overflow"] <= 0
        assert found["contrast"] >= 4.5
        opened.set_input_files("#file", {"name": "wrong.png", "mimeType": "image/png", "buffer": b"no image"})
        opened.wait_for_selector("#notice:has-text('wrong.png cannot be shown')")
        opened.close()
    assert not errors
    assert all(each.startswith((address, "blob:", "data:")) for each in requests)


def test_what_a_browser_cannot_show_is_refused(write_target: WriteTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no ort\.wasm\.min\.mjs; run npm install onnxruntime-web"):
        find_runtime(tmp_path)
    for each in RUNTIME_FILES:
        (tmp_path / each).touch()
    with pytest.raises(ConfigError, match="`for_target` web with `features`; expected classes"):
        write_target("web", "tokens", runtime=tmp_path)
    with pytest.raises(ConfigError, match="`web_runtime` with `for_target` triton; expected it with web"):
        write_target("triton", runtime=tmp_path)
    folder, lines = write_target("web", runtime=tmp_path, overlay={"parts": {"rollout": "it has windows"}})
    assert "overlay: none, since it has windows" in lines
    assert (folder / "ort" / RUNTIME_FILES[0]).exists()
