"""A block says what it is, and whether it is whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.errors import LogDamaged
from rollout_log.events import Delta, encode_events
from rollout_log.log.block import HEADER_SIZE, RAW, ZSTD, pack_blocks, unpack_block, writer_identity

WRITER = writer_identity("host-1-2")


def test_the_bytes_are_those_of_the_format():
    ((first, data),) = pack_blocks(WRITER, 5, 7, [Delta(0, b"ab", 3)])
    payload = encode_events([Delta(0, b"ab", 3)])
    assert first == 7
    assert data == (
        b"RLB1\x01\x00\x00\x00"
        + WRITER
        + (5).to_bytes(8, "big")
        + (7).to_bytes(8, "big")
        + (1).to_bytes(4, "big")
        + len(payload).to_bytes(4, "big") * 2
        + data[44:48]
        + payload
    )
    assert HEADER_SIZE == 48


@given(
    st.lists(st.binary(max_size=2000), min_size=1, max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)
def test_events_survive_and_any_changed_byte_is_noticed(datas, ordinal, first):
    events = [Delta(0, data) for data in datas]
    ((at, data),) = pack_blocks(WRITER, ordinal, first, events)
    block = unpack_block(data)
    assert (at, block.ordinal, block.first, block.count, block.writer) == (
        first,
        ordinal,
        first,
        len(events),
        WRITER,
    )
    assert block.events() == events
    assert unpack_block(data + b"rest of the page") == block
    for place in {0, 4, 5, 8, 20, 40, 45, 48, len(data) - 1, len(data) // 2}:
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(LogDamaged):
            unpack_block(bytes(changed))
    for length in (0, 10, HEADER_SIZE, len(data) - 1):
        with pytest.raises(LogDamaged):
            unpack_block(data[:length])


def test_large_payloads_are_compressed_and_split_at_events():
    small, large = [Delta(0, b"x" * 100)], [Delta(0, b"x" * 1000)]
    assert [unpack_block(data).codec for _, data in pack_blocks(WRITER, 0, 0, small)] == [RAW]
    assert [unpack_block(data).codec for _, data in pack_blocks(WRITER, 0, 0, large)] == [ZSTD]
    events = [Delta(0, bytes([at]) * 30_000) for at in range(9)] + [Delta(0, b"y" * 200_000)]
    blocks = [unpack_block(data) for _, data in pack_blocks(WRITER, 0, 4, events)]
    assert [event for block in blocks for event in block.events()] == events
    assert [block.first for block in blocks] == [
        4 + sum(b.count for b in blocks[:at]) for at in range(len(blocks))
    ]
    assert [len(block.payload) > 64 << 10 for block in blocks] == [False] * (len(blocks) - 1) + [True]
