"""What is fuzzed: each takes bytes, and returns unless a promise is broken."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import zstandard

from columns.test_damage import with_packed_header
from replay.memory import MemoryLog
from replay.streams import sample
from rollout_log.columns import read_columns, unpack
from rollout_log.engines import dialect_named
from rollout_log.errors import LogDamaged, RolloutLogError
from rollout_log.events import Opened, decode_events, encode_events
from rollout_log.fold import Rollout, fold
from rollout_log.http_server import Handler, serve
from rollout_log.log.batch import HEADER_SIZE, Batches, unpack_batch
from rollout_log.log.block import Block
from rollout_log.log.group import encode_items
from rollout_log.log.group_reader import GroupReader
from rollout_log.record.proxy import Proxy
from rollout_log.record.samples import Samples
from rollout_log.replay.desk import Desk
from rollout_log.replay.server import ReplayHandler
from rollout_log.sources import open_source
from rollout_log.sse import FrameSplitter
from rollout_log.view import view

DIALECTS = ("vllm", "sglang", "openai", "")
PATHS = ("/inference/v1/generate", "/generate", "/v1/completions", "/v1/chat/completions")


def sse(data: bytes) -> None:
    whole, cut = FrameSplitter(), FrameSplitter()
    frames = whole.feed(data)
    pieces = [frame for at in range(len(data)) for frame in cut.feed(data[at : at + 1])]
    assert pieces == frames
    assert b"".join(frame.wire for frame in frames) + whole.tail() == data


def dialects(data: bytes) -> None:
    for name in DIALECTS:
        dialect = dialect_named(name)
        dialect.read_request(data)
        dialect.decode_frame(data, {0: 1})
        dialect.decode_tokens([data, data])
        dialect.decode_body(data)


def requests(data: bytes) -> None:
    samples = Samples(None)
    for path in PATHS:
        for key in ("k", None):
            exchange = samples.request(key, path=path, body=data, url=data.decode("latin-1"))
            exchange.respond(200, [("content-type", "text/event-stream")])
            exchange.feed(b"data: " + data + b"\n\n")
            exchange.feed(data)
            exchange.end("eof")
            assert exchange.broken is None
            msgspec.json.encode(view(exchange.rollout))


def events(data: bytes) -> None:
    with contextlib.suppress(LogDamaged):
        found = Block(b"", 0, 0, data[0] & 0xF if data else 0, 0, 0, data).events()
        assert encode_events(decode_events(encode_events(found))) == encode_events(found)
        view(fold(enumerate([Opened("k"), *found])))


def batches(data: bytes) -> None:
    """As they are, and with a checksum that holds."""
    rest, head = data[HEADER_SIZE:], data[: HEADER_SIZE - 4].ljust(HEADER_SIZE - 4, b"\0")
    for packed in (data, head + struct.pack(">I", zlib.crc32(rest, zlib.crc32(head))) + rest):
        with contextlib.suppress(LogDamaged):
            found = unpack_batch(packed)
            for block in found.blocks():
                block.events()
            list(
                Batches(Path(), {found.claim.number: packed}.get).blocks(
                    found.claim.places()[0].ordinal, found.claim.number
                )
            )


def groups(data: bytes) -> None:
    """The content of a chunk of a sealed segment."""
    with contextlib.suppress(RolloutLogError):
        for run in GroupReader(data).runs:
            Block(b"", run.ordinal, run.first, len(run.events), 0, 0, encode_items(run.events)).events()
    with contextlib.suppress(RolloutLogError):
        reader = GroupReader(data)
        for place in range(len(reader.places)):
            rollout = Rollout()
            for part in reader.parts(place):
                if isinstance(part, list):
                    rollout.apply_all(part)
                else:
                    rollout.apply_stretch(part)
            view(rollout)


def fixtures(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        for content in (data, b'{"rollout_log_fixture":[1,0]}\n' + data + b"\n"):
            path.write_bytes(content)
            with contextlib.suppress(RolloutLogError):
                reader = open_source(path)
                for entry in reader.samples():
                    view(reader.rollout(entry.ref))


def columns(data: bytes) -> None:
    """As they are; and as a header and streams, with a checksum that holds."""
    length = int.from_bytes(data[:2], "big")
    packed = zstandard.ZstdCompressor(level=1).compress(data[2 : 2 + length])
    for content in (data, with_packed_header(packed, data[2 + length :])):
        with contextlib.suppress(RolloutLogError):
            unpack(content, limit=1 << 20)
        with contextlib.suppress(RolloutLogError):
            found = read_columns(content, limit=1 << 20)
            for path in found.paths:
                found.counts(path)


class _Upstream(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        extensions = {"http_version": b"HTTP/1.1"}
        return httpx.Response(200, stream=httpx.ByteStream(b"ok"), extensions=extensions)


class _Failures(logging.Handler):
    """What handlers failed with; a client that hung up sees nothing of it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


async def _send(handler: Handler, data: bytes) -> None:
    """Send bytes and the end to a server, and then once more without the end; no handler fails."""
    logger, failures = logging.getLogger("rollout_log.http_server"), _Failures()
    logger.addHandler(failures)
    try:
        async with serve(handler, arrival_s=0.01, stall_s=0.01) as server:
            for ends in (True, False):
                reader, writer = await asyncio.open_connection(server.host, server.port)
                writer.write(data)
                if ends:
                    writer.write_eof()
                answer = b""
                with contextlib.suppress(ConnectionError):  # cut off while it still sent
                    answer = await asyncio.wait_for(reader.read(), 30)
                    writer.close()
                    await writer.wait_closed()
                assert not answer or answer.startswith(b"HTTP/1.1 ")
    finally:
        logger.removeHandler(failures)
    assert not failures.found, failures.found[0].getMessage()


async def _proxy(data: bytes) -> None:
    proxy = Proxy(Samples(None), "http://127.0.0.1:9")
    await proxy.aclose()
    proxy._transport = _Upstream()  # type: ignore[assignment]
    await _send(proxy, data)


def http(data: bytes) -> None:
    """The proxy, and the server beneath it."""
    asyncio.run(_proxy(data))


def engine(data: bytes) -> None:
    """The stand-in engine, with its controls."""
    asyncio.run(_send(ReplayHandler(Desk(_recorded())), data))


@functools.cache
def _recorded() -> MemoryLog:
    log = MemoryLog()
    for number in range(3):
        sample(log, f"k{number}", [7, 8], [number, 2])
    return log


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (sse, dialects, requests, events, batches, groups, fixtures, columns, http, engine)
}
