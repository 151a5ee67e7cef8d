"""The committed results and splits: nothing is lost, and the cells give the committed tables digit by digit."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

import papers
import papers.cells
import papers.study
from papers.cells import FILE, CellFile
from papers.commands import main
from papers.splits import Recorded
from papers.study import TABLES, join_sections, sections

# The committed results: no recorded cell is lost, and the cells give the committed tables digit by digit.


ROOT = Path(papers.__file__).parents[1]
RESULTS = ROOT / "results"
STUDIES = ("backgrounds", "convex", "denoising", "erm", "gradients", "horses", "misspecification")
COMMITTED = {(study, name): text for study in STUDIES for name, text in sections(RESULTS / study).items()}
COMMANDS = {table: text.splitlines()[2].strip() for table, text in COMMITTED.items()}


def digest(line):
    """Of a cell and its result, whatever device and precision were added to it."""
    content = json.dumps([line.cell, line.settings, line.result], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def test_no_recorded_cell_is_lost():
    """The file names the content of every cell that was on record when cells were put into one file per study."""
    recorded = [line.split() for line in Path(__file__).with_name("recorded_cells.txt").read_text().splitlines()]
    assert Counter(study for study, _ in recorded) == {
        "backgrounds": 85,
        "convex": 128,
        "denoising": 73,
        "erm": 1058,
        "gradients": 190,
        "horses": 91,
        "misspecification": 805,
    }
    found = {(study, digest(line)) for study in STUDIES for line in CellFile(RESULTS / study).lines()}
    assert not {(study, own) for study, own in recorded} - found


@pytest.mark.parametrize("study", STUDIES)
def test_a_file_of_cells_is_as_the_runner_writes_it(study, tmp_path):
    CellFile(tmp_path).add(CellFile(RESULTS / study).lines())
    assert CellFile(tmp_path).lines() == CellFile(RESULTS / study).lines()


@pytest.mark.parametrize("command", sorted(set(COMMANDS.values())))
def test_the_cells_give_the_committed_tables(command, tmp_path, monkeypatch):
    """The command above a table writes the same table, from the cells alone: without data sets, computing nothing."""

    def refuse(task):
        raise AssertionError(f"{command} computes {task}")

    monkeypatch.setattr(papers.cells, "_compute", refuse)
    monkeypatch.setattr(papers.study, "write_plot", lambda *_: None)
    monkeypatch.delenv("RISKFIELD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    prefix, study, *options = command.removeprefix("python -m ").split()
    assert prefix == "papers"
    (tmp_path / "results" / study).mkdir(parents=True)
    shutil.copy(RESULTS / study / FILE, tmp_path / "results" / study)
    assert main([study, *options, "--quiet"]) == 0
    written = sections(tmp_path / "results" / study)
    assert {(study, name) for name in written} == {table for table, own in COMMANDS.items() if own == command}
    for name, text in written.items():
        assert text == COMMITTED[study, name]
        assert (RESULTS / study / f"{name}.png").exists()


@pytest.mark.parametrize("study", STUDIES)
def test_a_file_of_tables_is_as_the_runner_writes_it(study):
    assert join_sections(sections(RESULTS / study)) == (RESULTS / study / TABLES).read_text(encoding="utf-8")


def test_every_table_is_in_the_index():
    assert len(COMMITTED) == 27
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    for study, name in COMMITTED:
        assert f"({study}/{TABLES}#{name})" in index, (study, name)
    for study in STUDIES:
        assert (RESULTS / study / "README.md").exists()


def test_every_benchmark_is_in_the_index_and_on_record():
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    lines = (RESULTS / "benchmarks" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line)["name"] for line in lines]
    assert records == sorted(set(records))
    pages = {path.stem for path in (RESULTS / "benchmarks").glob("*.md")}
    assert pages <= set(records)
    for name in records:
        assert (f"(benchmarks/{name}.md)" if name in pages else f"record `{name}`") in index, name


def test_names_are_short():
    tracked = [path.relative_to(ROOT) for folder in ("papers", "results") for path in (ROOT / folder).rglob("*")]
    assert max(len(str(path)) for path in tracked) <= 100


# The recorded splits of the public data sets.


@pytest.mark.parametrize(
    ("recorded", "sizes"),
    [
        (Recorded.BERKELEY_2010, [(100, 100)]),
        (Recorded.BERKELEY_2013, [(32, 100)]),
        (Recorded.HORSES, [(200, 127)]),
        (Recorded.BACKGROUNDS, [(572, 143)] * 5),
    ],
)
def test_recorded_splits(recorded, sizes):
    splits = recorded.read()
    assert [(len(split.train), len(split.test)) for split in splits] == sizes
    tested = [name for split in splits for name in split.test]
    assert len(set(tested)) == len(tested)
