"""Images from folders, their features on the disk, and examples of them."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image

import riskfield as rf
from riskfield.datasets.images import read_image, read_mask
from riskfield.features.kinds import AbstractPixelFeature
from riskfield.features.resample import reduce_labels
from riskfield.io import codec

RNG = np.random.default_rng(0)
RECIPE = rf.features.ImageFeatures(
    pixels=(rf.features.Constant(), rf.features.Colour()),
    edges=(rf.features.Constant(), rf.features.ColourDifference()),
)


def save(path, array, mode=None, **options):
    path.parent.mkdir(exist_ok=True)
    image = Image.fromarray(np.asarray(array))
    (image.convert(mode) if mode else image).save(path, **options)


def random_bytes(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


@pytest.fixture
def folders(tmp_path):
    """Images of two sizes, grey and coloured, PNG and JPEG, with masks of 0, 128, 255 and 7 for nothing."""
    images, masks = tmp_path / "images", tmp_path / "masks"
    save(images / "a.png", random_bytes(6, 8, 3))
    save(images / "b.jpg", random_bytes(5, 9))
    save(images / "c.JPG", random_bytes(6, 8, 3))
    for name, shape in {"a": (6, 8), "b": (5, 9), "c": (6, 8)}.items():
        mask = RNG.choice(np.array([0, 128, 255], np.uint8), shape)
        mask[0, :2] = 7
        save(masks / f"{name}.png", mask)
    (images / "notes.txt").write_text("not an image")
    (images / "._a.png").write_bytes(b"what some systems leave behind")
    return images, masks


def test_a_folder_of_images_and_a_folder_of_masks(folders):
    image_set = rf.datasets.image_folder(*folders, ignore=7)
    assert image_set.names == ("a", "b", "c")
    assert image_set.classes == ("0", "128", "255")
    assert [image.image.shape for image in image_set] == [(6, 8, 3), (5, 9), (6, 8, 3)]
    mask = read_mask(folders[1] / "b.png")
    labels = image_set[1].labels
    assert labels[0, :2].tolist() == [-1, -1]
    for label, value in enumerate([0, 128, 255]):
        np.testing.assert_array_equal(labels == label, mask == value)
    with Image.open(folders[0] / "a.png") as image:
        np.testing.assert_array_equal(image_set[0].image, np.asarray(image))


def test_classes_give_the_order_of_labels(folders):
    image_set = rf.datasets.image_folder(*folders, classes={255: "sky", 128: "tree", 0: "road"}, ignore=7)
    assert image_set.classes == ("sky", "tree", "road")
    mask = read_mask(folders[1] / "a.png")
    np.testing.assert_array_equal(image_set[0].labels == 0, mask == 255)


def test_without_masks_there_are_no_labels(folders):
    image_set = rf.datasets.image_folder(folders[0])
    assert image_set.classes == ()
    assert image_set[2].labels is None
    with pytest.raises(ValueError, match=r"`images` must have labels. a has none"):
        rf.datasets.image_examples(image_set, RECIPE, 2)


def test_folders_that_will_not_do(folders, tmp_path):
    images, masks = folders
    with pytest.raises(FileNotFoundError, match=r"`images` must be an existing folder: .*nowhere"):
        rf.datasets.image_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"`masks`: .*empty has no images \(.png"):
        rf.datasets.image_folder(images, tmp_path / "empty")
    image_set = rf.datasets.image_folder(images, masks, classes={0: "0", 128: "1", 255: "2"})
    with pytest.raises(
        rf.errors.FileFormatError, match=r"a.png has the value 7, which is not among the classes 0, 128, 255"
    ):
        image_set[0]
    image_set = rf.datasets.image_folder(images, masks, classes={1: "1"}, ignore=7)
    with pytest.raises(rf.errors.FileFormatError, match=r"0, 128, 255, which .* nor the ignored value 7"):
        image_set[0]
    with pytest.raises(ValueError, match=r"`ignore` must not be one of the classes 0, 7. Got 7"):
        rf.datasets.image_folder(images, masks, classes={0: "0", 7: "1"}, ignore=7)
    (masks / "b.png").rename(masks / "d.png")
    with pytest.raises(ValueError, match=r"has no mask for b.jpg. A mask has the name of its image"):
        rf.datasets.image_folder(images, masks)
    save(images / "a.bmp", random_bytes(6, 8))
    with pytest.raises(ValueError, match=r"`images`: .* has both a.bmp and a.png"):
        rf.datasets.image_folder(images)
    save(tmp_path / "one" / "x.png", random_bytes(3, 3))
    save(tmp_path / "none" / "x.png", np.full((3, 3), 9, np.uint8))
    with pytest.raises(ValueError, match="has no labels other than 9, which is ignored"):
        rf.datasets.image_folder(tmp_path / "one", tmp_path / "none", ignore=9)


def test_a_mask_of_another_size(folders):
    images, masks = folders
    save(masks / "b.png", np.zeros((9, 5), np.uint8))
    image_set = rf.datasets.image_folder(images, masks, ignore=7)
    with pytest.raises(
        rf.errors.FileFormatError, match=r"b.png must have the size of b.jpg, 9 x 5 pixels. It has 5 x 9"
    ):
        image_set[1]


@pytest.mark.parametrize("kept", [0, 20, 120])
def test_damaged_images(folders, kept):
    path = folders[0] / "a.png"
    path.write_bytes(path.read_bytes()[:kept])
    image_set = rf.datasets.image_folder(*folders, ignore=7)
    with pytest.raises(rf.errors.FileFormatError, match=r"a.png cannot be read as an image"):
        image_set[0]
    mask = folders[1] / "a.png"
    mask.write_bytes(b"no image at all")
    with pytest.raises(rf.errors.FileFormatError, match=r"masks.a.png cannot be read as an image"):
        rf.datasets.image_folder(*folders, ignore=7)


@pytest.mark.parametrize("error", [AssertionError, BufferError, RecursionError, StopIteration, MemoryError])
def test_whatever_a_decoder_raises_is_named(folders, monkeypatch, error):
    def fail(self):
        raise error

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(rf.errors.FileFormatError, match=rf"a.png cannot be read as an image: {error.__name__}"):
        read_image(folders[0] / "a.png")


def test_an_image_whose_directory_is_nowhere(tmp_path):
    """A TIFF file of 64 bits that names a place that no file has: the system refuses to go there."""
    (tmp_path / "a.tif").write_bytes(b"II+\0\x08\0\0\0" + b"\0" * 7 + b"\x7f")
    with pytest.raises(rf.errors.FileFormatError, match=r"a.tif cannot be read as an image"):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize(("side", "read"), [(9000, read_image), (9000, read_mask), (15000, read_image)])
def test_a_small_file_of_many_pixels_is_refused_before_they_are_read(tmp_path, monkeypatch, side, read):
    """Pillow alone reads 81 megapixels, and warns of or refuses 225."""
    path = tmp_path / "bomb.png"
    Image.new("1", (side, side)).save(path)
    assert path.stat().st_size < 40_000
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("the pixels are read"))
    with pytest.raises(
        rf.errors.FileFormatError, match=r"bomb.png (has 9000 x 9000 pixels; at most 67108864 are|cannot be)"
    ):
        read(path)


def test_features_that_would_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10**6)
    assert rf.features.ImageFeatures()(np.zeros((15, 20))).shape == (15, 20)
    with pytest.raises(MemoryError, match=r"of 20 x 30 pixels would take about 0.00178 GB; this machine has 0.001 GB"):
        rf.features.ImageFeatures()(np.zeros((30, 20)))


def test_modes_of_images(tmp_path):
    colour, grey = random_bytes(4, 5, 3), random_bytes(4, 5)
    save(tmp_path / "rgba.png", np.dstack([colour, grey]))
    save(tmp_path / "la.png", np.dstack([grey, grey]))
    save(tmp_path / "palette.png", (colour // 128) * 255, "P")
    save(tmp_path / "one.png", (grey > 99) * np.uint8(255), "1")
    save(tmp_path / "deep.png", grey.astype(np.uint16) * 257)
    np.testing.assert_array_equal(read_image(tmp_path / "rgba.png"), colour)
    np.testing.assert_array_equal(read_image(tmp_path / "la.png"), grey)
    np.testing.assert_array_equal(read_image(tmp_path / "palette.png"), (colour // 128) * 255)
    np.testing.assert_array_equal(read_image(tmp_path / "one.png"), (grey > 99) * 255)
    deep = read_image(tmp_path / "deep.png")
    assert deep.dtype == np.uint16
    np.testing.assert_array_equal(deep, grey * 257.0)


def test_images_are_turned_as_their_camera_says(tmp_path):
    turned = random_bytes(4, 6)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    save(tmp_path / "photo.png", turned, exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "photo.png"), np.rot90(turned, -1))


def test_modes_of_masks(tmp_path):
    values = RNG.integers(0, 5, (4, 6)).astype(np.uint8)
    palette = Image.fromarray(values)
    palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9, 0, 0, 0])
    palette.save(tmp_path / "palette.png")
    save(tmp_path / "grey.png", np.repeat(values[..., None], 3, axis=-1))
    save(tmp_path / "opaque.png", np.dstack([values] * 3 + [np.full_like(values, 255)]))
    save(tmp_path / "deep.png", values.astype(np.uint16) * 1000)
    save(tmp_path / "colour.png", random_bytes(4, 6, 3))
    save(tmp_path / "transparent.png", np.dstack([values] * 4))
    with Image.open(tmp_path / "palette.png") as image:
        assert image.mode == "P"
    np.testing.assert_array_equal(read_mask(tmp_path / "palette.png"), values)
    np.testing.assert_array_equal(read_mask(tmp_path / "grey.png"), values)
    np.testing.assert_array_equal(read_mask(tmp_path / "opaque.png"), values)
    np.testing.assert_array_equal(read_mask(tmp_path / "deep.png"), values * 1000.0)
    for name, mode in (("colour", "RGB"), ("transparent", "RGBA")):
        with pytest.raises(
            rf.errors.FileFormatError, match=rf"must be an image of one channel to be a mask. It has the mode {mode}\."
        ):
            read_mask(tmp_path / f"{name}.png")


def test_sets_are_sequences():
    def read(name):
        return rf.datasets.LabelledImage(name, np.zeros((2, 2)))

    image_set = rf.datasets.ImageSet("abcd", read, ["x"])
    assert image_set[-1].name == "d"
    assert image_set[1:3].names == ("b", "c")
    assert image_set[1:3].classes == ("x",)
    assert [image.name for image in image_set.select("db")] == ["d", "b"]
    assert image_set.map(lambda p: rf.datasets.LabelledImage(p.name, p.image + 1))[0].image.max() == 1
    with pytest.raises(KeyError, match="The set has no e, f"):
        image_set.select("afe")
    with pytest.raises(IndexError):
        image_set[4]
    with pytest.raises(ValueError, match="`names` must differ"):
        rf.datasets.ImageSet("aa", read)
    with pytest.raises(ValueError, match="`labels` of a must have the shape of its image"):
        rf.datasets.LabelledImage("a", np.zeros((2, 3)), np.zeros((3, 2), np.int64))


def test_examples_of_images(folders):
    image_set = rf.datasets.image_folder(*folders, ignore=7)
    blocks = rf.datasets.image_examples(image_set, RECIPE, 3)
    assert [len(block) for block in blocks] == [2, 1]  # a and c; b
    np.testing.assert_array_equal(blocks[0].labels[1], image_set[2].labels.ravel())
    np.testing.assert_array_equal(blocks[1].labels[0], image_set[1].labels.ravel())
    for name, value in RECIPE(image_set[2].image).inputs().items():
        assert torch.equal(blocks[0].inputs[name][1], value)
    edges = RECIPE.num_edge_features
    model = rf.LinearModel(3, RECIPE.num_pixel_features, {"horizontal": edges, "vertical": edges})
    fitted = rf.fit(
        model,
        blocks,
        rf.losses.UnivariateLogistic(),
        rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps=3, tol=None), rf.Unroll()),
        optimiser=rf.optim.LBFGS(iterations=5),
        progress=False,
    )
    assert fitted.best.risk < np.log(3)
    with pytest.raises(ValueError, match=r"labels below `num_states`, 2. a has the label 2"):
        rf.datasets.image_examples(image_set, RECIPE, 2)


def test_examples_at_a_lower_resolution(folders):
    recipe = rf.features.ImageFeatures(pixels=(rf.features.Colour(),), edges=(rf.features.Constant(),), scale=0.5)
    image_set = rf.datasets.image_folder(*folders, ignore=7)
    (first, _) = rf.datasets.image_examples(image_set, recipe, 3, dtype=torch.float32)
    assert first.graph.num_variables == 12
    assert torch.equal(first.labels[0], reduce_labels(torch.from_numpy(image_set[0].labels), (3, 4)).flatten())
    assert first.inputs["nodes"].dtype == torch.float32


@pytest.fixture
def calls(monkeypatch):
    """The images whose features are computed."""
    images, compute = [], rf.features.ImageFeatures.__call__

    def recorded(self, image, window=None):
        images.append(image)
        return compute(self, image, window)

    monkeypatch.setattr(rf.features.ImageFeatures, "__call__", recorded)
    return images


def same(first, second):
    return all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in ("pixels", "horizontal", "vertical")
    )


def test_the_cache_computes_once(tmp_path, calls):
    recipe, image = rf.features.ImageFeatures(), random_bytes(9, 7, 3)
    first = rf.datasets.FeatureCache(tmp_path / "new" / "folder")(recipe, image)
    second = rf.datasets.FeatureCache(tmp_path / "new" / "folder")(recipe, image.copy())
    assert len(calls) == 1
    assert same(first, second)
    assert same(first, rf.features.ImageFeatures()(image))
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1


def test_the_key_changes_with_recipe_and_image(tmp_path):
    cache, image = rf.datasets.FeatureCache(tmp_path), random_bytes(6, 6)
    other = image.copy()
    other[3, 3] ^= 1
    recipes = [
        RECIPE,
        rf.features.ImageFeatures(pixels=RECIPE.pixels, edges=RECIPE.edges, scale=0.5),
        rf.features.ImageFeatures(pixels=(rf.features.Constant(),), edges=RECIPE.edges),
        rf.features.ImageFeatures(pixels=RECIPE.pixels, edges=(rf.features.ColourDifference((0.1,)),)),
        rf.features.ImageFeatures(pixels=RECIPE.pixels, edges=(rf.features.ColourDifference((0.1000000001,)),)),
    ]
    for recipe in recipes:
        cache(recipe, image)
    image_set = [other, image.reshape(4, 9), image.astype(np.uint16), image / 255]
    for one in image_set:
        assert same(cache(RECIPE, one), RECIPE(one))
    assert len(list(tmp_path.iterdir())) == len(recipes) + len(image_set)


@dataclass(frozen=True)
class Shifted(AbstractPixelFeature):
    """A user's own feature, whose repr leaves out its setting."""

    by: float = field(repr=False)
    num_features = 1

    def map(self, image):
        return image[..., :1] + self.by


