"""What every test and doctest shares: how hard Hypothesis tries, one seed, one thread."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

import psgrad

_SHARED: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("fast", max_examples=25, derandomize=True, database=None, **_SHARED)
hypothesis.settings.register_profile("thorough", max_examples=1000, **_SHARED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

torch.set_num_threads(1)  # tests are small and run in parallel processes


def pytest_collection_finish() -> None:
    """The tests themselves stay, so the garbage collector need not look at them: tests that call it often were slow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers for a test wherever and after whatever it runs."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def names_in_doctests(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, psgrad=psgrad)
