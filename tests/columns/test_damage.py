"""Whatever is wrong with packed bytes is a `LogDamaged`, soon and in little memory."""

from __future__ import annotations

import json
import random
import struct
import zlib
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_log.columns import pack, pack_ints, read_columns, unpack, unpack_ints
from rollout_log.errors import LogDamaged, LogTooNew

LOGPROBS = [-1.5, -0.25, None, -1e-7]
FRAMES = [
    json.dumps(
        {
            "text": f"w{place % 7}",
            "ids": [place % 7, place * 300][: place % 3],
            "logprobs": [[LOGPROBS[place % 4], place, None]],
            "top": {f"k{place}": place / 3},
            "usage": {"total": place} if place == 39 else None,
        }
    ).encode()
    for place in range(40)
] + [b"[DONE]", b"\xff{"]
DATA = pack(FRAMES)
START = 9 + 16


def header_of(data: bytes) -> tuple[Any, bytes]:
    """Return the header of the only group, as plain lists, and the bytes of its streams."""
    (length,) = struct.unpack_from("<I", data, 9)
    header = zstandard.ZstdDecompressor().decompress(data[START : START + length])
    return msgspec.msgpack.decode(header), data[START + length :]


def with_header(header: Any, streams: bytes) -> bytes:
    """Return a file with this header, whose checksum holds."""
    return with_packed_header(zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(header)), streams)


def with_packed_header(packed: bytes, streams: bytes = b"") -> bytes:
    body = packed + streams
    lengths = struct.pack("<IQ", len(packed), len(body))
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(lengths)))
    return struct.pack("<4sBI", b"RLCF", 1, 1) + lengths + checksum + body


def read_all(data: bytes) -> None:
    """Read in every way there is."""
    unpack(data, limit=1 << 20)
    read = read_columns(data, limit=1 << 20)
    for path in read.paths:
        read.numbers(path)
        read.counts(path)
        read.texts(path)


def test_the_helpers_make_a_file() -> None:
    assert unpack(with_header(*header_of(DATA))) == FRAMES
    read_all(DATA)


