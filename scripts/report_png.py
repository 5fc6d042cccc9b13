"""A picture of a run's report: `python scripts/report_png.py RUN OUT.png [--dark] [--width 1200]`.

Needs playwright (extra `dev`) and a Chromium on PATH.
"""

import argparse
import shutil
import sys
from pathlib import Path

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.report import render

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """Path of a Chromium-like browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def picture(
    run_dir: Path, out: Path, width: int = 1200, height: int = 0, dark: bool = False
) -> None:
    """Render the report of `run_dir` and save a picture of it; `height` 0 takes the whole page."""
    from playwright.sync_api import sync_playwright

    page_file = render(run_dir).resolve()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_browser(), headless=True, args=list(FLAGS)
        )
        page = browser.new_page(
            viewport={"width": width, "height": height or 900},
            color_scheme="dark" if dark else "light",
            device_scale_factor=1.5,
        )
        page.goto(page_file.as_uri())
        page.wait_for_selector("svg")
        page.screenshot(path=out, full_page=not height)
        browser.close()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=0, help="0: the whole page")
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    try:
        picture(args.run, args.out, args.width, args.height, args.dark)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
