"""What the tests of the studies share: the records behind the tables that are written."""

import json

import pytest

import papers.study


@pytest.fixture
def written(monkeypatch):
    """The records of every table that is written, by its name."""
    section, out = papers.study.section, {}

    def keep(study, records, command):
        out[study.name] = json.loads(json.dumps(records))
        return section(study, records, command)

    monkeypatch.setattr(papers.study, "section", keep)
    return out
