"""Makes the picture of the README: the explorer of a tulip, with one head switched off.

python demos/first_look.py [OUT.png] needs playwright and Chromium (`make browser`).
"""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import crate_interp as ci

SAMPLE, STATE = 5, "layer=3&head=1&mode=to&scale=row&off=head&over=none"
PART = {"x": 20, "y": 66, "width": 1240, "height": 622}  # of the window, in pixels


def main(out: Path) -> None:
    model = ci.load("crate-tiny-pictures")
    image = model.preprocess(ci.data.embedded("pictures")[SAMPLE : SAMPLE + 1]["image"])
    _, cache = model.run_with_cache(image)
    off = ci.circuits.switched_off(model, image)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page = ci.viz.explore(cache, image, without=off).save(Path(folder) / "explore.html")
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1280, "height": 900})
        window.goto(f"{page.as_uri()}#{STATE}")
        window.wait_for_timeout(1000)
        window.screenshot(path=out, clip=PART)  # pyright: ignore[reportArgumentType]
        print(window.inner_text("text=Without head L3H1"))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("first_look.png"))
