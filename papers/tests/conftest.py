"""What the tests of the studies share: seeds, one thread, and the records behind the pages that are written."""

import json

import pytest
import torch

import papers.study
import riskfield as rf


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
    rf.set_num_threads(1)


@pytest.fixture
def written(monkeypatch):
    """The records of every page that is written, by its name."""
    page, out = papers.study.page, {}

    def keep(study, records, command):
        out[study.name] = json.loads(json.dumps(records))
        return page(study, records, command)

    monkeypatch.setattr(papers.study, "page", keep)
    return out
