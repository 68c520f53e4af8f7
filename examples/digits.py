"""Write scikit-learn's first sixty handwritten digits as PNG files, in a folder for each digit.

python examples/digits.py digits    # makes digits/0/000.png and so on
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WHITE = 16
"""The largest value of a pixel in the data set."""


def main(folder: Path, count: int = 60) -> None:
    """Write the images: 8 x 8 pixels, in the order of the data set."""
    images, digits = load_digits(return_X_y=True)
    for place, (image, digit) in enumerate(zip(images[:count], digits, strict=False)):
        file = folder / str(digit) / f"{place:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image.reshape(8, 8) * 255 / WHITE).astype(np.uint8)).save(file)
    print(f"{count} images in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
