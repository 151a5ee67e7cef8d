"""Features of images, compared with independent computations."""

import itertools
import time

import numpy as np
import pytest
import torch
from skimage.color import rgb2gray
from skimage.feature import hog
from skimage.filters import sobel

import riskfield as rf
from riskfield.estimators.registry import SAVED
from riskfield.features.hog import dense_hog
from riskfield.features.image import as_floats
from riskfield.features.kinds import THRESHOLDS
from riskfield.features.resample import reduce_labels, resize
from riskfield.io.codec import read_tree, write_tree


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 256, (12, 17, 3), np.uint8)


def test_colour_position_and_intensity(image):
    recipe = rf.features.ImageFeatures(
        pixels=(rf.features.Colour(), rf.features.Position(), rf.features.Intensity(), rf.features.Constant())
    )
    pixels = recipe(image).pixels
    assert recipe.num_pixel_features == pixels.shape[-1] == 7
    torch.testing.assert_close(pixels[5, 3, :3], torch.from_numpy(image[5, 3] / 255).float())
    torch.testing.assert_close(pixels[5, 3, 3:5], torch.tensor([5.5 / 12, 3.5 / 17]))
    torch.testing.assert_close(pixels[..., 5], torch.from_numpy(rgb2gray(image)).float())
    assert (pixels[..., 6] == 1).all()


def test_grey_images_have_the_same_number_of_features(image):
    recipe = rf.features.ImageFeatures()
    grey, coloured = recipe(image[..., 0]), recipe(np.repeat(image[..., :1], 3, axis=-1))
    for name in ("pixels", "horizontal", "vertical"):
        torch.testing.assert_close(getattr(grey, name), getattr(coloured, name))
    assert torch.equal(recipe(image[..., :1]).pixels, grey.pixels)


def test_fourier_has_all_binary_vectors(image):
    s = np.concatenate([rf.features.Colour().map(image / 255), rf.features.Position().map(image / 255)], axis=-1)
    expanded = rf.features.Fourier().map(image / 255)
    assert expanded.shape[-1] == rf.features.Fourier().num_features == 64
    for k, c in enumerate(itertools.product((0, 1), repeat=5)):
        np.testing.assert_allclose(expanded[..., k], np.sin(s @ c), atol=1e-14)
        np.testing.assert_allclose(expanded[..., 32 + k], np.cos(s @ c), atol=1e-14)


@pytest.mark.parametrize("channels", [1, 3])
def test_hog_equals_scikit_image_on_its_lattice(channels):
    image = np.random.default_rng(1).random((40, 56, channels))
    blocks = hog(image, 9, (8, 8), (2, 2), "L2-Hys", feature_vector=False, channel_axis=-1)
    dense = dense_hog(image, 8)
    assert dense.shape == (40, 56, 36)
    # scikit-image sums in single precision.
    np.testing.assert_allclose(dense[8:-7:8, 8:-7:8], blocks.reshape(*blocks.shape[:2], 36), rtol=0, atol=1e-6)


def test_hog_at_any_pixel_depends_only_on_its_neighbourhood():
    image = np.random.default_rng(2).random((40, 40, 1))
    for row, column in [(9, 9), (13, 22), (30, 17)]:
        # Keep one more pixel on every side, because the gradient at the border of an image differs.
        cut = image[row - 9 : row + 9, column - 9 : column + 9]
        np.testing.assert_allclose(dense_hog(image, 8)[row, column], dense_hog(cut, 8)[9, 9], atol=1e-10)


def test_hog_of_a_flat_image_is_zero_and_tiny_images_work():
    assert (dense_hog(np.full((20, 20, 3), 0.7), 8) == 0).all()
    for shape in [(1, 1), (1, 5), (3, 2)]:
        features = rf.features.ImageFeatures()(np.random.default_rng(0).random(shape))
        assert features.pixels.shape == (*shape, 100)
        assert torch.isfinite(features.pixels).all()
        assert features.horizontal.shape == (shape[0], shape[1] - 1, 21)


