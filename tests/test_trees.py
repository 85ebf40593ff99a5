"""Trees are flattened as optree flattens them, whether or not their structure is remembered."""

from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import nn

import psgrad
from psgrad.engine.problem import flatten

T = torch.arange(12.0).split(1)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Name(str):
    __slots__ = ()


TREES: tuple[Any, ...] = (
    {"b": T[0], "a": T[1], "c": T[2]},
    {"a": T[0], "c": T[1], "b": T[2]},  # the same names in another order
    {"a": T[0]},
    {},
    {1: T[0]},
    {True: T[0]},  # equal to the one before
    {(1, "a"): T[0], (0, "b"): T[1]},
    {2: T[0], 1: T[1], "a": T[2]},  # not to be sorted
    {"x": T[0], "y": T[1]},
    {Name("x"): T[0], "y": T[1]},
    {"a": None, "b": T[0]},
    {"a": nn.Parameter(T[0]), "b": T[1]},
    {"a": {"b": T[0]}, "c": [T[1], T[2]]},
    OrderedDict(b=T[0], a=T[1]),
    (T[0], T[1]),
    (T[0],),
    (),
    (T[0], None),
    (T[0], (T[1], 3.0)),
    [T[0], T[1]],
    Pair(T[0], T[1]),
    T[0],
    None,
)


@pytest.mark.parametrize("none_is_leaf", [False, True])
@pytest.mark.parametrize("tree", TREES, ids=[str(i) for i in range(len(TREES))])
def test_as_optree_does(tree: Any, none_is_leaf: bool) -> None:
    for _ in range(2):  # worked out, and remembered
        leaves, spec = flatten(tree, none_is_leaf=none_is_leaf)
        expected, expected_spec = optree.tree_flatten(tree, none_is_leaf=none_is_leaf)
        assert type(leaves) is list
        assert list(map(id, leaves)) == list(map(id, expected))
        assert spec == expected_spec
        again = spec.unflatten(leaves)
        assert type(again) is type(tree)
        assert repr(again) == repr(tree)  # the order of keys as well
        if isinstance(tree, dict):
            assert list(map(type, again)) == list(map(type, tree))


def test_the_result_has_the_order_of_params() -> None:
    for names in (["w", "b"], ["b", "w"]):
        params = {name: torch.ones(3) for name in names}
        grads = psgrad.per_sample_grads(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), params, torch.randn(4, 3))
        assert list(grads) == names
        assert torch.equal(grads["b"], torch.ones(4, 3))
