"""A batch says what it is, and whether it is whole; the blocks of a sample are found from its last one."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.errors import LogDamaged
from rollout_log.events import Delta, encode_events
from rollout_log.log import batch
from rollout_log.log.batch import (
    FULL,
    HEADER_SIZE,
    Batches,
    Packer,
    Place,
    read_claim,
    size_of,
    unpack_batch,
)
from rollout_log.log.block import RAW, ZSTD, encode_blocks, writer_identity

WRITER = writer_identity("host-1-2")
FILE = Path("segment-000001.rlog")
EVENTS = [Delta(at, b"%d" % at) for at in range(12)]


def blocks_of(ordinal, first, events):
    return [(ordinal, start, count, payload) for start, count, payload in encode_blocks(first, events)]


def commits(*several):
    """Pack commits, each a list of blocks, as a writer does; returns batches by number, and the last ones."""
    found, last = {}, {}
    for blocks in several:
        packer = Packer(WRITER, len(found) + 1, last)
        found.update(packer.pack(blocks))
        last = packer.last
    return found, last


def test_the_bytes_are_those_of_the_format():
    packer = Packer(WRITER, 3, {5: 2})
    ((number, data),) = packer.pack([*blocks_of(5, 7, [Delta(0, b"ab", 3)]), *blocks_of(6, 0, EVENTS[:1])])
    payloads = [encode_events([Delta(0, b"ab", 3)]), encode_events(EVENTS[:1])]
    directory = b"".join(
        ordinal.to_bytes(8, "big")
        + first.to_bytes(8, "big")
        + previous.to_bytes(8, "big")
        + (1).to_bytes(4, "big")
        + end.to_bytes(4, "big")
        for ordinal, first, previous, end in (
            (5, 7, 2, len(payloads[0])),
            (6, 0, 0, sum(map(len, payloads))),
        )
    )
    size = sum(map(len, payloads)).to_bytes(4, "big")
    header = b"RLB1\x01\x00\x00\x00" + WRITER + (3).to_bytes(8, "big") + (2).to_bytes(4, "big") + size + size
    rest = directory + b"".join(payloads)
    assert number == 3
    assert data == header + zlib.crc32(header + rest).to_bytes(4, "big") + rest
    assert len(header) + 4 == HEADER_SIZE == 40
    assert packer.last == {5: 3, 6: 3}


@given(
    st.lists(st.lists(st.binary(max_size=800), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(0, 2**63),
    st.integers(0, 2**40),
)
def test_events_survive_and_any_changed_byte_is_noticed(samples, ordinal, first):
    events = [[Delta(0, data) for data in datas] for datas in samples]
    blocks = [block for at, each in enumerate(events) for block in blocks_of(ordinal + at, first, each)]
    ((number, data),) = Packer(WRITER, 9, {}).pack(blocks)
    found = unpack_batch(data)
    assert (number, found.claim.number, found.claim.writer) == (9, 9, WRITER)
    assert [(block.ordinal, block.first, block.events()) for block in found.blocks()] == [
        (ordinal + at, first, each) for at, each in enumerate(events)
    ]
    assert found.blocks_of(ordinal) == list(found.blocks())[:1]
    assert size_of(data) == len(data) == read_claim(data + b"rest of the page").stored
    assert list(unpack_batch(data + b"rest of the page").blocks()) == list(found.blocks())
    for place in {0, 4, 5, 8, 20, 37, 40, 50, len(data) - 1, len(data) // 2}:
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(LogDamaged):
            unpack_batch(bytes(changed))
    for length in (0, 10, HEADER_SIZE, len(data) - 1):
        with pytest.raises(LogDamaged):
            unpack_batch(data[:length])


def test_what_is_large_is_compressed():
    for size, codec in ((100, RAW), (1000, ZSTD)):
        found, _ = commits(blocks_of(0, 0, [Delta(0, b"x" * size)]))
        assert [block.codec for block in unpack_batch(found[1]).blocks()] == [codec]


def test_a_commit_is_cut_into_batches_and_a_large_event_into_none():
    events = [Delta(0, bytes([at]) * 30_000) for at in range(9)] + [Delta(0, b"y" * 200_000)]
    found, last = commits([*blocks_of(1, 4, events), *blocks_of(2, 0, EVENTS)])
    sizes = [len(unpack_batch(data)) for data in found.values()]
    assert [size > FULL for size in sizes] == [False] * 5 + [True, False]
    assert list(found) == [1, 2, 3, 4, 5, 6, 7]
    assert last == {1: 6, 2: 7}
    assert [read_claim(data).places()[0].previous for data in found.values()] == [0, 1, 2, 3, 4, 5, 0]
    reader = Batches(FILE, found.get)
    blocks = list(reader.blocks(1, last[1]))
    assert [event for block in blocks for event in block.events()] == events
    ends = [block.first + block.count for block in blocks]
    assert [block.first for block in blocks] == [4, *ends[:-1]]


def test_a_directory_has_so_many_lines_and_no_more(monkeypatch):
    monkeypatch.setattr(batch, "MOST_BLOCKS", 2)
    found, last = commits([block for ordinal in range(5) for block in blocks_of(ordinal, 0, EVENTS[:1])])
    assert [len(read_claim(data).places()) for data in found.values()] == [2, 2, 1]
    assert last == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3}


@pytest.fixture
def chain():
    """Sample 1 in batches 1, 2 and 4, two events each; sample 2 in 2 and 3."""
    return commits(
        blocks_of(1, 0, EVENTS[:2]),
        [*blocks_of(1, 2, EVENTS[2:4]), *blocks_of(2, 0, EVENTS[:2])],
        blocks_of(2, 2, EVENTS[2:3]),
        blocks_of(1, 4, EVENTS[4:6]),
    )


def test_the_blocks_of_a_sample_are_found_from_its_last_batch(chain):
    found, last = chain
    places = [place for data in found.values() for place in read_claim(data).places()]
    assert [place.ordinal for place in places] == [1, 1, 2, 2, 1]
    assert [place.previous for place in places] == [0, 1, 0, 2, 2]
    asked = []
    reader = Batches(FILE, lambda number: asked.append(number) or found.get(number))
    assert [block.first for block in reader.blocks(1, last[1])] == [0, 2, 4]
    assert [block.first for block in reader.blocks(2, last[2])] == [0, 2]
    assert [[block.first for block in reader.blocks(1, last[1], start)] for start in range(7)] == [
        [0, 2, 4], [0, 2, 4], [2, 4], [2, 4], [4], [4], [],
    ]  # fmt: skip
    assert list(reader.blocks(7, 0)) == []
    asked.clear()
    fresh = Batches(FILE, lambda number: asked.append(number) or found.get(number))
    assert [block.first for block in fresh.blocks(1, last[1], 4)] == [4]
    assert set(asked) == {4}, "what is before is not looked at"


@pytest.mark.parametrize("ordinal", [0, 1, 2**56, 2**63])
def test_a_sample_is_found_by_its_lines_and_not_by_bytes_that_look_like_it(ordinal):
    others = [0, 1, 256, 2**32, 2**56, 2**63]
    blocks = [block for at, each in enumerate(others) for block in blocks_of(each, 0, EVENTS[at : at + 1])]
    ((_, data),) = Packer(WRITER, 1, {}).pack([*blocks, *blocks_of(ordinal, 1, EVENTS[9:])])
    found = unpack_batch(data)
    assert found.blocks_of(ordinal) == [block for block in found.blocks() if block.ordinal == ordinal]
    assert [len(block.events()) for block in found.blocks_of(ordinal)] == [1, 3]


def test_a_chain_that_is_broken_is_damage(chain):
    found, last = chain
    with pytest.raises(LogDamaged, match=r"^segment-000001\.rlog: batch 2 is missing"):
        list(Batches(FILE, {**found, 2: None}.get).blocks(1, last[1]))
    with pytest.raises(LogDamaged, match="batch 3 should have events of sample 1, and has none"):
        list(Batches(FILE, found.get).blocks(1, 3))
    with pytest.raises(LogDamaged, match="batch 1 lies where batch 4 belongs"):
        list(Batches(FILE, {**found, 4: found[1]}.get).blocks(1, last[1]))
    ((_, endless),) = Packer(WRITER, 4, {1: 4}).pack(blocks_of(1, 4, EVENTS[4:6]))
    with pytest.raises(LogDamaged, match="batch 4"):
        list(Batches(FILE, {**found, 4: endless}.get).blocks(1, last[1]))


def test_only_so_many_batches_are_kept_unpacked(monkeypatch):
    monkeypatch.setattr(batch, "HELD", 100_000)
    found, last = commits(*(blocks_of(1, at, [Delta(0, bytes(40_000))]) for at in range(6)))
    reader = Batches(FILE, found.get)
    assert len(list(reader.blocks(1, last[1]))) == 6
    assert list(reader._held) == [5, 6]
    assert reader._size == sum(map(len, reader._held.values())) < 100_000


def test_a_directory_line_is_what_it_says():
    assert read_claim(commits(blocks_of(1, 2, EVENTS))[0][1]).places() == [
        Place(1, 2, 0, len(EVENTS), len(encode_events(EVENTS)))
    ]
