"""Frames that are said to be alike differ in numbers, list lengths and the strings that are named, only."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.columns import Alike, pack, read_columns

TEXTS = st.sampled_from(["a", "a", "a", "b"])
ENTRIES = st.fixed_dictionaries(
    {"p": st.sampled_from([-0.5, -0.25, -1.0, -2.0, -3.0, None]), "t": TEXTS},
    optional={"more": st.lists(st.integers(0, 3), max_size=2)},
)
FRAMES = st.fixed_dictionaries(
    {
        "ids": st.lists(st.integers(0, 300), max_size=3),
        "entries": st.lists(ENTRIES, min_size=1, max_size=2),
        "text": st.text("abcdefgh\u00e9", max_size=3),
        "kind": TEXTS,
    },
    optional={"odd": st.none() | st.booleans() | st.integers() | TEXTS},
)


def shape(value: Any, strings: frozenset[str], path: str = "") -> Any:
    """What all of some alike frames have in common."""
    if isinstance(value, dict):
        return {key: shape(item, strings, f"{path}.{key}".removeprefix(".")) for key, item in value.items()}
    if isinstance(value, list):
        found = [shape(item, strings, f"{path}[]") for item in value]
        return [one for place, one in enumerate(found) if one not in found[:place]]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0
    return "any" if isinstance(value, str) and path in strings else value


def stretches(frames: list[bytes], start: int, end: int) -> list[tuple[Alike, list[bytes]]]:
    found, at = [], start
    for alike in read_columns(pack(frames, level=1)).alike(start, end):
        found.append((alike, frames[at : at + alike.frames]))
        at += alike.frames
    assert at == end
    return found


@given(st.lists(st.tuples(FRAMES, st.integers(1, 9)), min_size=1, max_size=12), st.data())
def test_alike_frames_have_one_shape(drawn: list[tuple[Any, int]], data: st.DataObject) -> None:
    values = [value for value, times in drawn for _ in range(times)]
    start = data.draw(st.integers(0, len(values) - 1))
    end = data.draw(st.integers(start + 1, len(values)))
    for alike, frames in stretches([json.dumps(value).encode() for value in values], start, end):
        assert alike.first == frames[0]
        parsed = [json.loads(frame) for frame in frames]
        shapes = [shape(each, alike.strings) for each in parsed]
        assert all(each == shapes[0] for each in shapes)
        assert_numbers(alike, "ids[]", [each["ids"] for each in parsed])
        assert_numbers(alike, "entries[].p", [[entry["p"] for entry in each["entries"]] for each in parsed])


def assert_numbers(alike: Alike, path: str, expected: list[list[Any]]) -> None:
    numbers = alike.numbers(path)
    if numbers is not None:  # where most of the stream's are numbers
        assert numbers == [number for each in expected for number in each]
    counts = list(map(len, expected))
    assert alike.counts(path) == (None if set(counts) == {1} else counts)


@pytest.mark.parametrize(
    ("frames", "lengths"),
    [
        ([b'{"a":%d}' % place for place in range(40)], [40]),
        ([b'{"a":[%b]}' % b",".join([b"1"] * (place % 5 + 1)) for place in range(40)], [40]),
        ([b'{"a":%d}' % place for place in range(40)] + [b"[DONE]"], [40, 1]),
        ([b'{"a":1,"b":"x"}'] * 20 + [b'{"a":1,"b":"y"}'] * 20, [20, 20]),
        ([b'{"a":1}'] * 20 + [b'{"a":null}'] + [b'{"a":1}'] * 20, [20, 1, 20]),
        ([b'{"a":[1]}'] * 20 + [b'{"a":[]}'] * 2 + [b'{"a":[1]}'] * 20, [20, 2, 20]),
        ([b'{"a":1}'] * 20 + [b'{"a":1.5}'] * 20, [20, 20]),
        ([b'{"a":1}'] * 20 + [b'{"a": 1}'] * 20, [20, 20]),
        ([b'{"\\u0061":1}'] * 3, [1, 1, 1]),
        ([b'{"a":["x","y"]}', *[b'{"a":["y","y"]}'] * 40], [1, 40]),
    ],
)
def test_where_frames_are_no_longer_alike(frames: list[bytes], lengths: list[int]) -> None:
    assert [len(part) for _, part in stretches(frames, 0, len(frames))] == lengths


def test_strings_that_always_differ_are_named() -> None:
    frames = [b'{"t":"word %d","u":{"v":[%d]}}' % (place, place) for place in range(50)]
    ((alike, _),) = stretches(frames, 0, 50)
    assert alike.strings == {"t"}
    assert alike.numbers("u.v[]") == list(range(50))
    assert alike.numbers("t") is None


def test_texts_that_are_no_strings_are_not_alike() -> None:
    frames = [b'{"t":"word %d\\ud800"}' % place for place in range(50)]
    assert len(stretches(frames, 0, 50)) == 50


def test_frames_of_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_log.columns.GROUP", 200)
    frames = [b'{"id":%d,"p":-%d.5}' % (place * 1000, place) for place in range(100)]
    assert sum(len(part) for _, part in stretches(frames, 7, 93)) == 86
    assert read_columns(pack(frames)).render(5, 95) == frames[5:95]
