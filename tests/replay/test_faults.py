"""Faults on demand: what each does to a response, and that a seed repeats them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import captures
from replay.exchanges import record_capture
from replay.memory import MemoryLog
from replay.streams import DONE, VLLM, body, frame, frames_of, sample, tokens_of, whole
from rollout_log.errors import RolloutLogError
from rollout_log.replay import serve_replay
from rollout_log.replay.faults import FAULT_HEADER, Faults
from rollout_log.replay.library import list_recordings
from rollout_log.replay.matching import Match
from rollout_log.replay.script import Script
from rollout_log.replay.splice import script_of

NAME = "a1-plain-length"


def script() -> Script:
    log = MemoryLog()
    record_capture(log, NAME)
    (recording,) = list_recordings(log)
    return script_of(Match(recording, recording.exchanges[0], 0, again=False), hold=True, go=False)


def struck(**faults: Any) -> Script:
    return Faults(**faults).strike(script())


def frames() -> list[bytes]:
    return [block + b"\n\n" for block in captures.load(NAME).body.split(b"\n\n") if block]


@pytest.mark.parametrize(("drop", "ending"), [("fin", "cut"), ("rst", "reset")])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_drop_comes_after_so_many_frames(drop, ending, after):
    found = struck(drop_after=after, drop=drop)
    assert found.body == b"".join(frames()[:after])
    assert found.ending == ending
    assert not found.finished_at(found.size)


def test_a_drop_later_than_the_stream_never_comes():
    whole = script()
    assert Faults(drop_after=1000).strike(whole) is whole


def test_an_error_frame():
    found = struck(error_after=2, error_code=503)
    assert found.body.startswith(b"".join(frames()[:2]))
    assert found.body.endswith(DONE)
    assert frames_of(found.body)[-1]["error"]["code"] == 503
    assert found.ending == "eof"


def test_an_end_without_a_terminal():
    found = struck(no_terminal=True)
    assert found.body == b"".join(frames()[:31])
    assert b'"finish_reason":"length"' in frames()[31]
    assert found.ending == "eof"


def test_a_stall():
    found = struck(stall_after=3)
    assert found.body == b"".join(frames()[:3])
    assert found.ending == "stall"


def test_a_slow_loris():
    found = struck(slow=0.25)
    assert {len(piece.data) for piece in found.pieces} == {1}
    assert found.body == captures.load(NAME).body
    assert found.slow == 0.25
    assert not found.faulty


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), coalesce=st.integers(0, 40), split=st.booleans())
def test_delivery_changes_no_byte(seed, coalesce, split):
    found = struck(seed=seed, coalesce=coalesce, split=split)
    assert found.body == captures.load(NAME).body
    assert all(piece.data for piece in found.pieces)
    times = [piece.time for piece in found.pieces]
    assert times == sorted(times)
    if coalesce and not split:
        ends = {mark.end for mark in found.marks}
        at = 0
        for piece in found.pieces:
            at += len(piece.data)
            assert at in ends
        assert len(found.pieces) == -(-len(frames()) // coalesce)


def test_statuses():
    found = struck(status_500=1)
    assert (found.status, found.ending) == (500, "eof")
    found = struck(status_429=1, retry_after=2)
    assert (found.status, dict(found.headers)["retry-after"]) == (429, "2")
    assert not found.finished_at(found.size)


def test_a_seed_repeats_itself_and_another_does_not():
    log = MemoryLog()
    for number in range(200):
        sample(log, f"k{number}", [number], [1, 2])

    def statuses(seed: int) -> list[int | None]:
        faults = Faults(seed=seed, status_500=0.3, status_429=0.2)
        found = []
        for recording in list_recordings(log):
            match = Match(recording, recording.exchanges[0], 0, again=False)
            found.append(faults.strike(script_of(match, hold=True, go=False)).status)
        return found

    assert statuses(1) == statuses(1) != statuses(2)
    assert 30 < statuses(1).count(500) < 90
    assert 15 < statuses(1).count(429) < 65


def test_attempts_limit_them():
    faults = Faults(drop_after=1, attempts=2)
    assert [faults.strike(script(), attempt=i).faulty for i in range(4)] == [True, True, False, False]


def test_a_fault_before_the_hold_comes_first_and_one_behind_it_later():
    log = MemoryLog()
    chunks = [frame([token]) for token in (1, 2, 3)]
    chunks += [frame([], "abort"), DONE]
    sample(log, "k", [7], [], chunks=chunks, max_tokens=9)
    (recording,) = list_recordings(log)
    held = script_of(Match(recording, recording.exchanges[0], 0, again=False), hold=True, go=False)
    assert held.hold == sum(map(len, chunks[:3]))
    assert Faults(drop_after=2).strike(held).hold is None
    assert Faults(drop_after=4).strike(held).hold == held.hold


# How they are asked for


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("drop_after=5,drop=rst", Faults(drop_after=5, drop="rst")),
        ("split, coalesce=3, slow=0.5", Faults(split=True, coalesce=3, slow=0.5)),
        ('{"status_500": 0.5, "seed": 3}', Faults(status_500=0.5, seed=3)),
    ],
)
def test_how_they_are_written(text, faults):
    assert Faults.parse(text) == faults


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("explode", "there is no 'explode', but seed, rate, attempts, "),
        ("rate=2", "rate takes a number from 0 to 1"),
        ('{"drop": "gently"}', "drop takes fin or rst"),
        ("split,drop_after", "drop_after takes a whole number of 0 or more"),
        ("drop_after=-1", "drop_after takes a whole number of 0 or more"),
        ('{"drop_after": "3"}', "drop_after takes a whole number of 0 or more"),
        ("split=20x", "split takes true or false"),
        ("{", ""),
    ],
)
def test_what_is_no_fault_is_refused(text, why):
    with pytest.raises(RolloutLogError) as refused:
        Faults.parse(text)
    assert str(refused.value).startswith(f"these are no faults: {text!r}: {why}")


def test_a_file_of_faults(tmp_path):
    path = tmp_path / "faults.json"
    path.write_text('{"drop_after": 3}')
    assert Faults.load(path) == Faults(drop_after=3)
    path.write_text('{"drop_after": "3"}')
    with pytest.raises(RolloutLogError, match=r"faults.json holds no faults: .*drop_after"):
        Faults.load(path)


@asynccontextmanager
async def serving(log: MemoryLog, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_replay(log, **options) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize("cut", ["any", "exact"])
async def test_a_retry_from_scratch_gets_the_same_recording(cut):
    log = MemoryLog()
    sample(log, "k", [7], [1, 2, 3])
    async with serving(log, faults=Faults(drop_after=2, attempts=2), cut=cut) as client:
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(VLLM, json=body([7], 3))
        answer = await client.post(VLLM, json=body([7], 3))
        assert tokens_of(answer.content) == [1, 2, 3]
        assert (await client.post(VLLM, json=body([7], 3))).status_code == 404


async def test_a_retry_may_go_on():
    log = MemoryLog()
    sample(log, "k", [7], [1, 2, 3])
    async with serving(log) as client:
        with pytest.raises(httpx.ReadError):
            await client.post(VLLM, json=body([7], 3), headers={FAULT_HEADER: "drop_after=2,drop=rst"})
        answer = await client.post(VLLM, json=body([7, 1, 2], 1))
        assert tokens_of(answer.content) == [3]


async def test_a_header_asks_for_a_fault():
    log = MemoryLog()
    sample(log, "k", [7], [1, 2, 3])
    async with serving(log) as client:
        refused = await client.post(VLLM, json=body([7], 3), headers={FAULT_HEADER: "status_500=1"})
        assert refused.status_code == 500
        unknown = await client.post(VLLM, json=body([7], 3), headers={FAULT_HEADER: "explode"})
        assert unknown.status_code == 400
        assert "these are no faults" in unknown.json()["error"]["message"]
        assert tokens_of((await client.post(VLLM, json=body([7], 3))).content) == [1, 2, 3]


async def test_they_change_at_run_time():
    log = MemoryLog()
    sample(log, "k", [7], [1, 2, 3])
    control = "/_rollout_log/faults"
    async with serving(log) as client:
        assert (await client.get(control)).json()["rate"] == 0
        told = await client.post(control, json={"status_429": 1, "retry_after": 0})
        assert told.json()["status_429"] == 1
        assert (await client.post(VLLM, json=body([7], 3))).status_code == 429
        assert (await client.post(control, content=b"explode")).status_code == 400
        await client.delete(control)
        assert tokens_of((await client.post(VLLM, json=body([7], 3))).content) == [1, 2, 3]


async def test_a_stall_lasts_until_the_client_leaves():
    log = MemoryLog()
    sample(log, "k", [7], [1, 2, 3])
    chunks = whole([1, 2, 3], 1, name="generate-tokens-k")
    async with serving(log, faults=Faults(stall_after=1, attempts=1)) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(VLLM, json=body([7], 3), timeout=0.2)
        answer = await client.post(VLLM, json=body([7], 3))
        assert answer.content == b"".join(chunks)


async def test_no_fault_is_taken_from_afar():
    log = MemoryLog()
    async with (
        serve_replay(log, host="0.0.0.0") as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        assert (await client.post("/_rollout_log/faults", json={})).status_code == 403