class Unnamed(Shifted):
    """No dataclass itself, so that its settings are unknown."""


def test_the_key_changes_with_the_fields_of_own_features(tmp_path):
    cache, image = rf.datasets.FeatureCache(tmp_path), np.zeros((2, 2))
    for by in (1.0, 2.0):
        assert (cache(rf.features.ImageFeatures((Shifted(by),)), image).pixels == by).all()
    for odd in (Unnamed(1.0), Shifted(np.zeros(2)), rf.features.Fourier((Unnamed(1.0),))):
        with pytest.raises(TypeError, match=r"A `cache` needs features that are dataclasses.* Got "):
            cache(rf.features.ImageFeatures((odd,)), image)


def features_of(rows, columns, dtype=torch.float32):
    """The content of a file that is whole, and has features of an image of this size."""
    shapes = (rows, columns, 100), (rows, columns - 1, 21), (rows - 1, columns, 21)
    parts = zip(("pixels", "horizontal", "vertical"), shapes, strict=True)
    return codec.pack("features", {name: torch.zeros(shape, dtype=dtype) for name, shape in parts})


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "foreign", "size", "dtype"])
def test_damaged_files_are_computed_again(tmp_path, damage, calls):
    cache, recipe, image = rf.datasets.FeatureCache(tmp_path), rf.features.ImageFeatures(), random_bytes(6, 6)
    right = cache(recipe, image)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    damaged = {
        "cut": content[:-100],
        "empty": b"",
        "flip": content,
        "foreign": b"something else" * 9,
        "size": features_of(6, 5),
        "dtype": features_of(6, 6, torch.float64),
    }
    path.write_bytes(damaged[damage])
    assert same(cache(recipe, image), right)
    assert len(calls) == 2
    assert same(cache(recipe, image), right)
    assert len(calls) == 2  # it was mended