def test_edge_features(image):
    recipe = rf.features.ImageFeatures()
    features = recipe(image)
    values, response = image / 255, sobel(rgb2gray(image))
    for way, (down, right) in {"horizontal": (0, 1), "vertical": (1, 0)}.items():
        edges = getattr(features, way)
        assert edges.shape == (12 - down, 17 - right, recipe.num_edge_features)
        for r, c in [(0, 0), (7, 4), (10, 15)]:
            distance = np.sqrt(((values[r, c] - values[r + down, c + right]) ** 2).sum())
            strongest = max(response[r, c], response[r + down, c + right])
            expected = [1, *(distance > t for t in THRESHOLDS), *(strongest > t for t in THRESHOLDS)]
            assert edges[r, c].tolist() == expected
    assert len(THRESHOLDS) == 10


def test_doubled_edges_and_typed_inputs_are_the_same_model(image):
    recipe = rf.features.ImageFeatures()
    features = recipe(image)
    graph = rf.grid(*features.shape, num_states=3)
    assert features.edges.shape == (graph.num_factors, 42)
    b = recipe.num_edge_features
    doubled = rf.LinearModel(3, recipe.num_pixel_features, 2 * b)
    typed = rf.LinearModel(3, recipe.num_pixel_features, {"horizontal": b, "vertical": b})
    weights = torch.randn(9, 2 * b, dtype=torch.float64)
    with torch.no_grad():
        doubled.factors["factors"].weight.copy_(weights)
        typed.factors["horizontal"].weight.copy_(weights[:, :b])
        typed.factors["vertical"].weight.copy_(weights[:, b:])
    nodes = features.inputs()["nodes"]
    torch.testing.assert_close(
        doubled(graph, {"nodes": nodes, "factors": features.edges.double()}), typed(graph, features.inputs())
    )


def test_coarse_features_are_means_and_edges_compare_means():
    image = np.random.default_rng(3).random((20, 30, 3))
    recipe = rf.features.ImageFeatures(edges=(rf.features.Constant(), rf.features.ColourDifference()), scale=0.2)
    assert recipe.shape(20, 30) == (4, 6)
    features = recipe(image)
    fine = rf.features.ImageFeatures()(image).pixels
    means = fine.double().reshape(4, 5, 6, 5, 100).mean((1, 3))
    torch.testing.assert_close(features.pixels.double(), means, rtol=0, atol=1e-6)
    colours = image.reshape(4, 5, 6, 5, 3).mean((1, 3))
    distance = np.linalg.norm(colours[:, 1:] - colours[:, :-1], axis=-1)
    np.testing.assert_array_equal(features.horizontal[..., 1:], distance[..., None] > np.array(THRESHOLDS))


def test_invalid_images():
    recipe = rf.features.ImageFeatures()
    for wrong in [np.zeros((3, 4, 2)), np.zeros(5), np.zeros((0, 4)), np.zeros((2, 3, 4, 3))]:
        with pytest.raises(ValueError, match="`image` must have shape"):
            recipe(wrong)
    with pytest.raises(ValueError, match="`image` must be of type uint8, uint16, bool or floating"):
        recipe(np.zeros((3, 4), np.int64))
    with pytest.raises(ValueError, match=r"`image` must hold finite numbers. Got NaN or infinity."):
        recipe(np.full((3, 4), np.nan))
    assert as_floats(np.array([[65535, 0]], np.uint16)).ravel().tolist() == [1, 0]
    assert as_floats(np.array([[True, False]])).ravel().tolist() == [1, 0]


def test_invalid_recipes():
    with pytest.raises(ValueError, match="`scale` must be above 0 and at most 1"):
        rf.features.ImageFeatures(scale=0)
    with pytest.raises(TypeError, match="`pixels` must be a tuple of objects of type AbstractPixelFeature"):
        rf.features.ImageFeatures(pixels=(rf.features.ColourDifference(),))
    with pytest.raises(TypeError, match="`edges` must be a tuple"):
        rf.features.ImageFeatures(edges=())
    with pytest.raises(ValueError, match="`cell` must be an integer from 1 to 1024"):
        rf.features.HOG(0)
    with pytest.raises(ValueError, match="`thresholds` must be a tuple of finite numbers"):
        rf.features.SobelResponse(())
    with pytest.raises(ValueError, match="`of` must have between 1 and 12 features"):
        rf.features.Fourier((rf.features.HOG(),))
    assert rf.features.ImageFeatures() == rf.features.ImageFeatures() != rf.features.ImageFeatures(scale=0.5)


