"""Draw images with questions and answers about them, to try rows with images.

    python -m scripts.draw_images FOLDER [--rows N] [--seed S]

writes `FOLDER/rows.jsonl` and the images that it names: shapes, plots and rendered text. They are
no photographs: scales for a server need images like those that it gets.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

try:
    from PIL import Image, ImageDraw
except ImportError:
    raise SystemExit('draw_images needs Pillow: pip install ".[images]"') from None

_COLOURS = ("red", "green", "blue", "orange", "purple", "black", "teal", "brown")
_WORDS = ("scale", "amax", "cache", "token", "layer", "head", "image", "number", "kernel", "engine")
_SIZES = ((224, 224), (320, 240), (256, 384))

Drawn = tuple[Image.Image, str, str]
"""An image, a question about it, and the answer."""


def main() -> None:
    """Draw, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_rows(options.folder, options.rows, options.seed)


def write_rows(folder: Path, count: int, seed: int = 0) -> Path:
    """Write `count` rows with their images; the same for the same seed. Gives the file of rows."""
    rng = random.Random(seed)  # noqa: S311  pictures, not secrets
    lines = []
    for number in range(count):
        draw = (draw_shapes, draw_plot, draw_text)[number % 3]
        image, question, answer = draw(rng)
        name = f"{number:03}.png"
        image.save(folder / name)
        asked = [{"type": "image", "image": name}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def draw_shapes(rng: random.Random) -> Drawn:
    """Draw a few shapes that may overlap."""
    image, pen = _open(rng)
    width, height = image.size
    names = []
    for _ in range(rng.randint(1, 4)):
        colour = rng.choice(_COLOURS)
        kind = rng.choice(("circle", "square"))
        size = rng.randint(width // 8, width // 3)
        x, y = rng.randint(0, width - size), rng.randint(0, height - size)
        shape: Callable[..., None] = pen.ellipse if kind == "circle" else pen.rectangle
        shape((x, y, x + size, y + size), fill=colour)
        names.append(f"a {colour} {kind}")
    return image, "Which shapes are in this image?", f"There is {' and '.join(names)}."


def draw_plot(rng: random.Random) -> Drawn:
    """Draw a bar chart."""
    image, pen = _open(rng)
    width, height = image.size
    values = [rng.randint(1, 9) for _ in range(5)]
    step = width // (len(values) + 1)
    for place, value in enumerate(values):
        left = step // 2 + place * step
        top = height - 20 - value * (height - 40) // 9
        pen.rectangle((left, top, left + step // 2, height - 20), fill=rng.choice(_COLOURS))
        pen.text((left, height - 16), str(value), fill="black")
    told = ", ".join(map(str, values))
    return image, "Read the bars from left to right.", f"The bars show {told}."


def draw_text(rng: random.Random) -> Drawn:
    """Render a few words."""
    image, pen = _open(rng)
    words = [rng.choice(_WORDS) for _ in range(rng.randint(3, 8))]
    for place, word in enumerate(words):
        pen.text((12, 10 + 22 * place), word, fill=rng.choice(_COLOURS))
    return image, "What is written here?", f"It says: {' '.join(words)}."


def _open(rng: random.Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    light = tuple(rng.randint(200, 255) for _ in range(3))
    image = Image.new("RGB", rng.choice(_SIZES), light)
    return image, ImageDraw.Draw(image)


if __name__ == "__main__":
    main()
