"""Two folders of a user's own: images of unequal sizes, grey and coloured, PNG and JPEG, with masks."""

import numpy as np
from PIL import Image

SHAPES = {"a": (14, 18, 3), "b": (12, 20), "c": (16, 15, 3), "d": (14, 18, 3)}
CLASSES = {0: "ground", 200: "figure"}
IGNORE = 7
CLASS_OPTIONS = ["--class", "0=ground", "--class", "200=figure", "--ignore", "7"]


def write_folders(folder, seed=0):
    """`images` and `masks` below `folder`: a disc on darker ground, seen through noise."""
    rng = np.random.default_rng(seed)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for name, (rows, columns, *channels) in SHAPES.items():
        row, column = np.mgrid[:rows, :columns]
        disc = (row - rows / 2) ** 2 + (column - columns * rng.uniform(0.4, 0.6)) ** 2 < (rows / 3) ** 2
        level = 80 + 70 * disc[..., None] + 30 * rng.normal(size=(rows, columns, *(channels or [1])))
        pixels = np.clip(level, 0, 255).astype(np.uint8)
        image = Image.fromarray(pixels if channels else pixels[..., 0])
        image.save(folder / "images" / f"{name}.{'png' if name in 'ab' else 'jpg'}")
        mask = np.where(disc, 200, 0).astype(np.uint8)
        mask[0, :3] = IGNORE
        Image.fromarray(mask).save(folder / "masks" / f"{name}.png")
    return folder
