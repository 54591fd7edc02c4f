from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from captures import load, names
from rollout_log.sse import FrameSplitter, SSEFrame


def split(*chunks: bytes) -> tuple[list[SSEFrame], bytes]:
    splitter = FrameSplitter()
    frames = [frame for chunk in chunks for frame in splitter.feed(chunk)]
    return frames, splitter.tail()


def split_at(stream: bytes, cuts: list[int]) -> tuple[list[SSEFrame], bytes]:
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return split(*(stream[a:b] for a, b in itertools.pairwise(bounds)))


def data_of(stream: bytes) -> list[bytes]:
    return [frame.data for frame in split(stream)[0]]


def reference(stream: bytes) -> list[bytes]:
    """The specification read aloud: lines of the whole stream, then blocks."""
    events: list[bytes] = []
    values: list[bytes] = []
    lines = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in lines[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            if b"\n".join(values):
                events.append(b"\n".join(values))
            values = []
        elif name == b"data":
            values.append(value.removeprefix(b" "))
    return events


@pytest.mark.parametrize(
    ("stream", "frames", "tail"),
    [
        (b"data: a\n\n", [SSEFrame(b"a")], b""),
        (b"data: a\n\ndata: b\n\n", [SSEFrame(b"a"), SSEFrame(b"b")], b""),
        (b"data: a\n\ndata: b\n", [SSEFrame(b"a")], b"data: b\n"),
        (b"data:  a\n\n", [SSEFrame(b" a")], b""),  # one space only
        (b"data:a\n\n", [SSEFrame(b"a", b"data:a\n\n")], b""),
        (b"data: a\ndata:b\ndata\n\n", [SSEFrame(b"a\nb\n", b"data: a\ndata:b\ndata\n\n")], b""),
        (b": ping\n\ndata: a\n\n", [SSEFrame(b"a", b": ping\n\ndata: a\n\n")], b""),
        (b": ping\n\n", [], b": ping\n\n"),
        (b"id: 3\nevent: x\ndata: a\n\n", [SSEFrame(b"a", b"id: 3\nevent: x\ndata: a\n\n")], b""),
        (
            b"\xef\xbb\xbfdata: a\n\ndata: b\n\n",
            [SSEFrame(b"a", b"\xef\xbb\xbfdata: a\n\n"), SSEFrame(b"b")],
            b"",
        ),
        # Not at the very start, a byte order mark is part of a field's name.
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [SSEFrame(b"a")], b"\xef\xbb\xbfdata: b\n\n"),
        # The CR ends the line at once, so the LF after it belongs to what comes next.
        (b"data: a\r\n\r\n", [SSEFrame(b"a", b"data: a\r\n\r")], b"\n"),
        (
            b"data: a\r\n\r\ndata: b\n\n",
            [SSEFrame(b"a", b"data: a\r\n\r"), SSEFrame(b"b", b"\ndata: b\n\n")],
            b"",
        ),
        (b"data: a\r\rdata: b\n\n", [SSEFrame(b"a", b"data: a\r\r"), SSEFrame(b"b")], b""),
        (b"data: a\n\r", [SSEFrame(b"a", b"data: a\n\r")], b""),
        (
            b"data: a\n\r\ndata: b\n\n",
            [SSEFrame(b"a", b"data: a\n\r"), SSEFrame(b"b", b"\ndata: b\n\n")],
            b"",
        ),
        # A block without data is no frame, and neither is one with empty data.
        (b"data\n\ndata: a\n\n", [SSEFrame(b"a", b"data\n\ndata: a\n\n")], b""),
        (b"data: \n\ndata: a\n\n", [SSEFrame(b"a", b"data: \n\ndata: a\n\n")], b""),
        (b"data\ndata\n\n", [SSEFrame(b"\n", b"data\ndata\n\n")], b""),
        (b"\n\ndata: a\n\n", [SSEFrame(b"a", b"\n\ndata: a\n\n")], b""),
        (b"data: a\n\n\ndata: b\n\n", [SSEFrame(b"a"), SSEFrame(b"b", b"\ndata: b\n\n")], b""),
        # Only `data` is data.
        (b"data : a\n\n", [], b"data : a\n\n"),
        (b"datadata: a\n\n", [], b"datadata: a\n\n"),
        (b"DATA: a\n\n", [], b"DATA: a\n\n"),
        (b"", [], b""),
    ],
)
def test_a_stream_splits_into_frames_however_it_is_cut(
    stream: bytes, frames: list[SSEFrame], tail: bytes
) -> None:
    assert split(stream) == (frames, tail)
    assert split(*(bytes([byte]) for byte in stream)) == (frames, tail)
    for cut in range(len(stream)):
        assert split(stream[:cut], stream[cut:]) == (frames, tail)


