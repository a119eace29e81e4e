"""The pictures of docs/howto/inspect.md.

    python docs/pictures/inspector.py inspect.html    made by `sinkdlm analyze VANILLA SINK`: the page
    python docs/pictures/inspector.py VANILLA SINK    two small checkpoints, served: a chosen token, also on a phone

Opens the page in Chromium as a reader would, and writes PNG files into docs/assets. Needs the dev and serve extras.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).parents[1] / "assets"
PROMPT = "tom has 6 books and gets 6 more. tom"
SETTINGS = {"prompt": PROMPT, "policy": "llada", "steps": 24, "length": 48, "seed": 0, "rule": "relative", "layer": 1, "head": 0}
# name -> (width, height, scheme, what is chosen)
RECORDED = {"inspect": (1280, 1370, "light", {"step": 20})}
SERVED = {"inspect-token": (1280, 1920, "dark", {"step": 10, "token": 40}), "inspect-phone": (390, 844, "light", {"step": 20})}
COLOURS = 128  # enough for flat pictures, and a third of the bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("given", nargs="+", metavar="PATH")
    given = parser.parse_args()
    if len(given.given) == 1:
        take_pictures(Path(given.given[0]).resolve().as_uri(), RECORDED, {})
        return
    command = [sys.executable, "-m", "sinkdlm", "serve", *given.given, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        found = re.search(r"serving (\S+), (\S+) at (http://\S+)", said)
        assert found, said
        try:
            take_pictures(f"{found[3]}/", SERVED, {"model": found[1], "beside": found[2], **SETTINGS})
        finally:
            server.terminate()


def take_pictures(url: str, pictures: dict[str, Any], settings: dict[str, object]) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scheme, chosen) in pictures.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{url}#{urlencode({**settings, **chosen})}")
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
