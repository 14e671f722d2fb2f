"""Make the images of the documentation from a training's folder: its report, drawn by headless Chromium.

    python docs/make_images.py outputs/demo                 docs/images/*.png

Needs `pip install -e '.[report]'`, Pillow, and Chromium (or Chrome) on the path.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from hf_pipetransformer.report.report import write_report

IMAGES = Path(__file__).parent / "images"
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--virtual-time-budget=20000"),
)
WIDTH = 1180
TALLEST = 6000
COLORS = 96
"""Of a palette; figures have few, and the files become a third as large."""
PARTS = {"step": ("#step",)}
"""Image -> sections of the report."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="of a training")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        parser.error("no chromium, chromium-browser or google-chrome on the path: install one of them.")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(arguments.output_dir, Path(folder, "report.html"))
        text = page.read_text(encoding="utf-8")
        for name, sections in PARTS.items():
            page.write_text(text.replace("</style>", style_for(sections) + "</style>", 1), encoding="utf-8")
            take(browser, page, IMAGES / f"{name}.png", Path(folder))
            print(f"{IMAGES / name}.png: {(IMAGES / f'{name}.png').stat().st_size / 1024:.0f} KiB")


def style_for(sections: tuple[str, ...]) -> str:
    """Shows these sections alone; the whole page without any."""
    if not sections:
        return ""
    kept = "".join(f":not({section})" for section in sections)
    return (
        f"h1, .sub, .tiles, .notes, footer, section{kept} {{ display: none !important; }}"
        "main { padding: 8px !important; } body { background: #fff !important; }"
    )


def take(browser: str, page: Path, image: Path, folder: Path) -> None:
    """A picture of the page, cut below its last line that is not background."""
    raw = folder / "raw.png"
    profile = tempfile.mkdtemp(dir=folder)
    size = f"--window-size={WIDTH},{TALLEST}"
    subprocess.run(
        [browser, *OPTIONS, f"--user-data-dir={profile}", size, f"--screenshot={raw}", page.as_uri()],
        check=True,
        capture_output=True,
        timeout=180,
    )
    picture = Image.open(raw).convert("RGB")
    background = Image.new("RGB", picture.size, picture.getpixel((2, picture.height - 2)))
    box = ImageChops.difference(picture, background).getbbox()
    assert box is not None
    picture.crop((0, 0, picture.width, min(box[3] + 12, picture.height))).quantize(COLORS).save(image, optimize=True)


if __name__ == "__main__":
    main()
