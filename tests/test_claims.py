"""A slice of the claims of docs/inference.md on random models; `claims.py` tests 10,000 of each."""

import pytest

import claims

# What "a small multiple of the tolerance" is: of mu, and of log-partition values, to which every message contributes.
MARGINALS, VALUES = 4.0, 8.0
LIMITS = {"mu": MARGINALS, "value": VALUES, "below": VALUES, "above": 0.0, "fall": 0.0, "reference": 1.0}


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.__name__)
def test_the_claims_of_the_guide_hold_on_random_models(claim, kernels, monkeypatch):
    batches = 6
    if kernels == "torch":  # they are slow: one graph, and models that take thousands of sweeps are given up
        batches = 1
        monkeypatch.setattr(claims, "SWEEPS", 400)
    record = claims.examine(claim, batches * claims.BATCH, seed=0, kernels=kernels)
    assert record.settled > 0.5 * record.models
    for name, values in record.values.items():
        assert max(values) <= LIMITS[name], (name, max(values))
