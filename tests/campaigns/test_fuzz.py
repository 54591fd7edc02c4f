"""Arbitrary bytes where others write: parsers end, say what is wrong, and hold no more than they were given.

`FUZZ` scales the long form. With atheris installed, `make fuzz` lets coverage guide the same targets
(`fuzz.py`); what it finds becomes an example here.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.seeds import SEEDS
from campaigns.targets import TARGETS

LONG = int(os.environ.get("FUZZ", "2000"))


def mutated(name: str) -> st.SearchStrategy[bytes]:
    """Bytes at random, and seeds with a piece cut out, put in, or doubled."""
    seed = st.sampled_from(SEEDS[name])

    def mutate(parts: tuple[bytes, int, int, bytes]) -> bytes:
        data, start, length, put = parts
        at = start % (len(data) + 1)
        return data[:at] + put + data[at + length :]

    return st.binary(max_size=200) | st.tuples(
        seed, st.integers(0, 999), st.integers(0, 9), st.binary(max_size=9)
    ).map(mutate)


def run(name: str, examples: int) -> None:
    tried = 0

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(mutated(name))
    def attempt(data: bytes) -> None:
        nonlocal tried
        tried += 1
        TARGETS[name](data)

    for seed in SEEDS[name]:
        TARGETS[name](seed)
    attempt()
    print(f"{name}: {tried} inputs")


@pytest.mark.parametrize("name", TARGETS)
def test_some_inputs(name):
    run(name, 60)


@pytest.mark.campaign
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name):
    run(name, LONG)
