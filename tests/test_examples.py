"""The examples and the scripts of the gallery run, on small inputs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

# The examples run, on small inputs.


pytest.importorskip("matplotlib")
pytest.importorskip("skimage")

Script = dict[str, Any]  # the names a script defines
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def denoise() -> Script:
    return runpy.run_path(str(EXAMPLES / "denoise.py"))


def test_denoise_writes_a_image_and_a_table(
    denoise: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.image import imread

    path = tmp_path / "out.png"
    denoise["main"](["--out", str(path), "--size", "16", "--seed", "3"])
    printed = capsys.readouterr().out
    assert imread(path).shape == (495, 990, 4)
    assert printed.rstrip().endswith(f"wrote {path}")
    for name in ("mean field", "loopy BP", "TRW(0.5)"):
        assert name in printed


def test_denoise_likelihood_is_a_density(denoise: Script) -> None:
    """The unary potentials are log p(y | x) up to one constant: they integrate to it for both labels."""
    import numpy as np

    import riskfield as rf

    # Midpoints of equal shares of s^(1/n), so that the peak at s = 0 is integrated well.
    edges = np.linspace(0, 1, 20001) ** denoise["NOISE"]
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    for label, y in ((0, middle), (1, 1 - middle)):
        graph = rf.grid(1, len(y), num_states=2, tied=True)
        theta = denoise["potentials"](graph, y[None])
        density = graph.node_views(theta)[0][:, label].exp().numpy() / denoise["NOISE"]
        assert np.sum(density * width) == pytest.approx(1, abs=1e-3)


def test_denoise_beats_the_threshold_and_bounds_are_ordered(denoise: Script) -> None:
    import riskfield as rf

    truth = denoise["load_truth"](16)
    noisy = denoise["add_noise"](truth, seed=0)
    graph = rf.grid(len(truth), len(truth[0]), num_states=2, tied=True)
    theta = denoise["potentials"](graph, noisy)
    outcomes = {name: denoise["run"](graph, theta, algo, truth) for name, algo in denoise["ALGORITHMS"].items()}
    thresholded = ((noisy > 0.5) != truth).mean()
    assert all(outcome.error < thresholded for outcome in outcomes.values())
    assert outcomes["mean field"].log_partition < outcomes["TRW(0.5)"].log_partition


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "3"], "--size must be at least 4. Got 3."),
        (["--seed", "-1"], "--seed must not be negative. Got -1."),
        (["--out", "demo.jpg"], "--out must name a .png file. Got demo.jpg."),
        (["--out", "nowhere/demo.png"], "--out must be in an existing folder."),
    ],
)
def test_denoise_refuses_bad_options(
    denoise: Script, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        denoise["main"](arguments)
    assert message in capsys.readouterr().err


def test_gradient_methods_agree_at_convergence_and_only_unroll_is_right_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = runpy.run_path(str(EXAMPLES / "gradient_methods.py"))
    script["main"](side=5, num_states=2, entries=20)
    printed = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in printed]
    converged, truncated = ({row[0]: row[1:] for row in part} for part in (rows[2:10], rows[12:]))
    assert list(truncated) == list(converged)[:-1]
    assert converged.pop("Envelope()")[0] == "no gradient"
    for name, (univariate, likelihood, milliseconds) in converged.items():
        assert max(float(univariate), float(likelihood)) < (1e-4 if name == "Perturb(1)" else 1e-6)
        assert float(milliseconds) > 0
    without, missed, _ = truncated.pop("Unroll()")
    assert float(without) < 1e-8
    assert missed == "the same"
    for without, missed, _ in truncated.values():
        assert without == "refused"
        assert float(missed) > 1e-4


def test_demo_compares_five_losses_on_unseen_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EXAMPLES / "demo.py"))
    outcomes = script["main"](["--out", str(tmp_path), "--size", "8", "--iterations", "1"])
    printed = capsys.readouterr().out
    train, test = (set(line.split(" on ")[1].split(", ")) for line in printed.splitlines()[:2])
    assert not train & test
    assert len(train | test) == 17
    assert printed.rstrip().endswith(f"Open this page in a browser:\n{tmp_path / 'index.html'}")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.index("demo.png") < page.index("<table>") < page.index("What was done")
    for outcome in outcomes:
        assert f"<td>{outcome.title}</td><td>{100 * outcome.errors.mean():.1f} ± " in page
    likelihood, univariate = outcomes[2], outcomes[4]
    gap = univariate.log_losses - likelihood.log_losses
    assert f"<td>{gap.mean():+.3f} ± {gap.std(ddof=1) / len(gap) ** 0.5:.3f}</td>" in page
    assert all((tmp_path / name).is_file() for name in ("demo.png", "report.html"))


def test_textures_writes_a_page_with_three_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EXAMPLES / "textures.py"))
    (tmp_path / "demo" / "train" / "images").mkdir(parents=True)  # left by an earlier run
    script["main"](["--out", str(tmp_path / "demo"), "--size", "16", "--iterations", "1"])
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(f"Open this page in a browser:\n{tmp_path / 'demo' / 'report.html'}")
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    for name in ("surrogate-likelihood", "univariate-logistic", "clique-logistic"):
        assert f"Marginals, {name}" in page
    assert len(list((tmp_path / "demo" / "predicted" / "labels").iterdir())) == 8
    with pytest.raises(SystemExit):
        script["main"](["--size", "2"])
    assert "--size must be from 8 to 192. Got 2." in capsys.readouterr().err


@pytest.fixture(scope="module")
def segmentation() -> Script:
    return runpy.run_path(str(EXAMPLES / "segmentation.py"))


def test_segmentation_scenes_are_in_order_and_sky_looks_like_water(segmentation: Script) -> None:
    images, labels = segmentation["scenes"](20, 16, seed=0)
    columns = labels.reshape(20, 16, 16)
    assert (columns[:, 1:] >= columns[:, :-1]).all()
    means = [float(images.flatten(1)[labels == k].mean()) for k in range(3)]
    assert means == pytest.approx([0, 1, 0], abs=0.05)


NAMES = ["network", "+ fixed smoothing", "+ trained pairwise"]


def test_segmentation_prints_its_table(segmentation: Script, capsys: pytest.CaptureFixture[str]) -> None:
    results = segmentation["main"](["--side", "12", "--scenes", "20", "--epochs", "30"])
    assert list(results) == NAMES
    printed = capsys.readouterr().out
    for name, (error, overlap, loss) in results.items():
        assert f"\n{name:<20}{error:>12.1%}{overlap:>10.3f}{loss:>8.3f}" in printed
    assert results["+ trained pairwise"][2] < results["network"][2]


@pytest.mark.slow
def test_segmentation_trained_pairwise_terms_are_the_best(segmentation: Script) -> None:
    network, fixed, trained = segmentation["main"]([]).values()
    assert trained[0] < fixed[0] / 2 < network[0] / 2
    assert trained[2] < fixed[2] / 2


def test_segmentation_parameters_are_saved_like_those_of_any_module(segmentation: Script, tmp_path: Path) -> None:
    import torch

    model, twin = segmentation["Segmenter"](6), segmentation["Segmenter"](6)
    with torch.no_grad():
        model.pairwise.normal_()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    images, _ = segmentation["scenes"](2, 6, seed=0)
    assert torch.equal(model(images), twin(images))
    assert model.double()(images.double()).dtype == torch.float64


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names() -> Script:
    return runpy.run_path(str(EXAMPLES / "names.py"))


def test_names_of_a_function(names: Script) -> None:
    """Chain edges join neighbours, skip edges the next use of a name; the labels are the parameters."""
    text = """
