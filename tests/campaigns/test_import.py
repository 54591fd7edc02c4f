"""Files and answers from strangers: nothing in them runs, and what they expand to is bounded."""

from __future__ import annotations

import base64
import gzip
import io
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from rollout_log.errors import LogDamaged, RolloutLogError
from rollout_log.events import Closed, Marked, Opened, encode_events
from rollout_log.fixture.files import HEADER, is_fixture
from rollout_log.fixture.lines import dump
from rollout_log.log import LogReader
from rollout_log.log.block import Block
from rollout_log.sources import open_source
from rollout_log.trainer.arrays import routed_experts
from stored import store


class Planted:
    """Unpickled anywhere, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


@pytest.fixture
def bomb(tmp_path: Path):
    """A pickle, and at the end the proof that nobody has loaded it."""
    proof = tmp_path / "it ran"
    data = pickle.dumps(Planted(proof))
    pickle.loads(data)
    assert proof.exists(), "it works"
    proof.unlink()
    yield data
    assert not proof.exists()


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def test_a_pickle_in_any_place_is_bytes(bomb, tmp_path, call):
    planted = tmp_path / "planted"
    planted.write_bytes(bomb)
    events = [
        Opened("k", metadata={"pickle": bomb, "yaml": "!!python/object/apply:os.system [touch x]"}),
        Marked("m", {"__reduce__": bomb, "$msgpack": bomb.hex()}),
        Closed(reward=bomb, sample={"tokenizer": str(planted)}),
    ]
    log = store(tmp_path / "log", [events])
    fixture, again = tmp_path / "f.jsonl", tmp_path / "again"
    assert call("verify", log).code == 0
    for verb in (
        ["show", log, "k", "--json"],
        ["export", log, "--to", "fixture", "-o", fixture],
        ["export", log, "--to", "jsonl", "-o", tmp_path / "out.jsonl"],
        ["export", log, "--to", "parquet", "-o", tmp_path / "out.parquet"],
        ["export", log, "--to", "perfetto", "-o", tmp_path / "out.json"],
        ["import", fixture, again],
        ["show", fixture, "k"],
        ["show", again, "k"],
        ["verify", again],
    ):
        result = call(*verb)
        assert result.code == 0, (verb, result.err)
    with LogReader.open(again) as reader:
        found = [event for _, event in reader.events(reader.find("k"))]
    assert [event for event in found if isinstance(event, (Marked, Closed))] == events[1:]


@pytest.mark.parametrize(
    "name", ["dump.pt", "f.jsonl", "f.jsonl.gz", "f.zst", "out.parquet", "segment-000001.rlog"]
)
def test_a_pickle_in_the_place_of_a_file_is_refused(name, bomb, tmp_path, call):
    file = tmp_path / name
    for content in (bomb, gzip.compress(bomb), zstandard.compress(bomb)):
        file.write_bytes(content)
        for verb in (
            ["show", file, "k"],
            ["import", file, tmp_path / "log"],
            ["serve", file],
            ["replay", file],
        ):
            result = call(*verb)
            assert result.code == 2, verb
            assert len(result.err.splitlines()) == 1
    assert not is_fixture(file)


def test_a_pickle_in_the_place_of_a_segment_is_damage(bomb, tmp_path, call):
    log = store(tmp_path / "log", [[Opened("k")]])
    (folder,) = (path for path in log.iterdir() if path.is_dir())
    (folder / "segment-000002.rlog").write_bytes(bomb)
    (folder / "segment-000003.sealed").write_bytes(bomb)
    result = call("verify", log)
    assert result.code == 2
    assert "segment-000002.rlog" in result.out


def test_routed_experts_without_objects_only(bomb):
    objects = np.empty(2, dtype=object)
    objects[:] = [bomb, bomb]
    good = base64.b64encode(npy(np.arange(4, dtype=np.int32))).decode()
    assert np.asarray(routed_experts(good, 2, 1, 2)).tolist() == [[[0, 1]], [[2, 3]]]
    pretends = b"\x93NUMPY" + bomb
    for data in (npy(objects, allow_pickle=True), pretends, b"\x93NUMPY", b"abc"):
        with pytest.raises(RolloutLogError, match="routed experts"):
            routed_experts(base64.b64encode(data).decode(), 2, 1, 2)
    with pytest.raises(RolloutLogError, match="routed experts"):
        routed_experts("no base64: é", 2, 1, 2)


def test_routed_experts_that_claim_to_be_huge_take_no_memory():
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (%d,), }" % 10**13
    head = header.ljust(118 - 1) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    with pytest.raises(RolloutLogError, match="routed experts"):
        routed_experts(base64.b64encode(data).decode(), 2, 1, 2)


def test_a_damaged_gzip_file_is_no_fixture_or_a_damaged_one(tmp_path):
    lines = dump({HEADER: (1, 0)}).encode() + b"\n" + b'{"x": 1}\n' * 200
    whole = gzip.compress(lines)
    file = tmp_path / "f.gz"
    for seed in range(300):
        chance, damaged = random.Random(seed), bytearray(whole)
        damaged[chance.randrange(2, len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(RolloutLogError):
            open_source(file)


def test_events_nested_without_end_are_damage():
    """A block whose checksum holds, made by a stranger."""
    head = encode_events([Marked("m", {"a": 1})])
    assert head.endswith(b"\x81\xa1a\x01\x00")
    for payload in (
        b"\x91" * 200_000 + b"\x01",
        head[:-2] + b"\x91" * 100_000 + b"\x01\x00",
        b"\x91\x90",
        b"\x91\x01",
    ):
        with pytest.raises(LogDamaged):
            Block(b"", 0, 0, 1, 0, 0, payload).events()


EXPANDING = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from rollout_log.errors import RolloutLogError
from rollout_log.log.batch import _CHECKSUM, _HEADER, _PLACE, MAGIC, unpack_batch
from rollout_log.sources import open_source
import zlib
try:
    if sys.argv[1] == "batch":
        stored, claims = open(sys.argv[2], "rb").read(), int(sys.argv[3])
        head = _HEADER.pack(MAGIC, 1, 1, 0, b"12345678", 1, 1, claims, len(stored))
        rest = _PLACE.pack(0, 0, 0, 1, claims) + stored
        unpack_batch(head + _CHECKSUM.pack(zlib.crc32(rest, zlib.crc32(head))) + rest)
    else:
        open_source(sys.argv[2])
except RolloutLogError as error:
    print(type(error).__name__)
# `ru_maxrss` would begin with what the parent had.
(most,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
assert int(most) < 1_400_000, most
"""


