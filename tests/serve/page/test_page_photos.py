"""Photos of a visitor: one that is dropped, a folder that is classified, a wrong one in plain words, hostile names."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from support.explorer_pages import open_explorer
from support.server_process import run_server

from vitrail.data.photos import PHOTO_FOLDER

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DROP_SCRIPT = """async ([name, address]) => {
  const data = new DataTransfer(), bytes = await (await fetch(address)).blob();
  data.items.add(new File([bytes], name, { type: "image/jpeg" }));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
PASTE_SCRIPT = (
    DROP_SCRIPT.replace("DragEvent", "ClipboardEvent")
    .replace('"drop"', '"paste"')
    .replace("dataTransfer:", "clipboardData:")
)
TINY = "weights/deit_tiny_patch16_224.pth"


def test_a_dropped_and_a_pasted_photo_are_explained(browser: "Browser", address: str) -> None:
    with open_explorer(browser, address, "#model=cct_cifar10") as shown:
        shown.wait_for_check()
        for script, name in ((DROP_SCRIPT, "rocket"), (PASTE_SCRIPT, "coffee")):
            before = shown.text(".answer ol")
            shown.page.evaluate(script, [f"{name}.jpg", f"examples/{name}.jpg"])
            shown.page.wait_for_function(
                "before => document.querySelector('.answer ol').innerText !== before", arg=before
            )
            shown.wait_for_check()


def test_a_file_that_is_no_photo_is_an_error_in_one_line(browser: "Browser", address: str, tmp_path: Path) -> None:
    broken = tmp_path / "<img src=x onerror=alert(1)>.jpg"
    broken.write_bytes(b"not a photo")
    with open_explorer(browser, address) as shown:
        shown.wait_for_check()
        shown.page.set_input_files("#file", broken)
        shown.page.wait_for_selector("#notice:not([hidden])")
        assert "<img src=x onerror=alert(1)>.jpg is not an image" in shown.text("#notice")
        assert shown.page.locator("#notice img").count() == 0


def test_script_in_the_names_of_classes_stays_text(browser: "Browser", tmp_path: Path) -> None:
    names = [f"<img src=x onerror=alert({number})>" for number in range(10)]
    (tmp_path / "labels.txt").write_text("\n".join(names))
    words = ("vit_fashion", "--labels", tmp_path / "labels.txt", "--drain", 0)
    with run_server(*words) as running, open_explorer(browser, running.address) as shown:
        shown.wait_for_check()
        assert shown.text(".answer ol .name") in names
        for view in ("class", "lens"):
            shown.page.click(f"#tab-{view}")
            shown.page.wait_for_selector(f".panel .body[data-view={view}]")
        assert "<img src=x" in shown.text(".panel .lens")
        assert shown.page.locator("img[src=x]").count() == 0


def test_a_folder_is_classified_least_sure_first_and_a_wrong_photo_explained(
    browser: "Browser", address: str, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    for folder, name in (("cat", "cat"), ("truck", "rocket"), ("dog", "coffee"), ("holiday", "astronaut")):
        (photos / folder).mkdir(parents=True)
        shutil.copy(PHOTO_FOLDER / f"{name}.jpg", photos / folder / f"{name}.jpg")
    (photos / "notes.txt").write_text("not a photo")
    with open_explorer(browser, address, "#model=cct_cifar10") as shown:
        shown.wait_for_check()
        shown.page.set_input_files("#folder", photos)
        shown.page.wait_for_selector("#listing-name:has-text('4 photos, least sure first')")
        sure = [float(each.rstrip("%")) for each in shown.page.locator("#listed .number").all_inner_texts()]
        assert sure == sorted(sure)
        assert len(sure) == 4
        assert shown.page.locator("#listed .right").count() == 1  # the cat
        assert "of 3 differ" in shown.text("#listing-note")
        shown.page.check("#only-wrong")
        shown.page.locator("#listed button").first.click()
        shown.page.wait_for_selector(".truth:not([hidden])")
        assert re.search(r"It said .+, but the photo is in the folder (dog|truck)", shown.text(".truth"))
        shown.wait_for_check()
        assert re.search(r"would (still )?have said", shown.text(".would"))


def test_maps_find_the_tile_of_a_class(browser: "Browser", tmp_path: Path, shared: Callable[[str], Path]) -> None:
    """A collage of four photos: the map of what the model says of each photo is brightest in its tile."""
    weights, tiles = shared(TINY), {"cat": "Egyptian cat", "coffee": "espresso", "rocket": "drilling platform"}
    collage = Image.new("RGB", (448, 448))
    for place, name in enumerate((*tiles, "astronaut")):
        with Image.open(PHOTO_FOLDER / f"{name}.jpg") as photo:
            top, left, side = (
                (photo.height - min(photo.size)) // 2,
                (photo.width - min(photo.size)) // 2,
                min(photo.size),
            )
            tile = photo.crop((left, top, left + side, top + side)).resize((224, 224))
        collage.paste(tile, (224 * (place % 2), 224 * (place // 2)))
    collage.save(tmp_path / "collage.png")
    with run_server(f"tiny={weights}", "--drain", 0) as running, open_explorer(browser, running.address) as shown:
        shown.wait_for_check()
        shown.page.set_input_files("#file", tmp_path / "collage.png")
        shown.page.wait_for_function("() => location.hash.includes('sha256')")
        shown.page.wait_for_selector(".pane:not(.waiting)")
        for place, label in enumerate(tiles.values()):
            shown.page.fill(".other input", label)
            shown.page.locator(".other input").dispatch_event("change")
            shown.page.wait_for_selector(f".pane .title:has-text('looked at for {label}')")
            shown.page.wait_for_selector(".pane .status:has-text('brightest')")
            assert shown.read_arrays()["map"].reshape(2, 7, 2, 7).sum((1, 3)).argmax() == place