def area(width, height=2):
    total = width * height
    print(width, total)
    return total
"""
    ((uses, parameters, lines),) = names["functions"](text)
    assert [use.id for use in uses] == ["total", "width", "height", "print", "width", "total", "total"]
    example = names["example"](uses, parameters, lines, skip=True)
    assert example.labels.tolist() == [[0, 1, 1, 0, 1, 0, 0]]
    assert example.graph.factor_groups[0].variables.tolist() == [
        *([0, 1], [1, 2], [2, 3], [3, 4], [1, 4], [4, 5], [0, 5], [5, 6]),
    ]
    kinds = example.inputs["factors"][0]
    assert kinds[:, 1].tolist() == [0, 0, 0, 0, 1, 0, 1, 0]
    assert kinds[-1].tolist() == [1, 0, 1]  # neighbours of one name
    assert example.inputs["nodes"].shape[:2] == (1, 7)


def test_names_are_labelled_better_together(names: Script, capsys: pytest.CaptureFixture[str]) -> None:
    results = names["main"](["--modules", "1", "--iterations", "12"])
    printed = capsys.readouterr().out
    assert list(results) == ["independent", "clique logistic", "surrogate likelihood", "ERM-F"]
    train = {name: float(result[0]) for name, result in results.items()}
    assert train["ERM-F"] < train["surrogate likelihood"] + 0.01
    assert max(train["clique logistic"], train["surrogate likelihood"]) < train["independent"] - 0.03
    assert f"{float(results['ERM-F'][2]):.3f}" in printed


def test_pos_tagging(capsys: pytest.CaptureFixture[str]) -> None:
    script = EXAMPLES / "pos_tagging.py"
    runpy.run_path(str(script))["main"](["--quick"])
    printed = capsys.readouterr().out
    assert float(printed.split("sentences: ")[1].split()[0]) > 0.9
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40


# The scripts for the first day: short, and better than guessing already with `--quick`.


SHORT = ("bilstm_crf", "unet_crf", "relational", "uai_instance")


def script(name):
    torch.manual_seed(0)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize("name", SHORT)
def test_a_script_has_at_most_forty_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_sequences():
    assert script("bilstm_crf")(quick=True) > 0.45  # guessing: 1/6


def test_images():
    model, threshold = script("unet_crf")(quick=True)
    assert model < threshold


def test_relations():
    pytest.importorskip("networkx")
    assert script("relational")(quick=True) > 0.8


def test_a_uai_instance(capsys):
    values = script("uai_instance")(["--quick"])
    assert values["mean field"] < values["exact"] < values["TRW"]
    assert "log p: lower bound" in capsys.readouterr().out


# Every script of the gallery runs and draws a figure.


GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
SCRIPTS = sorted(GALLERY.glob("*/plot_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_draws_a_figure(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    runpy.run_path(str(script))
    assert plt.get_fignums()
    plt.close("all")


def test_there_are_examples_of_every_theme() -> None:
    assert len(SCRIPTS) >= 12
    assert all((script.parent / "GALLERY_HEADER.rst").is_file() for script in SCRIPTS)