def test_unicode_line_separators_are_text() -> None:
    line = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg".encode()
    assert split(b"data: %b\n\n" % line) == ([SSEFrame(line)], b"")


_fields = [b"data: a", b"data:", b"data: ", b"data", b"data:  b", b": c", b"id: 1", b"x", b" "]
_line_ends = [b"\n", b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n"]
_pieces = st.sampled_from([*_fields, *_line_ends, b"\xef\xbb\xbf", b"\xff"])
_streams = st.lists(_pieces, max_size=30).map(b"".join)


@given(_streams, st.lists(st.integers(0, 300), max_size=6))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [9, 10, 11])
def test_every_cut_gives_the_same_frames_and_no_byte_is_lost(stream: bytes, cuts: list[int]) -> None:
    frames, tail = split_at(stream, cuts)
    assert (frames, tail) == split(stream)
    assert b"".join(frame.wire for frame in frames) + tail == stream
    assert [frame.data for frame in frames] == reference(stream)
    for frame in frames:
        assert frame.raw != b"data: %b\n\n" % frame.data


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_arbitrary_bytes_survive(stream: bytes, cuts: list[int]) -> None:
    frames, tail = split_at(stream, cuts)
    assert b"".join(frame.wire for frame in frames) + tail == stream
    assert [frame.data for frame in frames] == reference(stream)


@given(_streams, st.lists(st.integers(0, 300), max_size=12))
@example(b"data: a\n\ndata: b\n\n", [9])
@example(b"data: a\r\rdata: b\n\n", [9])
@example(b"data: a\n\ndata: \n\ndata: b\n\n", [9, 17])
def test_a_chunk_that_is_one_frame_may_be_taken_by_itself(stream: bytes, cuts: list[int]) -> None:
    splitter = FrameSplitter()
    frames: list[SSEFrame] = []
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(bounds):
        data = splitter.only_frame(stream[start:end])
        frames += splitter.feed(stream[start:end]) if data is None else [SSEFrame(data)]
    assert (frames, splitter.tail()) == split(stream)


def test_every_chunk_of_an_engine_is_one_frame() -> None:
    chunks = [frame.wire for frame in split(load("a1-plain-length").body)[0]]
    splitter = FrameSplitter()
    assert [splitter.only_frame(chunk) for chunk in chunks] == [chunk[6:-2] for chunk in chunks]


@given(_streams)
def test_crlf_and_cr_carry_the_same_data_as_lf(stream: bytes) -> None:
    stream = stream.replace(b"\r", b"")
    assert data_of(stream.replace(b"\n", b"\r\n")) == data_of(stream)
    assert data_of(stream.replace(b"\n", b"\r")) == data_of(stream)


@pytest.mark.parametrize("name", [name for name in names() if load(name).is_sse])
def test_captured_streams_are_plain_frames(name: str) -> None:
    body = load(name).body
    whole, tail = split(body)
    plain = [b"data: %b\n\n" % frame.data for frame in whole if frame.raw is None]
    assert len(plain) == len(whole) - (name == "p9-completions-keep-alive")
    assert b"".join(frame.wire for frame in whole) + tail == body
    assert [frame.data for frame in whole] == reference(body)
    start = body[:20_000]
    for size in (1, 7, 300, 4096):
        assert split(*(start[i : i + size] for i in range(0, len(start), size))) == split(start)


def test_keep_alive_comments_stay_in_the_first_frame() -> None:
    frames, tail = split(load("p9-completions-keep-alive").body)
    assert frames[0].wire.startswith(b": keep-alive\n\n" * 3 + b"data: {")
    assert [frame.raw for frame in frames[1:]] == [None, None, None]
    assert (frames[-1].data, tail) == (b"[DONE]", b"")


@pytest.mark.parametrize("before", [b"", b"id: 1\n"])
def test_a_long_line_in_small_reads_is_one_frame(before: bytes) -> None:
    value = b"x" * 300_000
    splitter = FrameSplitter()
    assert splitter.feed(before + b"data: ") == []
    for i in range(0, len(value), 100):
        assert splitter.feed(value[i : i + 100]) == []
    assert [frame.data for frame in splitter.feed(b"\n\n")] == [value]