@pytest.mark.parametrize("length", [*range(40), len(DATA) // 2, len(DATA) - 1])
def test_a_cut_file_is_damaged(length: int) -> None:
    with pytest.raises(LogDamaged, match="packed columns"):
        unpack(DATA[:length])


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    changed = bytearray(DATA)
    changed[place] ^= change
    with pytest.raises((LogDamaged, LogTooNew)):
        unpack(bytes(changed))


def test_more_bytes_than_there_should_be() -> None:
    with pytest.raises(LogDamaged, match="1 bytes too many"):
        unpack(DATA + b"x")


def test_a_later_version_says_so() -> None:
    with pytest.raises(LogTooNew, match=r"version 2.*upgrade"):
        unpack(DATA[:4] + b"\x02" + DATA[5:])


def test_something_else_is_not_packed_columns() -> None:
    with pytest.raises(LogDamaged, match="do not begin like"):
        unpack(b"data: {}\n\n" * 9)


@given(st.binary(max_size=200))
def test_any_header_is_read_or_damaged(header: bytes) -> None:
    with pytest.raises(LogDamaged):
        read_all(with_packed_header(zstandard.ZstdCompressor().compress(header)))


def mutate(value: Any, chance: random.Random) -> Any:
    """Return a header with something changed in it."""
    if isinstance(value, list) and value:
        place = chance.randrange(len(value))
        what = chance.random()
        if what < 0.05:
            return [*value[:place], *value[place + 1 :]]
        if what < 0.1:
            return [*value[:place], value[place], *value[place:]]
        if what < 0.15:
            return [*value[:place], chance.choice(value), *value[place + 1 :]]
        return [*value[:place], mutate(value[place], chance), *value[place + 1 :]]
    if isinstance(value, int):
        near = [value + 1, max(value - 1, -(1 << 63))]
        return chance.choice([0, 1, -1, 2, 3, 7, 255, *near, 1 << 31, (1 << 63) - 1, -(1 << 63)])
    return chance.choice([b"", b"%", b"\x00" * 48, b"x" * 1000, [], None, 5, value])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_header_that_lies_is_read_or_damaged(seed: int) -> None:
    chance = random.Random(seed)
    header, streams = header_of(DATA)
    for _ in range(chance.randint(1, 3)):
        header = mutate(header, chance)
    try:
        read_all(with_header(header, streams))
    except LogDamaged as error:
        assert "packed columns" in str(error)  # noqa: PT017 - most lies are found, some make other frames


def zeros(n: int) -> bytes:
    """Return a small zstd frame of `n` zero bytes."""
    return zstandard.ZstdCompressor().compress(bytes(n))


def one_node(columns: list[Any], forms: list[Any], *numbers: int, children: Any = ()) -> list[Any]:
    """Return a header of 10 frames and 1,000 bytes over these columns."""
    return [10, 1000, columns, [], [forms, *numbers, list(children)]]


SCALAR, LIST = [0, [], []], [1, [b"[", b",", b"]"], [0]]
ITEM = [[SCALAR], -1, 0, -1, -1, []]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (one_node([[0, b"x" * 101]], [SCALAR], -1, 0, -1, -1), "more than its header says"),
        (one_node([[0, b"x" * 5]], [SCALAR], -1, 0, -1, -1), "not as long as its header says"),
        (one_node([[1, 1 << 40, []]], [LIST], -1, 0, 0, -1, children=[ITEM]), "more than its header says"),
        (one_node([[1, -1, []]], [LIST], -1, 0, 0, -1, children=[ITEM]), "negative length"),
        (one_node([[1, 0, [b"\x01" * 10]]], [SCALAR, SCALAR, SCALAR], 0, 0, -1, -1), "not as long"),
        (
            one_node([[1, 0, [b"\x03" * 10]]], [SCALAR, SCALAR, SCALAR], 0, 0, -1, -1),
            "form that is not there",
        ),
        (one_node([[1, 0, [b"\x01" * 9]]], [SCALAR], -1, 0, -1, -1), "9 bytes where 10 should be"),
        (one_node([[1, 0, [7]]], [SCALAR], -1, 0, -1, -1), "no stream 7"),
        (one_node([[1, 0, [b"\xff" * 10] * 8]], [SCALAR], -1, 0, -1, -1), "not as long"),
        (one_node([[1, 1, [b"\xff" * 10] * 8]], [SCALAR], -1, 0, -1, -1), "64 bits"),
        (one_node([[1, 0, [b"\xff" * 10] * 9]], [SCALAR], -1, 0, -1, -1), "64 bits"),
        (one_node([[2, [b"\x01" * 10] * 3, 0]], [SCALAR], -1, 0, -1, -1), "unknown kind of float"),
        (one_node([[2, [b"\x01" * 10] * 4, 9]], [SCALAR], -1, 0, -1, -1), "unknown kind of float"),
        (one_node([[4, 0, [0, [1, 0, []], b""]]], [SCALAR], -1, 0, -1, -1), "not before it"),
        (
            one_node([[3, [11, [1, 1, []], b"x" * 11], [1, 0, []]]], [SCALAR], -1, 0, -1, -1),
            "11 texts for 10 values",
        ),
        (
            one_node([[3, [1, [1, 1, []], b"x"], [1, 1, []]]], [SCALAR], -1, 0, -1, -1),
            "text that is not there",
        ),
        (
            one_node([[3, [1, [1, 1 << 40, []], b"x"], [1, 0, []]]], [SCALAR], -1, 0, -1, -1),
            "above the limit",
        ),
        (one_node([[3, [1, [1, -1, []], b"x"], [1, 0, []]]], [SCALAR], -1, 0, -1, -1), "negative length"),
        (one_node([], [SCALAR], -1, 0, -1, -1), "no column 0"),
        (one_node([], [[0, [], [3]]], -1, 0, -1, -1), "does not fit together"),
        (one_node([], [[9, [], []]], -1, 0, -1, -1), "does not fit together"),
    ],
)
def test_headers_that_ask_too_much(header: list[Any], reason: str) -> None:
    with pytest.raises(LogDamaged, match=reason):
        unpack(with_header(header, b""))


