"""Large images in tiles, images in files, and features that training reads from the disk."""

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import riskfield as rf
from riskfield import ImageCRF
from riskfield.estimators import image_design
from riskfield.examples import take
from riskfield.features import HOG, Colour, ColourDifference, Constant, Fourier, ImageFeatures, Position, SobelResponse
from riskfield.features.image import physical_memory
from riskfield.features.kinds import AbstractPixelFeature
from riskfield.features.window import Window, tiles

RECIPE = ImageFeatures((Constant(), Fourier((Colour(), Position())), HOG(4)), (Constant(), SobelResponse()))
# Couplings are weak enough here for the influence of a border to vanish within some ten pixels.
CHEAP = ImageFeatures((Constant(), Colour(), Position()), (Constant(), ColourDifference((0.1,))))


def blobs(number, shape, seed=0):
    """Noisy images and their labels."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 2, (number, *(-(-n // 6) for n in shape)))
    labels = np.kron(coarse, np.ones((6, 6), int))[:, : shape[0], : shape[1]]
    images = 0.5 * labels[..., None] + 0.25 * rng.normal(size=(*labels.shape, 1))
    return [*images], [*labels]


@pytest.fixture(scope="module")
def fitted():
    return ImageCRF(CHEAP, ridge=1e-2, optimiser=rf.optim.LBFGS(20)).fit(*blobs(3, (24, 30)))


@pytest.fixture
def tiled(monkeypatch):
    """Predicts every image in tiles of a given side and margin."""

    def switch(side, margin):
        monkeypatch.setattr(image_design, "TILE_SIDE", side)
        monkeypatch.setattr(image_design, "TILE_MARGIN", margin)
        monkeypatch.setattr(image_design, "_SHARE", 0.0)

    return switch


@pytest.mark.parametrize("shape", [(1, 1), (10, 18), (37, 10), (11, 64), (100, 41)])
@pytest.mark.parametrize(("side", "margin"), [(10, 0), (10, 2), (11, 5)])
def test_tiles_cover_a_map_once_with_their_margins(shape, side, margin):
    count = np.zeros(shape, int)
    for tile in tiles(shape, side, margin):
        count[tile.kept.slices] += 1
        assert tile.window.shape == (min(side, shape[0]), min(side, shape[1]))
        inside = tile.kept.inside(tile.window)
        distances = zip(inside, (0, tile.window.shape[0], 0, tile.window.shape[1]), strict=True)
        borders = zip(tile.kept, (0, shape[0], 0, shape[1]), strict=True)
        for (own, outer), (kept, end) in zip(distances, borders, strict=True):
            assert abs(own - outer) >= margin or kept == end
    assert (count == 1).all()
    with pytest.raises(ValueError, match=r"`margin` must be less than half of `side`, 4\. Got 2"):
        tiles((9, 9), 4, 2)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.37])
def test_features_of_a_window_are_those_of_the_image(scale):
    recipe = ImageFeatures(RECIPE.pixels, RECIPE.edges, scale)
    image = np.random.default_rng(0).integers(0, 256, (61, 74, 3), np.uint8)
    whole = recipe(image)
    rows, columns = whole.shape
    for window in (Window(0, 7, 0, 9), Window(5, rows, 6, 20), Window(9, 17, columns - 8, columns)):
        part, (row, column) = recipe(image, window), window.slices
        torch.testing.assert_close(part.pixels, whole.pixels[row, column], rtol=0, atol=1e-6)
        assert torch.equal(part.horizontal, whole.horizontal[row, window.left : window.right - 1])
        assert torch.equal(part.vertical, whole.vertical[window.top : window.bottom - 1, column])


@pytest.mark.parametrize("window", [None, Window(3, 27, 0, 7)])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_features_of_a_large_image_or_window_are_computed_in_bands(scale, window, monkeypatch):
    recipe = ImageFeatures(RECIPE.pixels, RECIPE.edges, scale)
    image = np.random.default_rng(0).integers(0, 256, (97, 23), np.uint8)
    whole = recipe(image, window)
    monkeypatch.setattr("riskfield.features.image._PIXELS_AT_ONCE", 7 * 23)
    sizes, compute = [], HOG.map
    monkeypatch.setattr(HOG, "map", lambda self, part: sizes.append(part.size) or compute(self, part))
    banded = recipe(image, window)
    assert len(sizes) > 1
    assert max(sizes) < (7 + 2 / scale + 2 * recipe.reach) * 23
    for name in ("pixels", "horizontal", "vertical"):
        torch.testing.assert_close(getattr(banded, name), getattr(whole, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("window", "what"), [(None, "an image"), (Window(2, 9, 5, 30), "25 x 7 cells of an image")])
def test_the_memory_of_features_counts_the_pixels_a_band_depends_on(window, what, monkeypatch):
    recipe, sizes = ImageFeatures((HOG(4),), (Constant(),), scale=0.25), []
    monkeypatch.setattr("riskfield.features.image._PIXELS_AT_ONCE", 500)
    monkeypatch.setattr(HOG, "map", lambda self, image: sizes.append(image.size) or np.zeros((*image.shape[:2], 36)))
    recipe(np.zeros((48, 160)), window)
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 24 * 36 * max(sizes))
    with pytest.raises(MemoryError, match=f"Features of {what} of 160 x 48 pixels would take about"):
        recipe(np.zeros((48, 160)), window)


@dataclass(frozen=True)
class Centred(AbstractPixelFeature):
    """A user's own feature, which depends on the whole image."""

    num_features = 1

    def map(self, image):
        return image[..., :1] - image.mean()


