"""The report: its content, and how a browser renders it."""

import base64
import contextlib
import html
import html.parser
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import riskfield as rf
from image_cases import CLASS_OPTIONS, CLASSES, IGNORE, write_folders
from riskfield.cli import main
from riskfield.datasets.colours import as_bytes, class_colours, overlay
from riskfield.estimators.image_run import ImageRun
from riskfield.report.charts import Chart, Line, histogram
from riskfield.report.evaluation import Tally
from riskfield.report.gallery import entropy, ranked
from riskfield.report.images import backdrop, layers, one_hot, photograph
from riskfield.report.learned import edge_tables
from riskfield.report.page import write_report
from riskfield.report.sequences import write_sequence_report
from riskfield.report.tables import interaction
from riskfield.report.templating import NOTHING

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TITLE = "Discs <on> ground & more"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models fitted to the same images, and a page about both."""
    folder = write_folders(tmp_path_factory.mktemp("report"))
    with contextlib.chdir(folder):
        fit = ["fit", "--images", "images", "--masks", "masks", *CLASS_OPTIONS, "--quiet", "--iterations", "4"]
        for loss in ("clique-logistic", "surrogate-em"):
            assert main([*fit, "--loss", loss, "--out", loss]) == 0
        report = ["report", "clique-logistic", "surrogate-em", "--images", "images", "--masks", "masks"]
        assert main([*report, "--out", "page.html", "--title", TITLE, "--shown", "3"]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return [ImageRun.load(folder / name) for name in ("clique-logistic", "surrogate-em")]


@pytest.fixture(scope="module")
def image_set(folder):
    return rf.datasets.image_folder(folder / "images", folder / "masks", classes=CLASSES, ignore=IGNORE)


class Page(html.parser.HTMLParser):
    """The content of a page: texts, tables, images and addresses. Checks that elements are properly nested."""

    VOID = ("meta", "img", "input", "circle", "path")

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.images, self.shown, self.addresses, self.text = [], [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.addresses += [values[name] for name in ("src", "href", "action", "data") if name in values]
        self.addresses += re.findall(r"url\(([^)]*)\)", values.get("style", ""))
        if tag == "img":
            self.images.append(values["src"])
            self.shown += [values["alt"]] if values["alt"] else []  # of the input alone
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def opened(address):
    kind, content = address.split(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert kind == f"data:image/{image.format.lower()}"
    return image


def test_the_page_is_whole_and_needs_no_network(folder):
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|<link", text)
    assert "<title>Discs &lt;on&gt; ground &amp; more</title>" in text
    # Parts of each image: the input; for each class, one layer of the truth and two layers of each run; two maps of
    # each run. The baseline counts as a run.
    assert len(page.images) == 3 * (1 + 2 + 3 * (2 * 2 + 2))
    for address in page.images:
        opened(address).load()


def test_the_page_shows_the_evaluation(folder, runs, image_set):
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    words = " ".join(page.text)
    results = page.tables[0]
    assert results[0][:4] == ["", "pixels labelled wrong", "wrong ground", "wrong figure"]
    for k, run in enumerate(runs):
        tally = Tally([*CLASSES.values()])
        for image in image_set:
            tally.add(image.labels, run.crf.predict_marginals([image.image])[0])
        found = tally.evaluation()
        assert results[1 + k][:2] == [run.name, f"{100 * found.error:.1f} %"]
        assert results[1 + k][-2:] == [f"{found.log_loss:.3f}", f"{found.calibration_error:.3f}"]
        confusion = page.tables[1 + k]
        assert confusion[1][1:] == [f"{100 * n / found.confusion[0].sum():.1f} %" for n in found.confusion[0]]
        assert run.command in words
        assert f"independent ended after 4 iterations: {run.fits[0].explanation}" in words
    assert "riskfield report clique-logistic surrogate-em --images images --masks masks --out page.html" in words
    baseline = runs[0].crf.independent()
    chosen = [baseline.predict_marginals([p.image])[0].argmax(-1) for p in image_set]
    wrong = sum(((c != p.labels) & (p.labels >= 0)).sum() for c, p in zip(chosen, image_set, strict=True))
    share = wrong / sum((p.labels >= 0).sum() for p in image_set)
    assert results[3][:2] == ["independent pixels", f"{100 * share:.1f} %"]
    assert "#training" in page.addresses
    settings = next(table for table in page.tables if table[-1][0] == "parameters")
    assert ["loss", "clique-logistic", "surrogate-em"] in settings
    assert ["sweeps", "10"] in settings  # the same for both
    assert settings[-1] == ["parameters", "368"]  # 2 * 100 of pixels, 2 * 4 * 21 of edges


def test_the_images_on_the_page_are_those_of_the_run(folder, runs, image_set):
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    image = image_set.select([page.shown[0]])[0]
    photo, truth, beliefs = page.images[0], page.images[1:3], page.images[3:5]
    np.testing.assert_array_equal(np.asarray(opened(photo).convert("RGB")), as_bytes(image.image))
    marginals = runs[0].crf.predict_marginals([image.image])[0]
    for k in range(2):
        opaque = np.asarray(opened(truth[k]).convert("RGBA"))
        np.testing.assert_array_equal(opaque[..., 3], np.where(image.labels == k, 255, 0))
        assert tuple(opaque[0, 5, :3]) == class_colours(2)[k]
        shown = np.asarray(opened(beliefs[k]).convert("RGBA"))[..., 3] / 255
        np.testing.assert_allclose(shown, marginals[..., k], rtol=0, atol=0.5 / 63 + 0.5 / 255)
    wrong, unsure = (np.asarray(opened(address).convert("RGBA"))[..., 3] / 255 for address in page.images[7:9])
    np.testing.assert_array_equal(wrong, (marginals.argmax(-1) != image.labels) & (image.labels >= 0))
    np.testing.assert_allclose(unsure, entropy(marginals), rtol=0, atol=0.5 / 63 + 0.5 / 255)


def test_images_are_shown_from_the_worst_to_the_best(folder, runs, image_set):
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    errors = {}
    for image in image_set:
        known, chosen = image.labels >= 0, runs[0].crf.predict_marginals([image.image])[0].argmax(-1)
        errors[image.name] = np.mean(chosen[known] != image.labels[known])
    names = page.shown
    assert len(names) == 3
    assert errors[names[0]] == max(errors.values())
    assert errors[names[-1]] == min(errors.values())
    assert ranked([0.1, float("nan"), 0.3], 9) == [2, 0, 1]


def test_what_the_model_has_learned_about_edges_is_shown(folder, runs):
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    table = next(t for t in page.tables if t[0] == ["", "ground", "figure"] and t[1][1][0] in "+-")
    weights = runs[0].crf.model_.factors["horizontal"].weight.detach().numpy()
    flat = weights[:, 0].reshape(2, 2)  # between pixels of equal colour only the constant is not 0
    attraction = (flat[0, 0] + flat[1, 1] - flat[0, 1] - flat[1, 0]) / 4
    same, other = f"{attraction:+.2f}", f"{-attraction:+.2f}"
    assert table[1:] == [["ground", same, other], ["figure", other, same]]


def test_all_tables_of_edges_have_one_scale_of_colours(runs):
    groups = edge_tables({run.name: run.crf for run in runs}, ["ground", "figure"])
    cells = [cell for group in groups for table in group.tables for row in table.rows for cell in row[1:]]
    values, shares = np.array([float(cell.text) for cell in cells]), np.array([cell.share for cell in cells])
    assert abs(shares).max() == 1
    np.testing.assert_allclose(shares * abs(values).max(), values, atol=0.02)


def test_a_page_on_one_run_that_python_fitted(image_set, tmp_path):
    """Without a folder, a command, or a history."""
    crf = rf.ImageCRF(optimiser=rf.optim.LBFGS(iterations=2), initial=())
    values = np.array([0, 200, -1])
    crf.fit([image.image for image in image_set], [values[image.labels] for image in image_set])
    (found,) = write_report(tmp_path / "page.html", [ImageRun("by hand", crf, CLASSES)], image_set, num_shown=99)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert len(page.images) == 4 * (1 + 2 + 2 * 2 + 2)
    assert page.tables[0][1][:2] == ["by hand", f"{100 * found.error:.1f} %"]
    assert "#training" not in page.addresses
    assert "#commands" not in page.addresses


def test_the_page_of_a_model_is_in_its_folder(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["report", "surrogate-em", "--images", "images", "--masks", "masks"]) == 0
    assert capsys.readouterr().out == "wrote surrogate-em/report.html\n"
    page = Page((folder / "surrogate-em" / "report.html").read_text(encoding="utf-8"))
    words = " ".join(page.text)
    assert "objective" in words
    assert "<h1>ground, figure in 4 images</h1>" in (folder / "surrogate-em" / "report.html").read_text()
    assert "“independent pixels” is the model of surrogate-em without edges" in words
    settings = next(table for table in page.tables if table[-1][0] == "parameters")
    assert "patience" not in [row[0] for row in settings]  # it has an effect only on early stopping
    timings = page.tables[-1]
    assert timings[0][1:5] == ["reading", "features", "choice of the ridge", "training"]
    assert timings[1][3] == "0 s"  # with four images the ridge is not chosen


def test_refusals(folder, runs, image_set, tmp_path, capsys, monkeypatch):
    def refused(message, *arguments, **options):
        with pytest.raises(ValueError, match=message):
            write_report(tmp_path / "page.html", *arguments, **options)

    refused("`runs` must hold at least one run. Got none", [], image_set)
    refused("`runs` must have different names. Got surrogate-em, surrogate-em", [runs[1], runs[1]], image_set)
    other = replace(runs[0], name="other", classes={0: "a", 200: "b"})
    refused("`runs` must have the same classes", [runs[0], other], image_set)
    refused("`images` must have the classes", [other], image_set)
    refused("`images` must hold at least one image", runs, image_set[:0])
    refused("`num_shown` must be positive. Got 0", runs, image_set, num_shown=0)
    ignored = image_set.map(lambda p: rf.datasets.LabelledImage(p.name, p.image, np.full_like(p.labels, -1)))
    refused("must have at least one labelled pixel", runs, ignored)
    assert not any(tmp_path.iterdir())
    monkeypatch.chdir(folder)
    assert main(["report", "surrogate-em", "--images", "images", "--masks", "masks", "--out", "no/page.html"]) == 2
    assert capsys.readouterr().err == "riskfield: no/page.html: No such file or directory.\n"
    assert main(["report", "masks", "--images", "images", "--masks", "masks"]) == 2
    assert capsys.readouterr().err == "riskfield: masks: holds no fitted model.\n"


# -- evaluation, colours, images and charts ---------------------------------------------------------------------------


def test_classes_that_do_not_occur():
    tally = Tally(["a", "b", "c"])
    tally.add(np.array([[0, 0, 1]]), np.array([[[0.8, 0.2, 0.0], [0.3, 0.7, 0.0], [0.0, 1.0, 0.0]]]))
    found = tally.evaluation()
    assert found.error == pytest.approx(1 / 3)
    np.testing.assert_allclose(found.class_errors, [0.5, 0, np.nan])
    np.testing.assert_allclose(found.overlaps, [0.5, 0.5, np.nan])
    assert found.mean_overlap == 0.5
    assert found.as_dict()["classes"][2] == {"name": "c", "pixels": 0, "error": None, "overlap": None}
    assert found.bin_counts.tolist() == [4, 1, 1, 0, 0, 0, 1, 1, 0, 1]
    # 0.3, 0.8 and 1.0 belong to the true class. 0.2, 0.7 and the four zeros do not.
    assert found.calibration_error == pytest.approx((0.2 + 0.7 + 0.7 + 0.2) / 9)


def test_true_marginals_are_calibrated():
    rng = np.random.default_rng(0)
    beliefs = rng.dirichlet([1, 1, 1], (300, 300))
    labels = (rng.random((300, 300, 1)) > beliefs.cumsum(-1)).sum(-1)
    calibrated, overconfident = Tally("abc"), Tally("abc")
    calibrated.add(labels, beliefs)
    overconfident.add(labels, beliefs**3 / (beliefs**3).sum(-1, keepdims=True))
    assert calibrated.evaluation().calibration_error < 0.01
    assert overconfident.evaluation().calibration_error > 0.1
    assert calibrated.evaluation().log_loss < overconfident.evaluation().log_loss


def test_colours_differ():
    colours = class_colours(40)
    assert len(set(colours)) == 40
    assert class_colours(5) == colours[:5]


def test_images_of_all_types_can_be_shown():
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
    for image in (grey, grey / 255, grey.astype(np.uint16) * 257, grey[..., None], np.repeat(grey[..., None], 3, -1)):
        assert as_bytes(image)[..., 1].tolist() == grey.tolist()
    assert as_bytes(np.array([[-2.0, 0.0], [1.0, 2.0]]))[..., 0].tolist() == [[0, 128], [191, 255]]
    assert as_bytes(np.full((1, 1), 7.0))[0, 0, 0] == 0
    painted = overlay(grey, np.array([[0, -1, 1], [0, 0, -1]]), 2, opacity=1.0)
    assert painted[0].tolist() == [list(class_colours(2)[0]), [50, 50, 50], list(class_colours(2)[1])]


def test_large_images_are_shown_smaller():
    noise = np.random.default_rng(0).integers(0, 256, (300, 1280, 3), np.uint8)
    assert opened(photograph(noise)).size == (640, 150)
    assert opened(backdrop(noise)).mode == "L"
    labels = np.tile(np.array([0, 1]), (300, 640))
    (first, _) = layers(one_hot(labels, 2))
    shares = np.asarray(opened(first).convert("RGBA"))[..., 3]
    assert shares.shape == (150, 640)
    np.testing.assert_allclose(shares / 255, 0.5, atol=0.01)


def test_charts():
    chart = Chart("C & D", "x", "<y>", [Line(0, [0, 1, 2, 3], [1.0, float("nan"), 2.0, 3.0], [1, 1, 1, 1])])
    text = chart.svg()
    assert Page(text).open == []
    assert 'aria-label="C &amp; D"' in text
    assert "&lt;y&gt;" in text
    assert "nan" not in text
    assert "#a000" not in text  # all colours are those of the style sheet
    assert text.count("stroke: var(--s0)") >= 1
    assert chart.svg() == text
    assert Page(Chart("", "x", "y", [Line(1, [], [], dashed=True)], marks={1.0: "a"}, diagonal=True).svg()).open == []
    bars = histogram("Errors", "x", "y", [[0.0, 1.0, 1.0], [2.0]])
    assert bars.count("fill: var(--s0)") == bars.count("fill: var(--s1)") >= 1  # each in axes of its own
    assert Page(histogram("Errors", "x", "y", [[]])).open == []


# -- sequences --------------------------------------------------------------------------------------------------------


def tagged(count, rng):
    """Sequences of three tags, of which each may follow only itself and the next."""
    X, y = [], []
    for _ in range(count):
        states = np.minimum(np.cumsum(rng.random(rng.integers(3, 9)) < 0.4), 2)
        X.append(np.eye(3)[states] + rng.normal(size=(len(states), 3)))
        y.append(np.array(["<B>", "I", "O"])[states])
    return X, y


def test_a_page_on_sequences(tmp_path):
    rng = np.random.default_rng(0)
    models = {loss: rf.CRF(loss=loss).fit(*tagged(20, rng)) for loss in ("surrogate-likelihood", "univariate-logistic")}
    X, y = tagged(12, rng)
    y[3][0] = "O"  # at the start, where it never is: the hardest
    tokens = [[f"w{k}&{n}" for n in range(len(tags))] for k, tags in enumerate(y)]
    scores = write_sequence_report(tmp_path / "page.html", models, X, y, tokens=tokens, title="Tags", num_shown=2)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not re.search(r"https?://|@import|<link", text)
    assert scores[0].num_pixels == sum(map(len, y))
    crf = models["surrogate-likelihood"]
    assert scores[0].error == pytest.approx(1 - crf.score(X, y))
    assert page.tables[0][1][:2] == ["surrogate-likelihood", f"{100 * scores[0].error:.1f} %"]
    words = [word for word in page.text if re.match(r"w\d+&\d+$", word)]
    assert words[: len(y[3])] == tokens[3]
    assert len({word.split("&")[0] for word in words}) == 2
    transitions = next(t for t in page.tables if t[0] == ["", "<B>", "I", "O"] and t[1][1][0] in "+-")
    assert float(transitions[1][3]) < 0 < float(transitions[1][1])  # O never follows <B>
    write_sequence_report(tmp_path / "plain.html", {"one": crf}, X[:1], y[:1])
    assert "Sequence 0" in (tmp_path / "plain.html").read_text(encoding="utf-8")


def test_sequence_reports_show_spans_and_forbidden_transitions(tmp_path):
    rng = np.random.default_rng(0)
    y = [np.array(["O", "B-X", "I-X", "O", "B-Y", "I-Y"])[: 3 + k % 4] for k in range(30)]
    X = [rng.normal(size=(len(own), 2)) for own in y]
    few = rf.optim.LBFGS(iterations=5)
    models = {"plain": rf.CRF(optimiser=few).fit(X, y), "scheme": rf.CRF(scheme="BIO", optimiser=few).fit(X, y)}
    scores = write_sequence_report(tmp_path / "page.html", models, X, y)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"{NOTHING} marks forbidden pairs." in text
    tags = ["B-X", "B-Y", "I-X", "I-Y", "O"]
    header = ["", *tags]
    plain, scheme = [t for t in Page(text).tables if t[0] == header and any("+" in cell for cell in t[-1])]
    assert not any(NOTHING in cell for row in plain[1:] for cell in row[1:])
    dashes = {(row[0], tag) for row in scheme[1:] for tag, cell in zip(tags, row[1:], strict=True) if cell == NOTHING}
    allowed = {("B-X", "I-X"), ("I-X", "I-X"), ("B-Y", "I-Y"), ("I-Y", "I-Y")}
    assert dashes == {(tag, inside) for tag in tags for inside in ("I-X", "I-Y")} - allowed
    for crf, score in zip(models.values(), scores, strict=True):
        assert score.span_f_measure == pytest.approx(rf.metrics.span_f_measure(y, crf.predict(X)))
        assert f"{100 * score.span_f_measure:.1f} %" in text
    assert "span F1" in text
    y[0] = np.array(["O", -1, -1], dtype=object)  # spans at unknown tags do not count
    (score,) = write_sequence_report(tmp_path / "page.html", {"scheme": models["scheme"]}, X[:1], y[:1])
    assert score.span_f_measure == 0
    write_sequence_report(tmp_path / "page.html", {"plain": models["plain"]}, X, [np.full(len(own), "O") for own in y])
    assert "forbidden" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_scores_of_many_measures_have_a_row_each(tmp_path):
    X = [np.eye(7)] * 3
    models = {name: rf.CRF(optimiser=rf.optim.LBFGS(iterations=2)).fit(X, [list("abcdefg")] * 3) for name in ("r", "s")}
    write_sequence_report(tmp_path / "page.html", models, X, [list("abcdefg")] * 3)
    table = Page((tmp_path / "page.html").read_text(encoding="utf-8")).tables[0]
    assert table[0] == ["", "r", "s"]
    assert [row[0] for row in table[4:]] == [f"wrong {tag}" for tag in "abcdefg"]


def test_interactions_of_allowed_pairs_do_not_depend_on_the_forbidden_ones():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(4, 4))
    forbidden = np.zeros((4, 4), bool)
    forbidden[0, 1:3] = True
    found = interaction(table, forbidden)
    shifted = table + rng.normal(size=(4, 1)) + rng.normal(size=4) + 7.0 * forbidden
    np.testing.assert_allclose(interaction(shifted, forbidden), found, atol=1e-12)
    assert not found[forbidden].any()
    np.testing.assert_allclose([found.sum(0), found.sum(1)], 0, atol=1e-12)


def test_sequence_reports_leave_out_the_label_that_the_model_ignores(tmp_path):
    X, y = tagged(4, np.random.default_rng(1))
    y[0] = y[0].astype(object)
    y[0][0] = "?"
    crf = rf.CRF(ignore="?", optimiser=rf.optim.LBFGS(iterations=2)).fit(X, y)
    (score,) = write_sequence_report(tmp_path / "page.html", {"one": crf}, X, y)
    assert score.num_pixels == sum(map(len, y)) - 1


def test_sequence_reports_count_the_errors_that_score_counts(tmp_path):
    """With a scheme the tags are decoded jointly, and are not those of the largest marginals."""
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(6, 2)) for _ in range(30)]
    y = [np.array(["O", "B-X", "I-X", "O", "B-X", "O"])[: len(own)] for own in X]
    crf = rf.CRF(scheme="BIO", optimiser=rf.optim.LBFGS(iterations=3)).fit(X, y)
    wrong = [np.where(rng.random(6) < 0.3, "O", own) for own in y]
    (score,) = write_sequence_report(tmp_path / "page.html", {"one": crf}, X, wrong)
    assert score.error == pytest.approx(1 - crf.score(X, wrong))


def test_refusals_of_sequence_reports(tmp_path):
    X, y = tagged(4, np.random.default_rng(1))
    crf = rf.CRF(optimiser=rf.optim.LBFGS(iterations=2)).fit(X, y)
    other = rf.CRF(optimiser=rf.optim.LBFGS(iterations=1)).fit(X, [np.where(own == "O", "Q", own) for own in y])

    def refused(message, *arguments, **options):
        with pytest.raises(ValueError, match=message):
            write_sequence_report(tmp_path / "page.html", *arguments, **options)

    refused("`models` must hold at least one", {}, X, y)
    refused("`models` must have the same tags", {"a": crf, "b": other}, X, y)
    refused("`y` must have an entry for each of 4 sequences. Got 3", {"a": crf}, X, y[:3])
    refused(r"`y\[0\]` must have a tag for each of", {"a": crf}, X, [y[0][1:], *y[1:]])
    refused(r"`y\[0\]` must hold tags of the models", {"a": crf}, X, [np.full(len(y[0]), "X"), *y[1:]])
    refused(r"`tokens\[\d\]` must have", {"a": crf}, X, y, tokens=[["a"]] * 4)
    refused("`num_shown` must be positive", {"a": crf}, X, y, num_shown=0)
    assert not any(tmp_path.iterdir())


# -- in a browser -----------------------------------------------------------------------------------------------------

# The page tells the one around it what the browser has made of it, and that one writes it into its root.
PROBE = """<script>
addEventListener("load", () => {
  const all = selector => [...document.querySelectorAll(selector)], seen = (e, size) => e.clientWidth > size;
  const slider = document.querySelector('input[data-sets="--o0"]'), root = document.documentElement;
  slider.value = 0.25;
  slider.dispatchEvent(new Event("input"));
  const faded = getComputedStyle(document.querySelector(".layers img")).opacity;
  root.style.removeProperty("--o0");
  document.querySelector(".image .stack").click();
  const zoomed = document.querySelector("dialog.zoom"), before = zoomed.querySelector(".stack").clientWidth;
  zoomed.querySelector('[data-zoom="1.5"]').click();
  const enlarged = zoomed.open && zoomed.querySelector(".stack").clientWidth / before;
  const lost = getComputedStyle(zoomed.querySelector(".zoom-view")).getPropertyValue("--photo") === "";
  zoomed.close();
  zoomed.querySelector(".zoom-view").replaceChildren();
  parent.postMessage(JSON.stringify({
    enlarged, lost, faded, width: innerWidth, content: root.scrollWidth,
    decoded: all("img").filter(e => e.complete && e.naturalWidth > 0 && seen(e, 50)).length,
    tables: all("table").filter(e => e.clientHeight > 40 && seen(e, 50)).length,
    charts: all("svg").filter(e => e.clientHeight > 100).length,
    outside: all("body *").filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, pre"))
      .map(e => e.tagName),
    panels: all(".stack").slice(0, 4).map(e => e.getBoundingClientRect()).map(r => [r.left, r.top, r.width, r.height]),
  }), "*");
});
</script>"""
AROUND = """<!doctype html>
<style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; height: {height}px }}</style>
<script>onmessage = event => document.documentElement.dataset.probe = event.data</script>
<iframe src="page.html"></iframe>"""


def browse(page, folder, width, height, dark):
    """Render a page in the browser. Return the measurements of `PROBE` and a screenshot."""
    (folder / "page.html").write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    # A browser window cannot be as narrow as a phone, but a frame in it can.
    (folder / "around.html").write_text(AROUND.format(width=width, height=height))
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},{height}"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *("--virtual-time-budget=3000", "--dump-dom", f"--screenshot={folder / 'shot.png'}"),
        (folder / "around.html").as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(html.unescape(re.search(r'data-probe="([^"]*)"', ran.stdout)[1]))
    with Image.open(folder / "shot.png") as shot:
        return measured, np.asarray(shot.convert("RGB")).astype(float)[:, :width]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)], ids=["light", "dark", "phone"])
def test_the_page_in_a_browser(folder, runs, image_set, tmp_path, width, dark):
    text = (folder / "page.html").read_text(encoding="utf-8")
    measured, shot = browse(text, tmp_path, width, 2400, dark)
    assert measured["width"] == measured["content"] == width  # the page does not scroll horizontally
    assert measured["outside"] == []  # nothing is cut off
    assert measured["decoded"] == len(Page(text).images)
    assert measured["tables"] == len(Page(text).tables)
    assert measured["charts"] == 6  # errors of images by three models, calibration, and the training of both
    assert measured["enlarged"] == pytest.approx(1.5, abs=0.02)
    assert not measured["lost"]
    assert measured["faded"] == "0.25"
    background = shot[:, 2].mean(0)
    assert (background < 40).all() if dark else (background > 240).all()
    ink = shot[: int(measured["panels"][0][1])]  # there is text above the images, with enough contrast
    assert (np.abs(ink - background).max(-1) > 150).mean() > 0.003
    # Truth and marginals are blended as specified: 0.8 of the class colours and 0.2 of the grey image.
    image, colours = image_set.select([Page(text).shown[0]])[0], np.array(class_colours(2))
    marginals = runs[0].crf.predict_marginals([image.image])[0]
    grey = np.asarray(Image.fromarray(as_bytes(image.image)).convert("L")).astype(float)
    known = image.labels >= 0
    for shares, place in ((one_hot(image.labels, 2), measured["panels"][1]), (marginals, measured["panels"][2])):
        expected = 0.8 * shares @ colours + (1 - 0.8 * shares.sum(-1)[..., None]) * grey[..., None]
        left, top, wide, high = place
        rows, columns = grey.shape
        middle = [
            ((np.arange(n) + 0.5) * size / n + start).astype(int)
            for n, size, start in ((rows, high, top), (columns, wide, left))
        ]
        seen = shot[np.ix_(*middle)]
        assert np.abs(seen - expected)[known].max() < 16
        assert np.abs(seen - expected)[known].mean() < 3
