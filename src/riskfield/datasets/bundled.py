"""Images that come with scikit-image and need no download."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from riskfield.datasets.images import ImageSet, LabelledImage

_IMAGES = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass", "gravel"),
    *("hubble_deep_field", "immunohistochemistry", "moon", "page", "retina", "rocket", "text"),
)
_TEXTURES = ("brick", "grass", "gravel")


def bundled_images() -> ImageSet:
    """Load seventeen images of scikit-image, without labels. `denoising` makes noisy binary images of them.

    >>> images = bundled_images()
    >>> len(images), images.select(["camera"])[0].image.shape
    (17, (512, 512))
    """
    return ImageSet(_IMAGES, lambda name: LabelledImage(name, _bundled(name)))


def mosaics(count: int = 16, shape: tuple[int, int] = (120, 160), *, test: bool = False, seed: int = 0) -> ImageSet:
    """Compose grey images from patches of brick, grass and gravel. The labels are the textures.

    The patches are bounded by smooth random curves. Training images use the left halves of scikit-image's textures
    and test images the right halves, so that they have no pixels in common.

    Arguments:
        count: the number of images, by default 16.
        shape: their rows and columns, at most 512 and 256; by default (120, 160).
        test: make test images. By default training images are made.
        seed: the seed of the curves and of the positions of the patches, by default 0.

    >>> images = mosaics(4)
    >>> images, images[0].labels.shape
    (ImageSet(4 images, classes ('brick', 'grass', 'gravel')), (120, 160))
    """
    if not (1 <= shape[0] <= 512 and 1 <= shape[1] <= 256):
        raise ValueError(f"`shape` must be from 1 to 512 rows and from 1 to 256 columns. Got {shape}.")

    def read(name: str) -> LabelledImage:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        labels = _regions(shape, generator)
        image = np.zeros(shape, np.uint8)
        for label, texture in enumerate(_TEXTURES):
            half = _bundled(texture)[:, 256 * test :][:, :256]
            top, left = (int(generator.integers(0, n - k + 1)) for n, k in zip(half.shape, shape, strict=True))
            patch = half[top : top + shape[0], left : left + shape[1]]
            image[labels == label] = patch[labels == label]
        return LabelledImage(name, image, labels)

    kind = "test" if test else "train"
    return ImageSet((f"{kind}-{k:03}" for k in range(count)), read, _TEXTURES)


def _regions(shape: tuple[int, int], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return, for every pixel, the texture whose smooth random function is largest."""
    from scipy.ndimage import gaussian_filter

    functions = [gaussian_filter(generator.standard_normal(shape), sum(shape) / 20) for _ in _TEXTURES]
    return np.asarray(np.argmax(functions, axis=0), np.int64)


def _bundled(name: str) -> npt.NDArray[np.uint8]:
    import skimage.data

    image: npt.NDArray[np.uint8] = getattr(skimage.data, name)()
    return image