def zeros(total: int) -> bytes:
    """A zstd frame of many bytes that are nothing."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    piece = bytes(16 << 20)
    return b"".join([*(compressor.compress(piece) for _ in range(total >> 24)), compressor.flush()])


def test_a_frame_that_tells_another_size_than_its_batch_is_not_expanded(tmp_path):
    file = tmp_path / "frame"
    file.write_bytes(zstandard.compress(bytes(1 << 30)))
    done = subprocess.run(
        [sys.executable, "-c", EXPANDING, "batch", file, "1000"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("LogDamaged\n", 0), done.stderr[-500:]


@pytest.mark.parametrize("claims", ["1000", "4294967295"])
def test_a_batch_expands_to_what_its_header_says_and_no_further(claims, tmp_path):
    file = tmp_path / "frame"
    file.write_bytes(zeros(2 << 30))
    done = subprocess.run(
        [sys.executable, "-c", EXPANDING, "batch", file, claims], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("LogDamaged\n", 0), done.stderr[-500:]


@pytest.mark.campaign
def test_a_fixture_that_expands_to_gigabytes_is_refused_in_time(tmp_path):
    head = dump({HEADER: (1, 0)}).encode() + b"\n"
    file = tmp_path / "f.zst"
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [compressor.compress(head), *(compressor.compress(bytes(16 << 20)) for _ in range(200))]
    file.write_bytes(b"".join([*parts, compressor.flush()]))
    done = subprocess.run(
        [sys.executable, "-c", EXPANDING, "fixture", file], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("LogDamaged\n", 0), done.stderr[-500:]
