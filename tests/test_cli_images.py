"""`riskfield fit`, `predict` and `evaluate` on a user's own two folders."""

import contextlib
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import riskfield as rf
from image_cases import CLASS_OPTIONS, CLASSES, IGNORE, SHAPES, write_folders
from riskfield.cli import COMMANDS, _command, main
from riskfield.cli._common import DtypeName
from riskfield.cli._fit_images import _largest_scale
from riskfield.cli.fit import Choices, InferenceName
from riskfield.estimators import image_crf
from riskfield.estimators.defaults import ITERATIONS, LOSS, SWEEPS
from riskfield.estimators.image_run import ImageRun
from riskfield.features.image import LARGEST_SHARE
from riskfield.learning.fit_state import FitState
from riskfield.losses.names import LOSSES

FIT = ["fit", "--images", "images", "--masks", "masks", "--iterations", "4", *CLASS_OPTIONS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of images, and a model fitted to them."""
    folder = write_folders(tmp_path_factory.mktemp("images"))
    with contextlib.chdir(folder):
        assert main([*FIT, "--quiet", "--out", "model"]) == 0
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of them to work in."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys, arguments, code=2):
    """What a command that fails says, in one line."""
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("riskfield: ")


def test_the_command_line_fits_what_python_fits(folder, capsys):
    image_set = rf.datasets.image_folder("images", "masks", classes=CLASSES, ignore=IGNORE)
    values = np.array([0, 200, -1])
    crf = rf.ImageCRF(optimiser=rf.optim.LBFGS(iterations=4))
    crf.fit([image.image for image in image_set], [values[image.labels] for image in image_set])
    run = ImageRun.load("model")
    assert repr(run.crf.inference_) == repr(crf.inference_)
    assert run.crf.features_ == crf.features_ == rf.features.ImageFeatures()
    for image in image_set:
        np.testing.assert_array_equal(
            run.crf.predict_marginals([image.image])[0], crf.predict_marginals([image.image])[0]
        )
    assert run.classes == CLASSES
    assert [len(fit.history) for fit in run.fits] == [4, 4]
    assert run.fits[1].best.objective == crf.results_[1].best.objective
    assert run.command.startswith("riskfield fit --images images --masks masks --class 0=ground")


def test_the_command_that_is_written_down_gives_the_same(folder):
    command = shlex.split(ImageRun.load("model").command)
    assert command[0] == "riskfield"
    assert main([*command[1:-1], "again", "--quiet"]) == 0
    images = [image.image for image in rf.datasets.image_folder("images")]
    for a, b in zip(*(ImageRun.load(f).crf.predict_marginals(images) for f in ("model", "again")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_predictions_are_files(folder, capsys):
    assert main(["predict", "model", "images/a.png", "images/b.png", "images/c.jpg", "--out", "out/new"]) == 0
    assert capsys.readouterr().out == "labelled 3 images\nwrote out/new\n"
    crf = ImageRun.load("model").crf
    for name in "abc":
        (image,) = (p.image for p in rf.datasets.image_folder("images").select([name]))
        with np.load(f"out/new/marginals/{name}.npz") as kept:
            np.testing.assert_allclose(kept["marginals"], crf.predict_marginals([image])[0], atol=1e-6)
            assert dict(zip(kept["values"].tolist(), kept["names"].tolist(), strict=True)) == CLASSES
        with Image.open(f"out/new/labels/{name}.png") as labels:
            np.testing.assert_array_equal(np.asarray(labels), crf.predict([image])[0])
        with Image.open(f"out/new/overlays/{name}.png") as colours:
            painted = np.asarray(colours).astype(int)
        assert painted.shape == (*SHAPES[name][:2], 3)
        # Blue over the ground, orange over the figure.
        is_figure = crf.predict([image])[0] == 200
        bluer = painted[..., 2] - painted[..., 0]
        assert bluer[~is_figure].mean() > 30 > -30 > bluer[is_figure].mean()


@pytest.fixture
def bad_images(folder):
    """Among good images an empty file, half a file, a huge image, and one with an unknown value in its mask."""
    for name in ("empty", "cut", "huge", "odd"):
        shutil.copy("images/a.png", f"images/{name}.png")
        shutil.copy("masks/a.png", f"masks/{name}.png")
    Path("images/empty.png").write_bytes(b"")
    Path("images/cut.png").write_bytes(Path("images/a.png").read_bytes()[:60])
    Image.new("1", (9000, 9000)).save("images/huge.png")
    mask = np.asarray(Image.open("masks/a.png")).copy()
    mask[0, 0] = 77
    Image.fromarray(mask).save("masks/odd.png")
    return folder


def test_one_bad_image_never_ends_a_batch(bad_images, capsys, monkeypatch):
    good = sorted(SHAPES)
    assert main(["predict", "model", "images", "--out", "x", "-q"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["riskfield"] * 3
    for line, name in zip(lines, ["images/cut.png", "images/empty.png", "images/huge.png"], strict=True):
        assert line.startswith(f"riskfield: {name} ")
    assert "at most 67108864 are read" in lines[2]
    assert sorted(path.stem for path in Path("x/labels").iterdir()) == sorted([*good, "odd"])

    data = ["--images", "images", "--masks", "masks"]
    assert main(["evaluate", "model", *data, "--json", "scores.json"]) == 2
    said = capsys.readouterr()
    for line, name in zip(said.err.splitlines(), ["cut", "empty", "huge", "odd"], strict=True):
        folder = "masks" if name == "odd" else "images"
        assert line.startswith(f"riskfield: {folder}/{name}.png ")
        assert line.count(name) == 1
    assert json.loads(Path("scores.json").read_text())["images"] == len(good)
    assert "log loss" in said.out

    assert main(["report", "model", *data, "--out", "page.html"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert Path("page.html").is_file()

    shutil.copy("images/a.png", "images/cut.png")  # all that is left can be read
    for name in ("empty", "huge", "odd"):
        Path(f"images/{name}.png").unlink()
    Image.new("L", (200, 200)).save("images/large.png")
    Image.new("L", (200, 200)).save("masks/large.png")
    with monkeypatch.context() as patch:
        patch.setattr("riskfield.features.image.physical_memory", lambda: 200 * 200 * 100 * 8)
        assert main(["report", "model", *data, "--out", "page.html"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("riskfield: large: Features of an image of 200 x 200 pixels")

    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10)
    assert main(["predict", "model", "images/a.png", "--out", "y", "-q"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("riskfield: images/a.png: Features of an image of ")


def test_predictions_can_be_evaluated_as_masks(folder, capsys):
    assert main(["predict", "model", "images", "--out", "out", "--quiet"]) == 0
    assert main(["evaluate", "model", "--images", "images", "--masks", "out/labels", "--json", "all.json", "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(Path("all.json").read_text())["error"] == 0


def test_evaluation_is_counted_right(folder, capsys):
    assert main(["evaluate", "model", "--images", "images", "--masks", "masks", "--json", "scores.json"]) == 0
    printed = capsys.readouterr().out
    scores = json.loads(Path("scores.json").read_text())
    image_set = rf.datasets.image_folder("images", "masks", classes=CLASSES, ignore=IGNORE)
    marginals = ImageRun.load("model").crf.predict_marginals([image.image for image in image_set])
    true = np.concatenate([image.labels.ravel() for image in image_set])
    beliefs = np.concatenate([m.reshape(-1, 2) for m in marginals])[true >= 0]
    true = true[true >= 0]
    assert scores["pixels"] == len(true) == sum(shape[0] * shape[1] - 3 for shape in SHAPES.values())
    assert scores["error"] == pytest.approx(np.mean(beliefs.argmax(-1) != true))
    assert scores["log_loss"] == pytest.approx(-np.log(beliefs[np.arange(len(true)), true]).mean())
    for k, name in enumerate(["ground", "figure"]):
        chosen = beliefs.argmax(-1) == k
        own = scores["classes"][k]
        assert own["name"] == name
        assert own["error"] == pytest.approx(np.mean(beliefs.argmax(-1)[true == k] != k))
        assert own["overlap"] == pytest.approx(np.sum(chosen & (true == k)) / np.sum(chosen | (true == k)))
        assert scores["confusion"][k] == [int(np.sum(beliefs.argmax(-1)[true == k] == j)) for j in range(2)]
        assert f"{name:<8}  {np.sum(true == k):>10}  {100 * own['error']:>5.1f} %" in printed
    inside = (beliefs > 0.8) & (beliefs <= 0.9)
    assert scores["reliability"]["counts"][8] == inside.sum()
    assert scores["reliability"]["means"][8] == pytest.approx(beliefs[inside].mean())
    assert scores["reliability"]["shares"][8] == pytest.approx((true[:, None] == [0, 1])[inside].mean())


def test_a_file_of_options(folder, capsys):
    Path("fit.toml").write_text(
        'images = "images"\nmasks = "masks"\nloss = "univariate-logistic"\nridge = 0.01\niterations = 2\n'
        'ignore = 7\nquiet = true\nscale = 0.5\n[class]\n0 = "ground"\n200 = "figure"\n'
    )
    assert main(["fit", "--config", "fit.toml", "--out", "half", "--ridge", "1e-2", "--iterations", "1"]) == 0
    assert capsys.readouterr().out == ""
    run = ImageRun.load("half")
    expected = {"loss": "univariate-logistic", "ridge": 0.01, "iterations": 1, "scale": 0.5, "ignore": 7}
    assert {name: run.settings[name] for name in expected} == expected
    assert run.classes == CLASSES
    assert [m.shape for m in run.crf.predict_marginals([np.zeros((9, 7))])] == [(9, 7, 2)]
    for text, message in [
        ("rige = 1", "fit.toml may set class, class-weight, device, dtype, early-stopping, every, ignore, images, "),
        ("ridge = ", "fit.toml: Invalid value (at "),
        (f"iterations = 0x{'f' * 5000}", "fit.toml: Exceeds the limit (4300 digits) for integer string conversion"),
        ('ridge = "much"', "Invalid value for '--ridge': "),
        ('loss = "hinge"', "--loss must be one of univariate-logistic, "),
    ]:
        Path("fit.toml").write_text(text)
        folders = ["--images", "images", "--masks", "masks"]
        assert message in complaint(capsys, ["fit", "--config", "fit.toml", *folders, "--out", "new"])
    assert "nowhere.toml: No such file or directory." in complaint(capsys, ["fit", "--config", "nowhere.toml"])


def test_a_run_goes_on(folder, capsys, monkeypatch):
    assert main([*FIT, "--out", "once", "--iterations", "6", "--quiet"]) == 0
    again = [*FIT, "--out", "model", "--iterations", "6"]
    with monkeypatch.context() as patch:
        patch.setattr("riskfield.cli._fit_images._read", None)  # refused before the images are read
        said = complaint(capsys, again)
    assert said == "model: already holds a run. Use --resume to continue it, or another folder."
    assert main([*again, "--resume"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == [
        "resuming in stage 2, after iteration 4; later iterations are repeated",
        "ridge: 0.001, because there are fewer than five images with labels to train on",
    ]
    assert [line.split(", objective")[0] for line in out[3:5]] == [
        "independent: 6 iterations",
        "univariate-logistic: 6 iterations",
    ]
    assert main([*again, "--resume", "--iterations", "5", "--quiet"]) == 0  # nothing is left to do
    assert ImageRun.load("model").settings["iterations"] == 6
    assert "--iterations 6" in ImageRun.load("model").command
    said = complaint(capsys, [*again, "--resume", "--sweeps", "5"])
    assert said.startswith("model holds a run with sweeps 10. It cannot be resumed with 5. To begin a new run, use")
    with Image.open("images/d.jpg") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save("images/d.jpg")
    assert "model holds a run with fingerprint of the data" in complaint(capsys, [*again, "--resume"])
    capsys.readouterr()
    assert main([*FIT, "--out", "fresh", "--resume"]) == 0  # where there is nothing yet, it begins
    assert "nothing to resume: training begins\n" in capsys.readouterr().out


class Killed(BaseException):
    """What nothing catches: to the files of a run, the end of the process."""


@pytest.mark.parametrize("end", [KeyboardInterrupt, Killed])
def test_nothing_is_lost_by_interruption(folder, end, capsys, monkeypatch):
    add = FitState.add

    def add_until_the_fourth(self, *arguments):
        if self.iteration == 3 and self.objective.loss == rf.losses.UnivariateLogistic():
            raise end
        return add(self, *arguments)

    command = [*FIT, "--out", "cut", "--every", "2", "--iterations", "6", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(FitState, "add", add_until_the_fourth)
        if end is Killed:
            with pytest.raises(Killed):
                main(command)
        else:
            assert complaint(capsys, command, code=130) == "interrupted."
    predict = ["predict", "cut", "images/a.png", "--out", "out", "--quiet"]
    if end is Killed:
        unfinished = "holds an unfinished run. Use `riskfield fit --resume` to continue it"
        assert complaint(capsys, predict) == f"cut: {unfinished}."
    else:
        assert main(predict) == 0
        assert len(ImageRun.load("cut").fits[1].history) == 3
        with monkeypatch.context() as patch:
            patch.setattr(FitState, "add", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            assert main([*command[:-1], "--out", "early"]) == 130
        assert "training ended before the stage with the loss univariate-logistic" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert main([*FIT, "--out", "once", "--iterations", "6", "--quiet"]) == 0
    cut, once = ImageRun.load("cut"), ImageRun.load("once")
    for name, value in once.crf.model_.state_dict().items():
        assert torch.equal(cut.crf.model_.state_dict()[name], value)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def damage(folder, what):
    images, masks = folder / "images", folder / "masks"
    if what == "cut":
        (images / "b.png").write_bytes((images / "b.png").read_bytes()[:200])
    elif what == "size":
        Image.fromarray(np.zeros((5, 5), np.uint8)).save(masks / "c.png")
    elif what == "value":
        mask = np.asarray(Image.open(masks / "d.png")).copy()
        mask[3, 3] = 99
        Image.fromarray(mask).save(masks / "d.png")
    elif what == "missing":
        (masks / "a.png").unlink()
    elif what == "empty":
        shutil.rmtree(images)
        images.mkdir()
    elif what == "none":
        shutil.rmtree(masks)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "images/b.png cannot be read as an image: "),
        ("size", "masks/c.png must have the size of c.jpg, 15 x 16 pixels. It has 5 x 5."),
        ("value", "masks/d.png has the value 99, which is not among the classes 0, 200, nor the ignored value 7."),
        ("missing", "--masks: masks has no mask for a.png. A mask has the name of its image. The folder holds b"),
        ("empty", "--images: images has no images (.png, .jpg,"),
        ("none", "masks: --masks must be an existing folder."),
    ],
)
def test_bad_folders_are_refused_and_nothing_is_lost(folder, capsys, what, message):
    before = (folder / "model" / "model.safetensors").read_bytes()
    damage(folder, what)
    for command in ([*FIT, "--out", "new"], [*FIT, "--out", "model", "--resume", "--iterations", "9"]):
        assert message in complaint(capsys, command)
    scores = ["evaluate", "model", "--images", "images", "--masks", "masks", "--json", "scores.json"]
    assert message in complaint(capsys, scores)
    assert not (folder / "new").exists()
    # An image that cannot be read is left out of the scores.
    assert (folder / "scores.json").exists() == (what in ("cut", "size", "value"))
    assert (folder / "model" / "model.safetensors").read_bytes() == before


def test_a_damaged_image_does_not_keep_the_others_from_being_labelled(folder, capsys):
    damage(folder, "cut")
    said = complaint(capsys, ["predict", "model", "images", "--out", "out", "--quiet"])
    assert said.startswith("images/b.png cannot be read as an image: ")
    assert sorted(path.name for path in Path("out/labels").iterdir()) == ["a.png", "c.png", "d.png"]


def jpeg_masks(folder):
    """Masks that JPEG has changed: far more than two values."""
    for path in (folder / "masks").iterdir():
        with Image.open(path) as mask:
            rng = np.random.default_rng(0)
            values = np.where(np.asarray(mask) == 200, 235, 20) + rng.integers(-20, 20, np.asarray(mask).shape)
            Image.fromarray(values.astype(np.uint8)).save(path)


PLAIN = ["fit", "--images", "images", "--masks", "masks", "--iterations", "1", "--quiet", "--out", "new"]


def test_masks_of_many_values_are_refused_with_ways_out(folder, capsys):
    jpeg_masks(folder)
    said = complaint(capsys, PLAIN)
    assert said.startswith("masks/")
    assert " different values, and all masks have " in said
    assert "at most 32 can be classes" in said
    assert "threshold" in said
    assert "levels" in said
    assert not Path("new").exists()
    assert main([*PLAIN, "--threshold", "128"]) == 0
    run = ImageRun.load("new")
    assert run.classes == {0: "0", 255: "255"}
    assert "--threshold 128" in run.command
    # Commands that read masks later read them in the same way.
    assert main(["evaluate", "new", "--images", "images", "--masks", "masks", "--quiet"]) == 0
    assert main([*PLAIN[:-1], "three", "--levels", "3"]) == 0
    assert set(ImageRun.load("three").classes) <= {0, 128, 255}
    assert "not both" in complaint(capsys, [*PLAIN[:-1], "both", "--levels", "3", "--threshold", "9"])


def test_masks_of_another_size_can_be_resized(folder):
    with Image.open("masks/a.png") as mask:
        large = mask.resize((2 * mask.width, 3 * mask.height), Image.Resampling.NEAREST)
        before = np.asarray(mask)
    large.save("masks/a.png")
    reading = rf.datasets.MaskReading(resize_masks=True)
    image_set = rf.datasets.image_folder("images", "masks", classes=CLASSES, ignore=IGNORE, reading=reading)
    assert image_set[0].name == "a"
    np.testing.assert_array_equal(image_set[0].labels, np.select([before == 0, before == 200], [0, 1], -1))
    assert main([*PLAIN, "--resize-masks"]) == 0
    assert ImageRun.load("new").reading == reading


def test_later_commands_name_the_options_of_fit(folder, capsys):
    with Image.open("masks/a.png") as mask:
        large = mask.resize((2 * mask.width, 3 * mask.height), Image.Resampling.NEAREST)
    large.save("masks/a.png")
    assert main(["evaluate", "model", "--images", "images", "--masks", "masks"]) == 2
    said = capsys.readouterr()
    assert "Set --resize-masks to resize it. Only `riskfield fit` can set this: fit again, or" in said.err
    assert "predicted classes in columns" in said.out


def test_edges_that_do_not_help_are_said(folder, capsys, monkeypatch):
    shutil.copy("images/a.png", "images/e.png")  # the fifth: one is held out
    shutil.copy("masks/a.png", "masks/e.png")
    path = image_crf.ridge_path

    def worse(*arguments, **options):
        trials, parameters = path(*arguments, **options)
        return [replace(trial, independent=trial.model - 0.1) for trial in trials], parameters

    monkeypatch.setattr(image_crf, "ridge_path", worse)
    assert main([*FIT, "--iterations", "1", "--out", "new"]) == 0
    said = capsys.readouterr().err
    assert "WARNING: on the held-out images the log loss is lower without edges." in said
    assert "choosing the ridge: training with 0.1, 1 of at most 4\n" in said
    assert "training on all images with a ridge of " in said


def test_masks_that_may_be_a_mistake_are_said(folder, capsys):
    Image.fromarray(np.zeros(SHAPES["d"][:2], np.uint8)).save("masks/d.png")
    Image.new("L", (4, 4)).save("masks/spare.png")
    assert main([*FIT, "--iterations", "1", "--quiet", "--out", "new"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "riskfield: WARNING: masks without an image in masks, which are not used: spare.png.",
        "riskfield: WARNING: the mask of d.jpg has only the class 'ground'.",
    ]


def test_features_that_do_not_fit_into_memory_are_refused_before_they_are_computed(folder, capsys, monkeypatch):
    monkeypatch.setattr("riskfield.cli._fit_images.physical_memory", lambda: 10**6)
    said = complaint(capsys, [*FIT, "--out", "new"])
    pixels = sum(shape[0] * shape[1] for shape in SHAPES.values())
    of_graphs = 800 * sum(rows * columns for rows, columns in {shape[:2] for shape in SHAPES.values()})
    needed = 12 * 142 * pixels + of_graphs
    assert said.startswith(f"The features of 4 images would take about {needed / 1e9:.3g} GB of memory, or ")
    assert "--scale 0.8" in said
    assert not Path("new").exists()


def test_an_image_too_large_to_train_on_is_named(folder, capsys, monkeypatch):
    Image.new("L", (60, 40)).save("images/large.png")
    Image.new("L", (60, 40)).save("masks/large.png")
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10**7)
    assert main([*FIT, "--out", "new"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("riskfield: images/large.png: training on 60 x 40 pixels at once would take about 131% of ")
    scale = re.search(r"Use --scale (\S+) or less", said)[1]
    assert main([*FIT, "--iterations", "1", "--ridge", "1e-2", "--out", "new", "--scale", scale]) == 0


def test_an_image_too_large_for_the_memory_is_cut_into_parts(folder, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (120, 160), np.uint8)).save("images/large.png")
    Image.fromarray(np.where(np.arange(160) < 80, 0, 200).astype(np.uint8)[None].repeat(120, 0)).save("masks/large.png")
    fit = [*FIT, "--loss", "independent", "--ridge", "1e-2", "--iterations", "20", "--quiet"]
    assert main([*fit, "--out", "whole"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10**8)
    monkeypatch.setattr("riskfield.features.image.PART_SIDE", 64)
    assert main([*fit, "--out", "parts"]) == 0
    said = capsys.readouterr().err
    assert "WARNING: too large for the memory as a whole: large.png. Training takes parts of" in said
    assert "as separate examples, 6 in all" in said
    monkeypatch.setattr("riskfield.cli._fit_images.physical_memory", lambda: 6 * 10**7)
    assert main([*fit, "--out", "disk"]) == 0
    assert "They are kept in disk/features during training" in capsys.readouterr().err
    # Without edges, training on the parts is training on the whole: their features are those of the whole image.
    monkeypatch.undo()
    os.chdir(folder)
    whole, parts, disk = (ImageRun.load(name).crf.model_.state_dict() for name in ("whole", "parts", "disk"))
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(disk[name], values, rtol=1e-4, atol=1e-4)


def test_the_suggested_scale_counts_the_memory_that_does_not_shrink(monkeypatch):
    """Features are computed at the resolution of the image, in bands that fit into a small memory."""
    for gigabytes, shape in ((2, (3000, 4000, 3)), (4, (6000, 8000, 3))):
        monkeypatch.setattr("riskfield.features.image.physical_memory", lambda gigabytes=gigabytes: gigabytes * 10**9)
        features = rf.features.ImageFeatures()
        assert features.memory_share(shape, 2) > LARGEST_SHARE
        scale = _largest_scale(features, shape, 2)
        assert scale == float(f"{scale:.2g}")
        assert rf.features.ImageFeatures(scale=scale).memory_share(shape, 2) <= LARGEST_SHARE
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10**6)
    assert _largest_scale(features, (3000, 4000, 3), 2) is None


def test_class_weights(folder, capsys):
    fit = [*FIT, "--ridge", "1e-2", "--quiet"]
    image_set = rf.datasets.image_folder("images", "masks", classes=CLASSES, ignore=IGNORE)
    images, values = [image.image for image in image_set], np.array([0, 200, -1])
    for k, (options, weights) in enumerate(
        [(["200=5"], {200: 5.0}), (["0=2", "200=0.5"], {0: 2.0, 200: 0.5}), (["balanced"], "balanced")]
    ):
        given = [word for option in options for word in ("--class-weight", option)]
        assert main([*fit, *given, "--out", f"new{k}"]) == 0
        run = ImageRun.load(f"new{k}")
        assert run.settings["class-weight"] == ", ".join(options)
        assert shlex.join(given) in run.command
        crf = rf.ImageCRF(ridge=1e-2, class_weight=weights, optimiser=rf.optim.LBFGS(iterations=4))
        crf.fit(images, [values[image.labels] for image in image_set])
        np.testing.assert_array_equal(run.crf.predict_marginals(images)[0], crf.predict_marginals(images)[0])
    for option, message in (
        ("200", "--class-weight must be balanced, or VALUE=WEIGHT once for each value. Got '200'."),
        ("²=1", "--class-weight must be balanced, or VALUE=WEIGHT once for each value. Got '²=1'."),
        ("200=0", "--class-weight must be balanced, or VALUE=WEIGHT once for each value. Got '200=0'."),
        ("7=1", "--class-weight must name values of classes, 0, 200. Got 7."),
    ):
        assert message in complaint(capsys, [*fit, "--class-weight", option, "--out", "bad"])
    likelihood = [*fit, "--loss", "surrogate-likelihood", "--class-weight", "balanced", "--out", "bad"]
    assert complaint(capsys, likelihood).startswith("--class-weight needs one of the losses univariate-logistic, ")
    assert not Path("bad").exists()


def test_early_stopping(folder, capsys):
    options = ["--early-stopping", "--validation-fraction", "0.3", "--patience", "2", "--seed", "3"]
    assert main([*FIT, "--ridge", "1e-2", "--iterations", "30", *options, "--out", "new"]) == 0
    run = ImageRun.load("new")
    assert (run.crf.early_stopping, run.crf.validation_fraction, run.crf.n_iter_no_change) == (True, 0.3, 2)
    assert all(point.validation is not None for point in run.fits[-1].history)
    assert "--early-stopping --validation-fraction 0.3 --patience 2" in run.command
    assert ImageRun.load("model").fits[-1].history[-1].validation is None
    Path("stop.toml").write_text('early-stopping = true\nclass-weight = "balanced"\nridge = 0.01\n')
    assert main([*FIT, "--config", "stop.toml", "--quiet", "--out", "other"]) == 0
    other = ImageRun.load("other").crf
    assert (other.early_stopping, other.class_weight) == (True, "balanced")
    said = complaint(capsys, [*FIT, "--validation-fraction", "1", "--out", "bad"])
    assert "--validation-fraction must be between 0 and 1. Got 1." in said


def test_features_that_do_not_fit_into_memory_are_kept_on_the_disk(folder, capsys, monkeypatch):
    fit = [*FIT, "--iterations", "3", "--ridge", "1e-2"]
    assert main([*fit, "--out", "plain"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("riskfield.cli._fit_images.physical_memory", lambda: 2 * 10**6)
    kept = []
    monkeypatch.setattr("shutil.rmtree", lambda path: kept.extend(Path(path).iterdir()))
    assert main([*fit, "--out", "streamed"]) == 0
    assert "They are kept in streamed/features during training" in capsys.readouterr().err
    assert len(kept) == len(SHAPES)
    plain, streamed = (ImageRun.load(run).crf.model_.state_dict() for run in ("plain", "streamed"))
    for name, weights in plain.items():
        torch.testing.assert_close(streamed[name], weights, rtol=1e-6, atol=1e-9)
    # A GPU with room for them keeps them itself, whatever the memory of the CPU holds beside the graphs.
    monkeypatch.setattr("riskfield.cli._fit_images.gpu_memory", lambda device: 10**8)
    assert main([*fit, "--out", "on-gpu"]) == 0
    assert capsys.readouterr().err == ""


def test_the_precision_of_a_fit(folder):
    assert main([*FIT, "--iterations", "1", "--ridge", "1e-2", "--dtype", "float32", "--quiet", "--out", "single"]) == 0
    run = ImageRun.load("single")
    assert run.crf.dtype == "float32"
    assert {weights.dtype for weights in run.crf.model_.parameters()} == {torch.float32}
    assert "--dtype float32" in run.command
    default = Choices(LOSS, InferenceName.TRW, None, SWEEPS, None, ITERATIONS, 1.0, None)
    assert [replace(default, device=device).precision.value for device in (None, "cpu", "cuda:1")] == [
        "float64",
        "float64",
        "float32",
    ]
    assert replace(default, device="cuda", dtype=DtypeName.FLOAT64).precision is DtypeName.FLOAT64


def test_the_chosen_ridge_and_the_files_are_recorded_and_printed(folder, capsys):
    for k in range(2):  # a ridge is chosen from five images on
        shutil.copy("images/a.png", f"images/more{k}.png")
        shutil.copy("masks/a.png", f"masks/more{k}.png")
    assert main([*FIT, "--iterations", "2", "--out", "new"]) == 0
    run, crf = json.loads(Path("new/run.json").read_text())["tree"], ImageRun.load("new").crf
    assert run["ridge"] == crf.ridge_
    assert [trial["ridge"] for trial in run["ridges"]] == [trial.ridge for trial in crf.path_]
    said = capsys.readouterr().out
    assert f"ridge: {crf.ridge_:g}, chosen on 1 held-out image." in said
    assert "this is the smallest ridge that is tried: compare with --ridge 1e-05" in said
    assert run["files"] == ["a.png", "b.png", "c.jpg", "d.jpg", "more0.png", "more1.png"]
    assert len(run["held out"]) == 1
    assert set(run["held out"]) < set(run["files"])
    assert ImageRun.load("new").held_out == tuple(run["held out"])
    assert ImageRun.load("new").seconds["choice of the ridge"] > 0

    assert main([*FIT, "--iterations", "2", "--early-stopping", "--validation-fraction", "0.1", "--out", "early"]) == 0
    said = capsys.readouterr()
    assert "training on the images that are not held out with a ridge of" in said.err
    assert "chosen on 1 held-out image." in said.out
    assert len(ImageRun.load("early").held_out) == 1


def test_a_likelihood_of_complete_labels_is_refused_before_training(folder, capsys):
    fit = [*FIT, "--iterations", "1", "--ridge", "0.01", "--quiet", "--out", "new"]
    said = complaint(capsys, [*fit, "--loss", "surrogate-likelihood"])
    assert said.startswith("--loss surrogate-likelihood needs a label for every pixel. The mask of a.png has pixels ")
    assert "Use --loss surrogate-em" in said
    assert not Path("new").exists()
    # On a coarser grid the few unknown labels do not count.
    assert main([*fit[:-1], "coarse", "--loss", "surrogate-likelihood", "--scale", "0.3"]) == 0
    # A folder in which nothing was trained does not block.
    Path("new/checkpoint/stage-00").mkdir(parents=True)
    shutil.copy("model/run.json", "new/run.json")
    assert main([*fit, "--loss", "surrogate-em"]) == 0


def test_the_classes_are_printed_before_training(folder, capsys):
    assert main([*FIT, "--iterations", "1", "--ridge", "0.01", "--out", "new"]) == 0
    assert capsys.readouterr().out.startswith("4 images. Pixels by class: ground (0) 7")


def binary_masks(folder, odd=()):
    """Masks of 0 and 1; those in `odd` of 0 and 255."""
    for path in (folder / "masks").iterdir():
        with Image.open(path) as mask:
            figure = np.isin(np.asarray(mask), [1, 200, 255])
        Image.fromarray(np.where(figure, 255 if path.stem in odd else 1, 0).astype(np.uint8)).save(path)


def test_values_that_may_not_be_classes_are_said(folder, capsys):
    plain = [*PLAIN, "--ridge", "0.01"]
    binary_masks(folder, odd="b")
    assert main(plain) == 0
    said = capsys.readouterr().err
    assert "WARNING: no mask has both 1 and 255, and 255 occurs only in the masks of b.png." in said
    assert "use --threshold 1." in said
    assert main([*plain[:-1], "0.1", "--threshold", "1", "--out", "two"]) == 0
    assert capsys.readouterr().err == ""
    binary_masks(folder)
    shutil.copy("images/a.png", "images/e.png")
    with Image.open("masks/a.png") as mask:
        Image.fromarray(np.where(np.asarray(mask) == 1, 9, 0).astype(np.uint8)).save("masks/e.png")
    assert main([*plain[:-1], "0.1", "--out", "rare"]) == 0
    assert "WARNING: the value 9 occurs only in 1 mask of 5, of e.png. It is a class now." in capsys.readouterr().err


def test_classes_that_a_threshold_makes_impossible_are_refused_once(folder, capsys):
    binary_masks(folder)
    classes = ["--class", "0=ground", "--class", "1=figure"]
    said = complaint(capsys, [*PLAIN, "--threshold", "1", *classes])
    assert said == "--class must name values that masks have after --threshold 1, which are 0 and 255. Got 1."
    said = complaint(capsys, [*PLAIN, "--levels", "3", "--ignore", "100"])
    assert said == "--ignore must name values that masks have after --levels 3, which are 0, 128 and 255. Got 100."


def test_masks_that_lose_their_classes_are_said(folder, capsys):
    assert main([*PLAIN, "--threshold", "128"]) == 0
    binary_masks(folder)
    for command in (["evaluate", "new"], ["report", "new", "--out", "page.html"]):
        assert main([*command, "--images", "images", "--masks", "masks", "--quiet"]) == 0
        said = capsys.readouterr().err
        assert "WARNING: no mask in masks has the class '255', because they are read as in training, with " in said
        assert "--threshold 128. Their files have values from 0 to 1. If" in said


def test_a_name_with_a_dot_is_named_once(folder, capsys):
    shutil.copy("images/a.png", "images/a.v2.png")
    with Image.open("masks/a.png") as mask:
        Image.fromarray(np.where(np.asarray(mask) == 200, 99, 0).astype(np.uint8)).save("masks/a.v2.png")
    assert complaint(capsys, [*FIT, "--out", "new"]).startswith("masks/a.v2.png has the value 99, which")


def test_the_model_of_a_command_is_loaded_in_python(folder):
    image = np.zeros((9, 7))
    marginals = [rf.ImageCRF.load(path).predict_marginals([image])[0] for path in ("model", "model/model.safetensors")]
    np.testing.assert_array_equal(*marginals)
    with pytest.raises(FileNotFoundError, match=r"holds no fitted model, model.safetensors: 'masks'"):
        rf.ImageCRF.load("masks")


def test_all_bad_images_are_reported_before_training(bad_images, capsys):
    assert main([*FIT, "--out", "new"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [
        "images/cut.png",
        "images/empty.png",
        "images/huge.png",
        "masks/odd.png",
    ]
    assert not Path("new").exists()


def test_a_missing_path_never_ends_a_batch(folder, capsys):
    Path("empty").mkdir()
    assert main(["predict", "model", "nowhere.png", "images/a.png", "empty", "--out", "out"]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "riskfield: nowhere.png: No such file or folder."
    assert said.err.splitlines()[1].startswith("riskfield: empty has no images (")
    assert "labelled 1 image\n" in said.out
    assert Path("out/labels/a.png").is_file()
    assert main(["predict", "model", "nowhere.png", "--out", "none"]) == 2
    assert not Path("none").exists()


def test_values_that_jpeg_has_changed_are_explained(folder, capsys, monkeypatch):
    for name in SHAPES:
        mask = np.asarray(Image.open(f"masks/{name}.png"))
        Path(f"masks/{name}.png").unlink()
        Image.fromarray(mask).save(f"masks/{name}.jpg", quality=60)
    monkeypatch.setattr("riskfield.cli._fit_images._SHOWN", 1)
    assert main([*FIT, "--out", "new"]) == 2
    said, more = capsys.readouterr().err.splitlines()
    assert "which are not among the classes" in said
    assert (
        "JPEG and smooth resizing change the values of masks. To group them into classes, set --threshold (two " in said
    )
    assert more == "riskfield: 3 more images or masks cannot be used."


def test_large_images_are_labelled_in_tiles(folder, capsys, monkeypatch):
    assert main(["predict", "model", "images/a.png", "--out", "whole", "-q"]) == 0
    monkeypatch.setattr("riskfield.estimators.image_tiles.TILE_SIDE", 12)
    monkeypatch.setattr("riskfield.estimators.image_tiles.TILE_MARGIN", 3)
    monkeypatch.setattr("riskfield.estimators.image_tiles._SHARE", 0.0)
    assert main(["predict", "model", "images/a.png", "--out", "tiled", "-q"]) == 0
    assert "images/a.png: 18 x 14 pixels would take more than half of the memory" in capsys.readouterr().err
    whole, tiled = (np.load(f"{out}/marginals/a.npz")["marginals"] for out in ("whole", "tiled"))
    assert tiled.shape == whole.shape
    assert 0 < np.abs(tiled - whole).max() < 0.1


@pytest.mark.parametrize("name", COMMANDS)
def test_all_commands_take_a_device_and_a_number_of_threads(name):
    options = {option for parameter in _command(name).params for option in parameter.opts}
    assert {"--device", "--threads", "--quiet"} <= options


def test_the_number_of_threads_is_an_option(folder):
    before, own = rf.get_num_threads(), torch.get_num_threads()
    try:
        assert main(["predict", "model", "images/a.png", "--out", "out", "--quiet", "--threads", "1"]) == 0
        assert (rf.get_num_threads(), torch.get_num_threads()) == (1, 1)
    finally:
        rf.set_num_threads(before)
        torch.set_num_threads(own)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_folders_that_cannot_be_written(folder, capsys):
    Path("file").write_text("not a folder")
    for command in ([*FIT, "--out", "file/model"], ["predict", "model", "images", "--out", "file/out"]):
        assert "Not a directory" in complaint(capsys, command)
    scores = ["evaluate", "model", "--images", "images", "--masks", "masks", "--json", "file/scores.json"]
    assert "Not a directory" in complaint(capsys, scores)
    Path("locked").mkdir(mode=0o500)
    if os.access("locked", os.W_OK):
        pytest.skip("permissions do not stop this user")
    for command in ([*FIT, "--out", "locked"], ["predict", "model", "images", "--out", "locked"]):
        assert "Permission denied" in complaint(capsys, command)
    assert not any(Path("locked").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--out", "x"], "Missing option '--images'."),
        (["fit", "--images", "images", "--out", "x"], "Missing option '--masks'."),
        ([*FIT, "--checkpoint", "c", "--out", "x"], "No such option: --checkpoint"),
        ([*FIT, "--loss", "hinge", "--out", "x"], "--loss must be one of univariate-logistic, "),
        ([*FIT, "--class", "figure", "--out", "x"], "--class must be VALUE=NAME, such as 255=horse. Got 'figure'."),
        ([*FIT, "--class", "²=figure", "--out", "x"], "--class must be VALUE=NAME, such as 255=horse. Got '²=figure'."),
        ([*FIT, "--class", "0=other", "--out", "x"], "--class must not repeat a value or a name. Got '0=other' again."),
        ([*FIT, "--class", "9=sky", "--out", "x"], "masks: no mask has the value 9 of the class 'sky'."),
        ([*FIT, "--scale", "2", "--out", "x"], "--scale must be above 0 and at most 1. Got 2."),
        ([*FIT, "--rho", "0", "--out", "x"], "--rho must be a probability above 0 and at most 1. Got 0."),
        ([*FIT, "--rho", "2", "--out", "x"], "--rho must be a probability above 0 and at most 1. Got 2."),
        ([*FIT, "--inference", "bp", "--rho", "1", "--out", "x"], "--rho applies to trw. Got --inference bp."),
        (["predict", "masks", "images", "--out", "x"], "masks: holds no fitted model."),
        (["predict", "model", "nothing.png", "--out", "x"], "nothing.png: No such file or folder."),
        (["predict", "model", "images", "images/a.png", "--out", "x"], "IMAGES must have different names. Got images"),
    ],
)
def test_bad_usage(folder, capsys, arguments, message):
    assert message in complaint(capsys, arguments)
    assert not (folder / "x").exists()


def test_results_do_not_replace_images(folder, capsys):
    shutil.copytree("images", "labels")
    said = complaint(capsys, ["predict", "model", "labels/a.png", "--out", "."])
    assert "--out . would overwrite labels/a.png." in said


def test_a_damaged_run(folder, capsys):
    predict = ["predict", "model", "images", "--out", "x"]
    account = Path("model/run.json")
    whole = json.loads(account.read_text())

    def changed(**entries):
        account.write_text(json.dumps({**whole, "tree": {**whole["tree"], **entries}}))
        return complaint(capsys, predict)

    first = whole["tree"]["fits"][0]
    assert "run.json is damaged: ValueError('`best` must be one of" in changed(fits=[{**first, "best": 10**6}])
    assert "run.json is damaged: TypeError(" in changed(fits=[{**first, "history": 5}])
    assert "run.json is damaged: ValueError(" in changed(seconds={"fit": "long"})
    assert "run.json is damaged: TypeError(" in changed(classes=[3])
    assert "run.json is damaged: it holds no settings." in changed(settings=[])
    account.write_text('{"format": 2, "kind": "run", "tree": {"settings": {}}}')
    assert "model/run.json is damaged: KeyError('classes')" in complaint(capsys, predict)
    account.write_text('{"format": 2, "kind": "run", "tree": {}}')
    assert "run.json is damaged: it holds no settings." in complaint(capsys, [*FIT, "--out", "model", "--resume"])
    account.write_text("{")
    assert "run.json is damaged: Expecting property name" in complaint(capsys, predict)
    account.write_text("[" * 10**5)
    assert "run.json is damaged: it is nested more than 64 levels deep." in complaint(capsys, predict)
    Path("model/model.safetensors").write_bytes(b"nothing")
    assert "is not a safetensors file, or only part of one" in complaint(capsys, predict)


def test_classes_without_names_are_called_by_their_values(folder):
    assert main(["fit", "--images", "images", "--masks", "masks", "--iterations", "1", "-q", "--out", "plain"]) == 0
    run = ImageRun.load("plain")
    assert run.classes == {0: "0", 7: "7", 200: "200"}
    with pytest.raises(ValueError, match=r"`classes` must name the labels of `crf`, \[0, 7, 200\]"):
        ImageRun("plain", run.crf, CLASSES)


def test_values_above_255(folder):
    for path in Path("masks").iterdir():
        with Image.open(path) as mask:
            wide = np.asarray(mask).astype(np.uint16)
        Image.fromarray(np.where(wide == 200, 1000, wide).astype(np.uint16)).save(path)
    fit = ["fit", "--images", "images", "--masks", "masks", "--ignore", "7", "--iterations", "1", "-q", "--out", "wide"]
    assert main(fit) == 0
    assert main(["predict", "wide", "images/a.png", "--out", "out", "-q"]) == 0
    with Image.open("out/labels/a.png") as labels:
        assert set(np.unique(np.asarray(labels))) <= {0, 1000}
        assert labels.mode == "I;16"


def test_the_defaults_are_those_of_the_estimator(folder):
    """Each is written once, and the command's own objects equal them."""
    choices = Choices(LOSS, InferenceName.TRW, None, SWEEPS, None, ITERATIONS, 1.0, None).objects()
    crf = rf.ImageCRF()
    assert choices["loss"] == crf.loss
    assert choices["loss"] in LOSSES
    assert choices["ridge"] == crf.ridge
    assert {stage.optimiser for stage in crf.stages()} == {choices["optimiser"]}
    assert {repr(stage.inference) for stage in crf.stages()} == {repr(choices["inference"])}
    for name in ("class_weight", "early_stopping", "validation_fraction", "n_iter_no_change"):
        assert choices[name] == getattr(crf, name)


def test_divergence_is_said(folder, capsys):
    steep = [*FIT, "--loss", "surrogate-em", "--sweeps", "1", "--ridge", "0", "--iterations", "40", "--out", "steep"]
    assert main(steep) == 0
    assert "riskfield: Training diverged" in capsys.readouterr().err