def test_recipes_can_be_kept_with_a_model(tmp_path):
    recipe = rf.features.ImageFeatures(
        pixels=(
            rf.features.Constant(),
            rf.features.Intensity(),
            rf.features.Fourier((rf.features.Colour(), rf.features.Position())),
            rf.features.HOG(4),
        ),
        edges=(rf.features.Constant(), rf.features.ColourDifference((0.1, 0.2)), rf.features.SobelResponse()),
        scale=0.2,
    )
    write_tree(tmp_path / "model", "recipe", {"features": recipe}, SAVED)
    assert read_tree(tmp_path / "model", "recipe", SAVED)["features"] == recipe


def test_features_of_a_photograph_take_well_under_a_second():
    image = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    recipe = rf.features.ImageFeatures()
    recipe(image[:20, :20])  # imports
    seconds = []
    for _ in range(3):
        start = time.process_time()
        recipe(image)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1


@pytest.mark.parametrize(("old", "new"), [(6, 3), (7, 3), (5, 4), (9, 1), (4, 4)])
def test_coarser_maps_are_means_by_area(old, new):
    values = torch.rand(old, old, 2, dtype=torch.float64)
    # If every pixel is repeated `new` times, each coarse pixel is a block of `old` whole pixels.
    fine = values.repeat_interleave(new, 0).repeat_interleave(new, 1)
    expected = fine.reshape(new, old, new, old, 2).mean((1, 3))
    torch.testing.assert_close(resize(values, (new, new)), expected)


@pytest.mark.parametrize("shape", [(13, 9), (5, 31), (12, 3)])
def test_finer_maps_are_interpolated(shape):
    values = torch.rand(2, 5, 3, 4, dtype=torch.float64)
    expected = torch.nn.functional.interpolate(
        values.movedim(-1, 1), shape, mode="bilinear", align_corners=False
    ).movedim(1, -1)
    torch.testing.assert_close(resize(values, shape), expected)


@pytest.mark.parametrize("shape", [(3, 2), (17, 11), (17, 2)])
def test_resized_marginals_stay_normalised_and_carry_gradients(shape):
    marginals = torch.rand(6, 5, 3, dtype=torch.float64).softmax(-1).requires_grad_()
    resized = resize(marginals, shape)
    torch.testing.assert_close(resized.sum(-1), torch.ones(shape, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda m: resize(m, shape), marginals)


def test_reduced_labels():
    labels = torch.tensor([[0, 0, 1, 1], [1, 2, -1, -1], [1, 0, 2, 2], [0, 1, 2, -1]])
    assert reduce_labels(labels, (2, 2)).tolist() == [[0, 1], [0, 2]]  # a tie goes to the smaller, -1 last
    assert reduce_labels(labels, (4, 4)) is labels
    assert reduce_labels(torch.full((5, 7), -1), (2, 3)).tolist() == [[-1] * 3] * 2
    assert reduce_labels(torch.tensor([[0, 1, 2]]), (1, 2)).tolist() == [[0, 2]]  # pixel 1 is cut in half
    with pytest.raises(ValueError, match="`shape` must not be larger than that of the labels"):
        reduce_labels(labels, (5, 4))
    with pytest.raises(ValueError, match="`labels` must be integers of shape"):
        reduce_labels(labels.double(), (2, 2))


def test_resize_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="`values` must be floats of shape"):
        resize(torch.zeros(3, 3), (2, 2))
    with pytest.raises(ValueError, match="`shape` must be two positive lengths"):
        resize(torch.zeros(3, 3, 1), (0, 2))
