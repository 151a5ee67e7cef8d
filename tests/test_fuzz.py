"""A few fixed seeds of every target of `make fuzz`."""

import warnings

import pytest

from cases import NEEDS_NATIVE
from fuzz import TARGETS, check

# How many seeds.
NUMBER = {
    "inference": 30,
    "lanes": 30,
    "gradients": 15,
    "losses": 15,
    "uai": 15,
    "saved": 40,
    "pictures": 60,
    "options": 6,
}
NUMBER |= {"labels": 60, "kills": 2}
MARKS = {
    "lanes": NEEDS_NATIVE,
    "kills": pytest.mark.slow,
}  # it starts several processes per example; test_survival.py has the quick ones


@pytest.mark.parametrize("target", [pytest.param(name, marks=MARKS.get(name, ())) for name in TARGETS])
def test_nothing_is_wrong_with_these_examples(target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(check(target, seed) for seed in range(NUMBER[target])) > 0


def test_a_failure_prints_the_command_that_repeats_it(monkeypatch, capsys):
    from fuzz import __main__ as program
    from fuzz import labels

    def wrong(rng):
        raise AssertionError("off by one")

    monkeypatch.setattr(labels, "example", wrong)
    monkeypatch.setattr("sys.argv", ["fuzz", "--target", "labels", "--failures", "1"])
    monkeypatch.setattr(program, "_limit_memory", lambda: None)
    with warnings.catch_warnings():
        assert program.main() == 1
    said = capsys.readouterr()
    seed = said.out.split("seeds from ")[1].split(",")[0]
    assert f"FAILED: python -m fuzz --target labels --seed {seed}\n" in said.err
    assert "AssertionError: off by one" in said.err
    assert "1 examples, 1 failures" in said.out
