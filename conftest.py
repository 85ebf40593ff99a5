"""What every test and doctest shares: how hard Hypothesis tries, one seed, one thread, what comes first."""

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
gc.set_threshold(20_000, 20, 100)  # else pytest's own objects have the collector run with every test: 4 % of the time

# Files of tests that take seconds each, the longest first: parallel workers then share short tests at the end.
LONG = ("notebooks", "types", "docs", "compile", "fully_shard", "memory", "benchmarks", "programs", "op_db", "package")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What is alive before a file of tests stays, so the garbage collector need not look at it.

    The tests themselves, modules and caches are millions of objects: tests that collect garbage often were slow.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers for a test wherever and after whatever it runs."""
    dtype = torch.get_default_dtype()
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes for GPUs, at length, who called it
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, psgrad=psgrad)
