"""Measure the page of `vitrail serve` in Chromium: first paint, first map, drawing under the mouse, hiding patches.

    python benchmarks/explorer.py [MODEL] [--rounds 5]

Needs Chromium (`make browser`) and the extras `serve` and `test`. Figures are medians over the rounds.
"""

import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
from cyclopts import run
from playwright.sync_api import Page, sync_playwright

from vitrail.data.photos import PHOTO_FOLDER

MOVES, SECONDS = 300, 5
WATCH_SCRIPT = """
  localStorage.setItem('vitrail-tour', '1');
  window.draws = []; window.frames_ = 0;
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = draw => request(time => {
    const start = performance.now(); draw(time); window.draws.push(performance.now() - start);
  });
  const count = () => { window.frames_++; request(count); };
  request(count);
"""
ANSWER_SCRIPT = """() => {
  const before = document.querySelector('.answer ol').innerText;
  window.answered = null;
  document.querySelector('#file').addEventListener('change', () => {
    const start = performance.now();
    const look = () => {
      if (document.querySelector('.answer ol').innerText !== before) window.answered = performance.now() - start;
      else setTimeout(look, 5);
    };
    look();
  }, { once: true });
}"""
MOVE_SCRIPT = """async ([moves, seconds]) => {
  const canvas = document.querySelector('.pane canvas'), box = canvas.getBoundingClientRect();
  window.draws.length = 0; window.frames_ = 0;
  const start = performance.now();
  for (let n = 0; n < moves; n++) {
    const x = box.left + box.width * (0.3 + 0.4 * ((n % 30) / 30)), y = box.top + box.height * (0.1 + 0.8 * n / moves);
    canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: x, clientY: y, bubbles: true }));
    const next = start + (n + 1) * 1000 * seconds / moves;
    await new Promise(done => setTimeout(done, Math.max(0, next - performance.now())));
  }
  return { rate: 1000 * window.frames_ / (performance.now() - start), draws: window.draws };
}"""
HIDE_SCRIPT = """() => new Promise(done => {
  const start = performance.now();
  document.querySelector('.brightest').click();
  const look = () => (document.querySelector('.class .before') ? done(performance.now() - start) : setTimeout(look, 5));
  look();
})"""


@contextmanager
def serve(model: str) -> Generator[str]:
    command = [
        sys.executable,
        "-c",
        "from vitrail.cli import main; main()",
        "serve",
        model,
        "--port",
        "0",
        "--drain",
        "0",
    ]
    server = subprocess.Popen([*command, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()


def measure(page: Page, address: str, photo: str) -> dict[str, float]:
    """One visit: milliseconds, bytes and frames per second."""
    sizes, requests = list[int](), list[str]()

    def note(request: Any) -> None:
        requests.append(request.url)
        if request.method == "GET" and "/examples/" not in request.url:
            sizes.append(request.sizes()["responseBodySize"])

    page.on("requestfinished", note)
    page.goto(f"{address}#view=rollout")
    page.wait_for_selector(".check:not(.stale) dl", timeout=60_000)
    paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.wait_for_load_state("networkidle")
    total, before = sum(sizes), len(requests)
    moved = page.evaluate(MOVE_SCRIPT, [MOVES, SECONDS])
    hovered = len(requests) - before
    page.evaluate(ANSWER_SCRIPT)
    page.set_input_files("#file", photo)
    page.wait_for_function("() => window.answered !== null", timeout=60_000)
    answered = page.evaluate("() => window.answered")
    page.wait_for_selector(".check:not(.stale) dl")
    return {
        "page (bytes)": total,
        "first paint (ms)": paint,
        "a photo is opened → classes and first map (ms)": answered,
        "frames per second while the mouse moves": moved["rate"],
        "drawing a rollout under the mouse, p50 (ms)": float(np.quantile(moved["draws"], 0.5)),
        "drawing a rollout under the mouse, p99 (ms)": float(np.quantile(moved["draws"], 0.99)),
        "requests while the mouse moves": hovered,
        "patches are hidden → answer (ms)": page.evaluate(HIDE_SCRIPT),
    }


def main(model: str = "cct_cifar10", *, rounds: int = 5) -> None:
    visits = list[dict[str, float]]()
    with serve(model) as address, sync_playwright() as driver:
        program: Any = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for number in range(rounds):
            context = browser.new_context(viewport={"width": 1200, "height": 860})
            page = context.new_page()
            page.add_init_script(WATCH_SCRIPT)
            photo = sorted(PHOTO_FOLDER.glob("*.jpg"))[number % 3]  # another one each time: answers are remembered
            visits.append(measure(page, address, str(photo)))
            context.close()
        browser.close()
    for name in visits[0]:
        values = [visit[name] for visit in visits]
        print(f"{median(values):>10,.1f}  {name} ({min(values):,.1f} to {max(values):,.1f})")


if __name__ == "__main__":
    run(main)