def test_features_without_a_reach_depend_on_the_whole_image(monkeypatch):
    recipe = ImageFeatures((Colour(), Fourier((Centred(),))), (Constant(),), scale=0.5)
    image = np.random.default_rng(0).uniform(size=(80, 90))
    assert recipe.reach is None
    whole, small = recipe(image), recipe.memory_share(image.shape, 2)
    monkeypatch.setattr("riskfield.features.image._PIXELS_AT_ONCE", 100)
    assert recipe.memory_share(image.shape, 2) == small
    assert torch.equal(recipe(image).pixels, whole.pixels)
    assert torch.equal(recipe(image, Window(1, 4, 2, 6)).pixels, whole.pixels[1:4, 2:6])
    shape, share = (3000, 3000), recipe.memory_share((3000, 3000), 2)
    available = physical_memory()
    for part, fits in ((0.9, True), (1.1, False)):
        monkeypatch.setattr("riskfield.features.image.physical_memory", lambda part=part: available * share / part)
        if fits:
            assert image_design.tiling_of(recipe, shape, 2) is None
        else:
            with pytest.raises(
                MemoryError, match=r"of 3000 x 3000 pixels .* 110% .* because `reach` of a feature is None"
            ):
                image_design.tiling_of(recipe, shape, 2)


def test_marginals_of_tiles_agree_with_those_of_the_whole_image(fitted, tiled):
    """The error of a margin decreases exponentially with its width: below 1e-1, 1e-2 and 1e-4 here."""
    (image,), _ = blobs(1, (70, 95), seed=1)
    assert fitted.tiling(image.shape) is None
    whole, states = fitted.predict_marginals([image])[0], fitted.predict([image])[0]
    for margin, bound in ((4, 1e-1), (8, 1e-2), (14, 1e-4)):
        tiled(60, margin)
        assert len(fitted.tiling(image.shape)) >= 4
        np.testing.assert_allclose(fitted.predict_marginals([image])[0], whole, rtol=0, atol=bound)
    np.testing.assert_array_equal(fitted.predict([image])[0], states)
    others = fitted.predict_marginals([image, image[:20, :20], image[:, :60]])  # large and small ones together
    np.testing.assert_array_equal(others[0], fitted.predict_marginals([image])[0])
    assert [own.shape for own in others] == [(70, 95, 2), (20, 20, 2), (70, 60, 2)]


def test_an_image_is_tiled_when_it_would_take_half_of_the_memory(fitted, monkeypatch):
    shape = (1000, 1500, 3)
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10**9)
    share = fitted.features_.memory_share(shape, 2)
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: int(2.1e9 * share))
    assert fitted.tiling(shape) is None
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: int(1.9e9 * share))
    assert len(fitted.tiling(shape)) == 6
    assert fitted.tiling((500, 600)) is None


