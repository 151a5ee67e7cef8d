"""What the tests of the library share: the kernels to run with, and reproducible examples."""

import os
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, settings

from cases import NEEDS_NATIVE, lanes

# Examples are the same on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", derandomize=True, **_COMMON)
settings.register_profile("explore", derandomize=False, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# What fills the lanes of all native runs, "level" or "batch". By default every plan chooses.
_LANES = os.environ.get("RISKFIELD_LANES")


@pytest.fixture(autouse=True, scope="session")
def _lanes():
    with nullcontext() if _LANES is None else lanes({"level": False, "batch": True}[_LANES]):
        yield


NATIVE = pytest.param("native", marks=NEEDS_NATIVE)


@pytest.fixture(scope="module", params=["torch", NATIVE])
def kernels(request):
    """Runs a test with each of the two kernels."""
    return request.param
