"""What fuzzing starts from, by target: inputs that mean something, and those that once did harm."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import msgspec
import zstandard

import captures
from columns.test_damage import DATA, header_of
from rollout_log.events import Delta, Ended, Opened, Reads, encode_events
from rollout_log.log.batch import Packer
from rollout_log.log.group import Run, pack_group, split_events


def post(target: str, body: bytes) -> bytes:
    head = (
        f"POST {target} HTTP/1.1\r\nhost: x\r\nx-rollout-log-key: k1\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


EVENTS = [Opened("k", prompt_token_ids=[1]), Delta(0, b"{}", 3), Ended(0, "eof")]


def lines_of(name: str) -> bytes:
    """The first lines of a shipped fixture, after the header; the last one is cut."""
    with (Path(__file__).parent.parent.parent / "fixtures" / name).open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read(1 << 16).partition(b"\n")[2][:2500]


def column_parts() -> bytes:
    """A header and streams, as the target joins them again."""
    header, streams = header_of(DATA)
    packed = msgspec.msgpack.encode(header)
    return len(packed).to_bytes(2, "big") + packed + streams


SEEDS: dict[str, list[bytes]] = {
    "sse": [b"data: {}\n\n", b"\xef\xbb\xbfdata\r\n\r\n", b": c\rdata:x\r\rdata: y\n\n", b"data: [DONE]\n\n"],
    "dialects": [captures.load("a1-plain-length").body[:600], b'{"n":1e999,"token_ids":[1]}', b"[" * 3000],
    "requests": [b'{"token_ids":[1],"sampling_params":{"n":99999999999}}', b'{"prompt":[[1,2]]}', b"\xff"],
    "events": [
        b"\x91\x92\x01\xa1k",
        b"\x91\x90",
        b"\x91" * 3000,
        b"\x91\x93\x91o\x91\x92\xcb\xff\xff\xff\xff\xff\xff\xff\xff\x91i\x91\x90",  # not a number
        encode_events(EVENTS),
    ],
    "batches": [
        b"RLB1" + bytes(60),
        *(data for _, data in Packer(bytes(8), 2, {0: 1}).pack([(0, 0, len(EVENTS), encode_events(EVENTS))])),
    ],
    "groups": [
        b64decode(  # an event that is no UTF-8
            "npGTBwAExA6SBJUBAJHEBAABAALCAMQIkgKVAQCQwgDECJIBlQEDkMIAAMQAxDZSTENGAQEAAAAdAAAAHQAAAAAA"
            "AACWhIj8KLUv/SAUoQAAlQEDkJCWkZMCkcQCe32Q/////5CQxAiSAZUBAJDCAMQIkgGVAQKQwgDECJIClQEBkMMB"
            "xAiSApUBAZDDA8QkKLUv/SAb2QAAkp5roAEAocCRAUIAoMDCwMCAlQoAo2VvZsAAxAiSApUB/pDDAg=="
        ),
        pack_group([Run(7, 0, split_events(encode_events([*EVENTS, Reads(0, [1, 2], [3, 4])])))]),
    ],
    "fixtures": [
        b'{"rollout_log_fixture":[1,0]}\n{"sample":"k"}\n',
        b"\x1f\x8b\x08",
        b"\x28\xb5\x2f\xfd",
        lines_of("refusals.jsonl.zst"),
    ],
    "columns": [DATA, column_parts()],
    "http": [
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nx-rollout-log-base: "
        + b"9" * 5000
        + b"\r\n\r\n{}",
        b"POST //[x HTTP/1.1\r\nhost: x\r\nx-rollout-log-key: ../k\r\ncontent-length: 2\r\n\r\n{}",
        b"GET http://h HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 4400 + b"\r\n\r\n",
    ],
    "engine": [
        post("/inference/v1/generate", b'{"token_ids":[7,8],"sampling_params":{"max_tokens":2}}'),
        post("/generate", b'{"input_ids":[7,8],"sampling_params":{"n":1e9},"rid":["a"]}'),
        post("/_rollout_log/faults", b"drop_after=1,rate=nan,seed=-1"),
        post("/update_weight_version", b'{"new_version":' + b"9" * 5000 + b"}"),
        post("/pause?mode=%00&mode=keep", b'{"mode":[]}'),
        post("/abort_request", b'{"rid":{"a":1}}'),
        b"HEAD /_rollout_log/report HTTP/1.1\r\nhost: x\r\nx-rollout-log-fault: status_500=1\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n\r\n",
    ],
}