KILLED = """
import os, sys, numpy as np
import riskfield as rf
os.replace = lambda *names: os._exit(9)  # dies before the file is in place
rf.datasets.FeatureCache(sys.argv[1])(rf.features.ImageFeatures(), np.zeros((5, 5)))
"""


def test_a_killed_writer_leaves_no_file_to_be_read(tmp_path, calls):
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120, check=False)
    assert ran.returncode == 9
    rf.datasets.FeatureCache(tmp_path)(rf.features.ImageFeatures(), np.zeros((5, 5)))
    assert len(calls) == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions stop")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            rf.datasets.FeatureCache(tmp_path)(RECIPE, np.zeros((5, 5)))
    finally:
        tmp_path.chmod(0o700)


def test_examples_with_a_cache_are_the_same(folders, tmp_path):
    image_set = rf.datasets.image_folder(*folders, ignore=7)
    plain = rf.datasets.image_examples(image_set, RECIPE, 3)
    for _ in range(2):
        cached = rf.datasets.image_examples(image_set, RECIPE, 3, cache=rf.datasets.FeatureCache(tmp_path / "cache"))
        for one, other in zip(plain, cached, strict=True):
            assert torch.equal(one.inputs["horizontal"], other.inputs["horizontal"])
    assert len(list((tmp_path / "cache").iterdir())) == 3
