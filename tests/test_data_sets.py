"""Public data sets in small copies of their layouts; noise; splits; images that need no download."""

import gzip
import struct

import numpy as np
import pytest
from PIL import Image

import riskfield as rf
from riskfield.datasets.backgrounds import stanford_background
from riskfield.datasets.berkeley import bsds500
from riskfield.datasets.bundled import bundled_images, mosaics
from riskfield.datasets.horses import weizmann_horses
from riskfield.datasets.mnist import mnist
from riskfield.datasets.noise import BimodalNoise, GaussianNoise, PowerNoise, ReassignmentNoise, binarise, denoising
from riskfield.datasets.shapes import draw_shapes, noisy_shapes
from riskfield.datasets.splits import Split, folds, read_splits, spread, write_splits

RNG = np.random.default_rng(0)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, quality=95)


def random_bytes(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


LOADERS = {
    "BSDS500": (bsds500, r"BSDS500.data.images.train", "BSR_bsds500.tgz"),
    "horses": (weizmann_horses, r"weizmann_horse_db.rgb", "weizmann_horse_db.tar.gz"),
    "backgrounds": (stanford_background, r"iccv09Data.images", "iccv09Data.tar.gz"),
    "MNIST": (mnist, r"MNIST.raw", "-ubyte.gz"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_missing_data_sets_tell_what_to_download_and_where_to_put_it(name, tmp_path, monkeypatch):
    load, path, archive = LOADERS[name]
    with pytest.raises(
        rf.errors.MissingDataError, match=rf"{tmp_path}.{path} does not exist\. Download it from https?://"
    ) as caught:
        load(tmp_path)
    assert archive in str(caught.value)
    assert f"unpack it in {tmp_path}, which then contains" in str(caught.value)
    monkeypatch.delenv("RISKFIELD_DATA", raising=False)
    with pytest.raises(rf.errors.MissingDataError, match=r"environment variable RISKFIELD_DATA.*Download it from"):
        load()
    monkeypatch.setenv("RISKFIELD_DATA", str(tmp_path))
    with pytest.raises(rf.errors.MissingDataError, match=f"is missing: {tmp_path}"):
        load()


def test_berkeley(tmp_path):
    images = tmp_path / "BSDS500" / "data" / "images"
    for subset, name, shape in [("train", "8143", (16, 24)), ("train", "12003", (24, 16)), ("val", "3096", (16, 24))]:
        save(images / subset / f"{name}.jpg", random_bytes(*shape, 3))
    (images / "val" / "Thumbs.db").write_bytes(b"left behind")
    image_set = bsds500(tmp_path)
    assert image_set.names == ("3096", "8143", "12003")  # by number
    assert [image.image.shape for image in image_set] == [(16, 24, 3), (16, 24, 3), (24, 16, 3)]
    assert image_set[0].labels is None
    assert bsds500(tmp_path, ["val"]).names == ("3096",)
    with pytest.raises(rf.errors.MissingDataError, match=r"images.test"):
        bsds500(tmp_path, ["test"])
    with pytest.raises(ValueError, match=r"`subsets` must be some of \('train', 'val', 'test'\). Got \['validation'\]"):
        bsds500(tmp_path, ["validation"])
    (images / "test").mkdir()
    with pytest.raises(rf.errors.MissingDataError, match="BSDS500 has no images"):
        bsds500(tmp_path, ["test"])


def test_horses(tmp_path):
    folder = tmp_path / "weizmann_horse_db"
    mask = np.full((20, 30), 90, np.uint8)  # nothing but half tells the two levels apart
    mask[5:15, 8:24] = 170
    for name, shape in {"horse001": (40, 60, 3), "horse002": (16, 24, 3), "horse318": (40, 60, 3)}.items():
        smooth = np.broadcast_to(np.linspace(0, 255, shape[1]).astype(np.uint8)[None, :, None], shape)
        save(folder / "rgb" / f"{name}.jpg", smooth * np.uint8(name != "horse318"))
        save(folder / "figure_ground" / f"{name}.jpg", mask)
    image_set = weizmann_horses(tmp_path)
    assert image_set.names == ("horse001", "horse002")  # horse318 is black
    assert image_set.classes == ("ground", "horse")
    for image in image_set:
        np.testing.assert_array_equal(image.labels, mask > 127)
        assert image.image.shape == (20, 30, 3)
        # A ramp stays a ramp, whether it is made smaller or larger.
        np.testing.assert_allclose(image.image[10, :, 1], (np.arange(30) + 0.5) / 30, atol=0.04)
    save(folder / "rgb" / "horse318.jpg", random_bytes(40, 60, 3))
    assert "horse318" in weizmann_horses(tmp_path).names
    save(folder / "rgb" / "horse001.jpg", random_bytes(60, 40, 3))
    with pytest.raises(
        rf.errors.FileFormatError,
        match=r"horse001: mask and photograph must have the same aspect ratio. Got \(\d+, \d+\) and",
    ):
        weizmann_horses(tmp_path)[0]
    (folder / "figure_ground" / "horse002.jpg").unlink()
    with pytest.raises(rf.errors.MissingDataError, match="has no mask for horse002"):
        weizmann_horses(tmp_path)


@pytest.fixture
def background(tmp_path):
    """A data set of two images; gives its root, the file of the first labels, and these."""
    labels = RNG.integers(-3, 8, (6, 9))
    (tmp_path / "iccv09Data" / "labels").mkdir(parents=True)
    for name in ("0000047", "0000051"):
        save(tmp_path / "iccv09Data" / "images" / f"{name}.jpg", random_bytes(6, 9, 3))
        lines = [" ".join(map(str, row)) + " " for row in labels]
        (tmp_path / "iccv09Data" / "labels" / f"{name}.regions.txt").write_text("\n".join(lines) + "\n")
    return tmp_path, tmp_path / "iccv09Data" / "labels" / "0000047.regions.txt", labels


def test_backgrounds(background):
    root, _, labels = background
    image_set = stanford_background(root)
    assert image_set.names == ("0000047", "0000051")
    assert image_set.classes[0] == "sky"
    assert len(image_set.classes) == 8
    np.testing.assert_array_equal(image_set[0].labels, np.where(labels < 0, -1, labels))
    assert image_set[0].labels.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1 2\n3 4\n", "must have lines with the same number of integers"),
        ("0 1 x\n", "must have lines with the same number of integers"),
        (f"0 1 {'9' * 30}\n", "must have lines with the same number of integers"),
        ("0 1 8\n", "must have labels from 0 to 7. Got 8"),
        ("0 1 2\n", r"must have the shape \(6, 9\) of 0000047.jpg. Got \(1, 3\)"),
        ("", r"must have the shape \(6, 9\)"),
    ],
)
def test_damaged_labels(background, text, message):
    root, path, _ = background
    path.write_text(text)
    with pytest.raises(rf.errors.FileFormatError, match=f"0000047.regions.txt {message}"):
        stanford_background(root)[0]
    path.unlink()
    with pytest.raises(rf.errors.MissingDataError, match="has no labels for 0000047"):
        stanford_background(root)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def test_mnist(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images, digits = random_bytes(5, 28, 28), np.arange(5, dtype=np.uint8)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    with pytest.raises(rf.errors.MissingDataError, match=r"t10k-labels-idx1-ubyte.gz"):
        mnist(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(digits))  # unpacked will do
    loaded = mnist(tmp_path)
    np.testing.assert_array_equal(loaded.images, images)
    assert loaded.digits.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(rf.errors.MissingDataError, match=r"train-images-idx3-ubyte.gz"):
        mnist(tmp_path, train=True)
    for content, message in [
        (gzip.compress(idx(images))[:-20], "is a damaged gzip file"),
        (b"nothing", "is a damaged gzip file"),
        (gzip.compress(idx(digits)), "must begin as an IDX file of bytes with 3 axes"),
        (gzip.compress(idx(images)[:-1]), "must have 3920 values. It has 3919"),
        (gzip.compress(idx(images[:4])), "has 4 images but 5 labels"),
    ]:
        (folder / "t10k-images-idx3-ubyte.gz").write_bytes(content)
        with pytest.raises(rf.errors.FileFormatError, match=message):
            mnist(tmp_path)


BINARY = np.repeat([0, 1], 100_000)


@pytest.mark.parametrize("exponent", [1.0, 1.25, 5.0])
def test_power_noise(exponent):
    noisy = PowerNoise(exponent)(BINARY, np.random.default_rng(0))
    assert noisy.min() >= 0
    assert noisy.max() <= 1
    # E t^n = 1 / (n + 1), and t^n > 1/2 with probability 1 - 2^(-1/n).
    for label in (0, 1):
        away = abs(noisy[label == BINARY] - label)
        assert away.mean() == pytest.approx(1 / (exponent + 1), abs=0.005)
        assert (away > 0.5).mean() == pytest.approx(1 - 2 ** (-1 / exponent), abs=0.006)


def test_gaussian_and_bimodal_noise():
    noisy = GaussianNoise()(BINARY, np.random.default_rng(0))
    assert (noisy - BINARY).std() == pytest.approx(0.3, rel=0.01)
    assert (noisy - BINARY).mean() == pytest.approx(0, abs=0.005)
    noise = BimodalNoise(zero=((0.0, 0.01), (1.0, 0.02)), one=((5.0, 0.01), (7.0, 0.05)))
    noisy = noise(BINARY, np.random.default_rng(0))
    for label, low, high, deviation in [(0, 0.0, 1.0, 0.02), (1, 5.0, 7.0, 0.05)]:
        own = noisy[label == BINARY]
        upper = own[own > (low + high) / 2]
        assert len(upper) / len(own) == pytest.approx(0.5, abs=0.01)
        assert upper.mean() == pytest.approx(high, abs=0.01)
        assert upper.std() == pytest.approx(deviation, rel=0.02)


def test_reassignment_noise():
    noisy = ReassignmentNoise(0.3)(BINARY, np.random.default_rng(0))
    assert set(np.unique(noisy)) == {0.0, 1.0}
    assert (noisy != BINARY).mean() == pytest.approx(0.15, abs=0.005)


def test_noise_is_checked():
    with pytest.raises(ValueError, match=r"`exponent` must be at least 1. Got 0.5"):
        PowerNoise(0.5)
    with pytest.raises(ValueError, match="`deviation` must not be negative"):
        GaussianNoise(-1)
    with pytest.raises(ValueError, match="`rate` must be from 0 to 1"):
        ReassignmentNoise(2)


def test_binarise_turns_and_shrinks_and_cuts_at_the_mean():
    upright = np.zeros((480, 320, 3), np.uint8)
    upright[:240] = 200
    labels = binarise(upright, (200, 300))
    assert labels.shape == (200, 300)
    assert labels.mean() == 0.5
    assert (labels == labels[0]).all()  # what was above is now beside
    lying = np.zeros((321, 481))
    lying[:, 240:] = 1
    labels = binarise(lying, (200, 300))
    assert (labels == labels[0]).all()
    assert labels[0, :149].sum() == 0
    assert labels[0, 151:].all()
    assert binarise(upright).shape == (480, 320)
    assert binarise(np.array([[0, 0, 0, 100]], np.uint8)).tolist() == [[0, 0, 0, 1]]


def test_denoising_depends_on_names_and_seed_alone():
    image_set = bundled_images()
    both = denoising(image_set.select(["camera", "moon"]), PowerNoise(1.25), shape=(20, 30))
    alone = denoising(image_set.select(["moon"]), PowerNoise(1.25), shape=(20, 30))
    assert both.classes == ("0", "1")
    np.testing.assert_array_equal(both[1].image, alone[0].image)
    np.testing.assert_array_equal(both[1].image, both[1].image)
    # What moved a pixel away from its label is another thing in every image.
    moved = [abs(image.image - image.labels) for image in both]
    assert (moved[0] != moved[1]).all()
    other = denoising(image_set.select(["moon"]), PowerNoise(1.25), shape=(20, 30), seed=1)
    np.testing.assert_array_equal(other[0].labels, alone[0].labels)
    assert (other[0].image != alone[0].image).all()
    assert both[0].image.shape == (20, 30)


def test_bundled_images_are_there():
    image_set = bundled_images()
    for image in image_set:
        assert image.image.dtype == np.uint8
        assert min(image.image.shape[:2]) >= 128
        assert 0.02 < binarise(image.image).mean() < 0.98


def test_mosaics():
    image_set, testing = mosaics(3), mosaics(3, test=True)
    textures = {p.name: p.image for p in bundled_images().select(image_set.classes)}
    for some, first in [(image_set, 0), (testing, 256)]:
        for image in some:
            assert image.image.shape == image.labels.shape == (120, 160)
            assert set(np.unique(image.labels)) <= {0, 1, 2}
        # The patch of one label is found in its half of its texture.
        label = int(np.bincount(some[0].labels.ravel()).argmax())
        inside = some[0].labels == label
        half = textures[some.classes[label]][:, first : first + 256]
        windows = np.lib.stride_tricks.sliding_window_view(half, (120, 160))
        rows, columns = np.nonzero(inside)
        few = slice(None, None, len(rows) // 20)
        matches = (windows[:, :, rows[few], columns[few]] == some[0].image[rows[few], columns[few]]).all(-1)
        assert matches.any()
    np.testing.assert_array_equal(mosaics(1)[0].image, image_set[0].image)
    assert (mosaics(1, seed=1)[0].labels != image_set[0].labels).any()
    with pytest.raises(ValueError, match="`shape` must be from 1 to 512 rows and from 1 to 256 columns"):
        mosaics(1, (96, 300))


def test_the_stand_in_for_kumar_and_hebert():
    clean = draw_shapes()
    assert len(clean) == 4
    for image in clean:
        assert image.shape == (64, 64)
        assert 0.2 < image.mean() < 0.6
        smooth = (image[:, 1:] == image[:, :-1]).mean()
        assert smooth > 0.9  # pieces, not dust
    image_set, split = noisy_shapes(GaussianNoise())
    assert len(image_set) == 200
    assert (len(split.train), len(split.test)) == (10, 190)
    np.testing.assert_array_equal(image_set.select(split.train)[3].labels, clean[0])
    np.testing.assert_array_equal(image_set[-1].labels, clean[3])
    assert (image_set[0].image != image_set[1].image).all()


def test_splits(tmp_path):
    names = [f"{k:02}" for k in range(30)]
    split = spread(names, 7, 12)
    assert (len(split.train), len(split.test)) == (7, 12)
    assert set(split.train) | set(split.test) < set(names)
    five = folds(names[:11], 5)
    assert sorted(name for fold in five for name in fold.test) == names[:11]
    assert all(set(fold.train) == set(names[:11]) - set(fold.test) for fold in five)
    write_splits(tmp_path / "splits.json", five, "as it comes")
    assert read_splits(tmp_path / "splits.json") == five
    for damaged in ('{"splits": [{"train": ["a"]}]}', "[" * 100_000):
        (tmp_path / "splits.json").write_text(damaged)
        with pytest.raises(rf.errors.FileFormatError, match="must have the format of `write_splits`"):
            read_splits(tmp_path / "splits.json")
    with pytest.raises(ValueError, match=r"must not repeat a name. Got \['a'\] more than once"):
        Split(("a", "b"), ("a",))
    with pytest.raises(ValueError, match=r"together at most 30. Got 31"):
        spread(names, 20, 11)
    with pytest.raises(ValueError, match=r"`count` must be from 2 to the number of names, 30. Got 1"):
        folds(names, 1)
