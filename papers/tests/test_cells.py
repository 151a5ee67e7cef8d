"""The file of cells: computed once, whole at any moment, shared by processes, the same bytes for the same cells."""

import gzip
import json
import multiprocessing
import os

import pytest

from papers.cells import FILE, Cell, CellFile, Cells, Line


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def never(**settings):
    raise AssertionError(f"computed again: {settings}")


def test_a_finished_cell_is_not_computed_again(folder):
    with Cells(folder, total=2) as cells:
        assert cells.get("sum", lambda a, b: {"value": a + b}, a=1, b=0.5) == {"value": 1.5}
        assert cells.get("sum", never, b=0.5, a=1) == {"value": 1.5}
        assert cells.get("sum", lambda a, b: {"value": None}, a=1, b=2) == {"value": None}
    assert os.listdir(folder) == [FILE]
    with Cells(folder, total=2) as cells:
        assert cells.find("sum", a=1, b=0.5) == {"value": 1.5}
        assert cells.find("sum", a=1, b=0.25) is None


def test_a_line_holds_everything_about_a_cell(folder):
    with Cells(folder, total=1, device="cuda", precision="float32") as cells:
        cells.get("x", lambda method: {"y": [1, None]}, method="../a b/c:d")
    (line,) = gzip.decompress((folder / FILE).read_bytes()).decode().splitlines()
    assert json.loads(line) == {
        "cell": "x",
        "settings": {"method": "../a b/c:d"},
        "device": "cuda",
        "precision": "float32",
        "result": {"y": [1, None]},
    }


def test_device_and_precision_are_part_of_the_key(folder):
    """A cell of another device is shown where nothing is computed, but does not count as computed."""
    CellFile(folder).add([Line("x", {"a": 1}, "cuda", "float32", {"value": 1})])
    with Cells(folder, total=1, precision="float32") as cells:
        assert cells.find("x", a=1) == {"value": 1}
        assert cells.get("x", lambda a: {"value": 2}, a=1) == {"value": 2}
        assert cells.find("x", a=1) == cells.get("x", never, a=1) == {"value": 2}
    with Cells(folder, total=1, precision="float64") as cells:
        assert cells.find("x", a=1) is None
    with Cells(folder, total=1, device="cuda", precision="float32") as cells:
        assert cells.get("x", never, a=1) == {"value": 1}


def test_a_cell_whose_device_was_not_recorded_counts_on_every_device(folder):
    CellFile(folder).add([Line("x", {"a": 1}, None, "float64", {"value": 1})])
    for device in ("cpu", "cuda"):
        with Cells(folder, total=1, device=device) as cells:
            assert cells.get("x", never, a=1) == {"value": 1}


def test_a_cell_that_fails_leaves_nothing(folder):
    with Cells(folder, total=1) as cells:
        with pytest.raises(ZeroDivisionError):
            cells.get("x", lambda a: {"value": 1 / a}, a=0)
        with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
            cells.get("x", lambda a: {"value": float("nan")}, a=0)
    assert os.listdir(folder) == []


def test_cells_can_be_computed_in_other_processes(folder):
    wanted = [Cell("x", dict, {"a": a}) for a in range(4)]
    with Cells(folder, total=4) as cells:
        cells.get("x", lambda a: {"a": "kept"}, a=2)
        cells.prepare(wanted, jobs=2)
        assert [cells.get("x", never, a=a) for a in range(4)] == [{"a": 0}, {"a": 1}, {"a": "kept"}, {"a": 3}]
        cells.prepare(wanted, jobs=2)  # nothing is left to do
    assert len(CellFile(folder).lines()) == 4


def _add_many(folder, first):
    for k in range(first, first + 25):
        CellFile(folder).add([Line("x", {"k": k}, "cpu", "float64", {"value": k})])


def test_processes_that_add_at_once_lose_nothing(folder):
    processes = [multiprocessing.get_context("fork").Process(target=_add_many, args=(folder, 25 * k)) for k in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(line.result["value"] for line in CellFile(folder).lines()) == list(range(100))
    assert os.listdir(folder) == [FILE]


def test_the_same_cells_give_the_same_bytes(folder):
    lines = [
        Line("x", {"b": b, "a": a}, device, "float64", {"v": a + b})
        for a in (1, 2)
        for b in (0.5, 10)
        for device in ("cpu", "cuda", None)
    ]
    for name, order in (("one", lines), ("other", lines[::-1])):
        (folder / name).mkdir()
        for line in order:
            CellFile(folder / name).add([line])
    assert (folder / "one" / FILE).read_bytes() == (folder / "other" / FILE).read_bytes()
    assert len(CellFile(folder / "one").lines()) == 12


def test_a_write_that_fails_leaves_the_old_file(folder, monkeypatch):
    file = CellFile(folder)
    file.add([Line("x", {"a": 1}, "cpu", "float64", {})])
    before = (folder / FILE).read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        file.add([Line("x", {"a": 2}, "cpu", "float64", {})])
    assert os.listdir(folder) == [FILE]
    assert (folder / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b'{"cell": "x"}\n'), gzip.compress(b"[1]\n"), gzip.compress(b"{}\n" * 99)[:30]],
    ids=["empty", "text", "incomplete", "no cell", "cut short"],
)
def test_a_damaged_file_is_refused_and_kept(folder, content):
    (folder / FILE).write_bytes(content)
    with (
        Cells(folder, total=1) as cells,
        pytest.raises(ValueError, match="must be a gzip file with a cell in each line"),
    ):
        cells.get("x", lambda a: {"value": a}, a=1)
    assert (folder / FILE).read_bytes() == content
