"""What the tests of the studies share: the records behind the pages that are written."""

import json

import pytest

import papers.study


@pytest.fixture
def written(monkeypatch):
    """The records of every page that is written, by its name."""
    page, out = papers.study.page, {}

    def keep(study, records, command):
        out[study.name] = json.loads(json.dumps(records))
        return page(study, records, command)

    monkeypatch.setattr(papers.study, "page", keep)
    return out