def test_a_stream_that_would_be_huge_is_not_unpacked() -> None:
    bomb = zeros(1 << 26)
    assert len(bomb) < 10_000
    header = one_node([[1, 0, [0]]], [SCALAR], -1, 0, -1, -1)
    header[3] = [len(bomb)]
    with pytest.raises(LogDamaged, match="the 10 bytes it should have"):
        unpack(with_header(header, bomb))
    with pytest.raises(LogDamaged, match="header of 67108864 bytes"):
        unpack(with_packed_header(bomb))


def test_a_group_above_the_limit_is_refused() -> None:
    frames = [b"x" * 1000] * 100
    assert unpack(pack(frames), limit=200_000) == frames
    with pytest.raises(LogDamaged, match="100 frames of 100100 bytes; the limit is 50000"):
        unpack(pack(frames), limit=50_000)


def test_nesting_without_end_is_refused() -> None:
    node: list[Any] = [[SCALAR], -1, 0, -1, -1, []]
    for _ in range(100):
        node = [[[2, [b"", b""], [0]]], -1, -1, -1, -1, [node]]
    with pytest.raises(LogDamaged, match="packed columns"):
        unpack(with_header([10, 10_000, [[0, b"x"]], [], node], b""))
    deep = b"\x91" * 1_000_000 + b"\xc0"
    with pytest.raises(LogDamaged, match="header cannot be read"):
        unpack(with_packed_header(zstandard.ZstdCompressor().compress(deep)))


@given(st.binary(max_size=60))
def test_any_bytes_are_integers_or_damaged(data: bytes) -> None:
    try:
        unpack_ints(data, limit=1000)
    except LogDamaged as error:
        assert "packed" in str(error)  # noqa: PT017 - some bytes are integers


@settings(max_examples=200)
@given(st.integers(0, 1 << 32))
def test_packed_integers_that_lie_are_read_or_damaged(seed: int) -> None:
    chance = random.Random(seed)
    value = msgspec.msgpack.decode(pack_ints([place * place for place in range(100)]))
    changed = msgspec.msgpack.encode(mutate(value, chance))
    try:
        assert len(unpack_ints(changed, limit=1000)) <= 1000
    except LogDamaged as error:
        assert "packed" in str(error)  # noqa: PT017 - some changes make other integers


def test_more_integers_than_asked_for_are_refused() -> None:
    with pytest.raises(LogDamaged, match="100 of them; the limit is 99"):
        unpack_ints(pack_ints([7] * 100), limit=99)


@pytest.mark.parametrize("read", [unpack, read_columns])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_tree_that_does_not_fit_together_is_damage_before_anything_is_asked(read, depth):
    header, streams = header_of(DATA)
    root = header[4]
    for _ in range(depth):
        root = [[[2, [b"[", b"]"], [0]]], -1, -1, -1, -1, [root]]
    header[4] = root
    read_columns(with_header(header, streams))  # a list around it is a tree as well
    leaf = root
    while leaf[5]:
        leaf = leaf[5][-1]
    leaf[0] = [[1, [b"[", b",", b"]"], [7]]]
    with pytest.raises(LogDamaged, match="does not fit together"):
        read(with_header(header, streams))


def test_a_tree_that_is_too_deep_is_damage():
    header, streams = header_of(DATA)
    for _ in range(80):
        header[4] = [[[2, [b"[", b"]"], [0]]], -1, -1, -1, -1, [header[4]]]
    with pytest.raises(LogDamaged, match="does not fit together"):
        read_columns(with_header(header, streams))
