"""The pictures of docs/howto/inspect.md, from two checkpoints: python docs/pictures/inspector.py VANILLA SINK

Serves them, opens the page in Chromium as a reader would, and writes PNG files into docs/assets. Needs the dev and serve extras.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).parents[1] / "assets"
PROMPT = "tom has 6 books and gets 6 more. tom"
SETTINGS = {"prompt": PROMPT, "policy": "llada", "steps": 24, "length": 48, "seed": 0, "rule": "relative", "layer": 2}
# name -> (width, height, scheme, what is chosen)
PICTURES = {
    "inspect": (1280, 1400, "light", {"step": 10}),
    "inspect-token": (1280, 1780, "dark", {"step": 10, "head": 3, "token": 40}),
    "inspect-phone": (390, 844, "light", {"step": 10}),
}
COLOURS = 128  # enough for flat pictures, and a third of the bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs=2)
    given = parser.parse_args()
    command = [sys.executable, "-m", "sinkdlm", "serve", *given.checkpoints, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        found = re.search(r"serving (\S+), (\S+) at (http://\S+)", said)
        assert found, said
        try:
            take_pictures(found[3], {"model": found[1], "beside": found[2], **SETTINGS})
        finally:
            server.terminate()


def take_pictures(url: str, settings: dict[str, object]) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scheme, chosen) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{url}/#{urlencode({**settings, **chosen})}")
            page.locator("dd[data-quantity=sink_heads]").nth(1).wait_for()
            page.locator("#summary p").nth(1).wait_for()
            if "token" in chosen:
                page.locator(".candidates li").nth(9).wait_for()
            if width < 640:
                page.locator(".controls").scroll_into_view_if_needed()
                page.evaluate("document.querySelector('.controls').scrollIntoView()")
            shot = Image.open(io.BytesIO(page.screenshot()))
            shot.convert("RGB").quantize(COLOURS).save(OUT / f"{name}.png", optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