def test_decoders_that_weigh_all_pixels_see_the_whole_image(fitted, tiled):
    (image,), _ = blobs(1, (30, 40), seed=1)
    crf = copy.copy(fitted).set_params(decoder=rf.decoders.EqualCount())
    whole = crf.predict([image])[0]
    tiled(20, 5)
    assert crf.tiling(image.shape)
    np.testing.assert_array_equal(crf.predict([image])[0], whole)


def test_images_may_be_given_as_files(fitted, tmp_path):
    rng = np.random.default_rng(0)
    paths, arrays = [tmp_path / f"{k}.png" for k in range(3)], rng.integers(0, 256, (3, 12, 14, 3), np.uint8)
    for path, array in zip(paths, arrays, strict=True):
        Image.fromarray(array).save(path)
    masks = [*rng.integers(0, 2, (3, 12, 14))]
    by_files, by_arrays = (
        ImageCRF(CHEAP, ridge=1e-2, optimiser=rf.optim.LBFGS(3)).fit(X, masks) for X in (paths, [*arrays])
    )
    np.testing.assert_array_equal(
        by_files.predict_marginals([str(paths[0])])[0], by_arrays.predict_marginals(arrays)[0]
    )
    Image.fromarray(arrays[1, :5]).save(paths[1])  # of another size
    assert [own.shape for own in by_files.predict(np.array([str(path) for path in paths]))] == [
        (12, 14),
        (5, 14),
        (12, 14),
    ]
    with pytest.raises(FileNotFoundError):
        by_files.predict([tmp_path / "none.png"])


def test_training_reads_features_from_the_disk(tmp_path, monkeypatch):
    images, masks = blobs(6, (12, 14))
    images[5], masks[5] = images[5][:1], masks[5][:1]  # one row has no vertical edges
    seen = []
    monkeypatch.setattr(ImageCRF, "_train", _spy(ImageCRF._train, seen))
    crf, other = (ImageCRF(CHEAP, optimiser=rf.optim.LBFGS(5)) for _ in range(2))
    crf.fit(images, masks)
    other.fit(images, masks, cache=tmp_path / "cache")
    plain, streamed = seen
    assert [len(block) for block in plain] == [5, 1]
    assert [len(block) for block in streamed] == [1] * 6  # a block per image, mapped to its file
    assert len({id(block.graph) for block in streamed}) == 2
    for block in streamed:
        assert {rows.dtype for rows in block.inputs.values()} == {torch.float32}
    assert len(list((tmp_path / "cache").iterdir())) == 6
    assert other.ridge_ == crf.ridge_
    for name, weights in crf.model_.state_dict().items():
        torch.testing.assert_close(other.model_.state_dict()[name], weights, rtol=1e-5, atol=1e-8)
    calls = []
    monkeypatch.setattr(ImageFeatures, "__call__", lambda *arguments: calls.append(arguments))
    ImageCRF(CHEAP, ridge=1e-2, optimiser=rf.optim.LBFGS(1)).fit(images, masks, cache=tmp_path / "cache")
    assert not calls


def _spy(train, seen):
    def recorded(self, examples, stages, **settings):
        seen.append(examples)
        return train(self, examples, stages, **settings)

    return recorded


def test_mapped_features_are_those_of_the_file(tmp_path):
    cache, image = rf.datasets.FeatureCache(tmp_path), blobs(1, (9, 11))[0][0]
    maps, mapped = cache(CHEAP, image), cache.mapped(CHEAP, image)
    for name in ("pixels", "horizontal", "vertical"):
        assert torch.equal(getattr(maps, name), getattr(mapped, name))
    (path,) = tmp_path.iterdir()
    maps_of_process = Path("/proc/self/maps")
    assert not maps_of_process.exists() or str(path) in maps_of_process.read_text()


def test_whole_blocks_are_not_copied():
    data = [rf.Examples(rf.chain(k, 2), torch.zeros(2, k, dtype=torch.int64)) for k in (3, 4)]
    first, second = take(data, [0, 1, 3])
    assert first is data[0]
    assert len(second) == 1
