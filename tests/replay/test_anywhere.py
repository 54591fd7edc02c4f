"""The law of `cut="any"`: wherever a client is cut off, going on until the end gives the recorded sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.memory import MemoryLog, record
from replay.streams import DONE, SGLANG, VLLM, body, frame, sse, usage
from rollout_log.events import End
from rollout_log.fold import Rollout
from rollout_log.record.samples import Samples
from rollout_log.replay.asking import Asked
from rollout_log.replay.desk import Desk
from rollout_log.replay.playback import Playback, Wait

PROMPT = [70, 80, 90]
BUDGET = 12


def vllm_request(token_ids: Sequence[int], left: int) -> dict[str, Any]:
    return body(token_ids, left)


def vllm_stream(start: int, pieces: list[list[int]], finish: str | None, name: str) -> list[bytes]:
    """Frames of one request that went on after `start` tokens; each token's version is its half."""
    tokens = [token for piece in pieces for token in piece]
    versions = [("a" if start + place < BUDGET // 2 else "b") for place in range(len(tokens))]
    spans: list[tuple[str, int, int]] = []
    for place, version in enumerate(versions):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], place + 1)
        else:
            spans.append((version, place, place + 1))
    frames = [frame(piece, name=name) for piece in pieces]
    if finish == "abort":
        frames.append(frame([], "abort", spans=spans, name=name))
    elif finish == "abort with tokens":
        frames[-1] = frame(pieces[-1], "abort", spans=spans, name=name)
    elif finish:
        frames[-1] = frame(pieces[-1], finish, spans=spans, name=name)
    return [*frames, usage(len(PROMPT) + start, len(tokens), name), DONE] if finish else frames


def sglang_request(token_ids: Sequence[int], left: int) -> dict[str, Any]:
    params = {"max_new_tokens": left}
    return {"input_ids": list(token_ids), "sampling_params": params, "return_logprob": True, "stream": True}


def sglang_stream(start: int, pieces: list[list[int]], finish: str | None, name: str) -> list[bytes]:
    frames: list[bytes] = []
    so_far: list[int] = []
    for place, piece in enumerate(pieces):
        so_far += piece
        last = finish.split()[0] if finish and finish != "abort" and place == len(pieces) - 1 else None
        frames.append(_sglang(start, so_far, piece, last, name))
    if finish == "abort":
        frames.append(_sglang(start, so_far, [], "abort", name))
    return [*frames, DONE] if finish else frames


def _sglang(start: int, so_far: list[int], piece: list[int], finish: str | None, name: str) -> bytes:
    shown = piece if INCREMENTAL in name else so_far
    meta = {
        "id": name,
        "finish_reason": {"type": finish} if finish else None,
        "prompt_tokens": len(PROMPT) + start,
        "completion_tokens": len(so_far),
        "weight_version": "a",
        "output_token_logprobs": [[-token / 100, token, None] for token in shown],
    }
    return sse({"output_ids": list(shown), "meta_info": meta})


INCREMENTAL = "incremental"
ENGINES = {
    "vllm": (VLLM, vllm_request, vllm_stream),
    "sglang": (SGLANG, sglang_request, sglang_stream),
    "sglang-incremental": (SGLANG, sglang_request, sglang_stream),
}


HOWS = ["abort", "abort with tokens", "cancelled", "reset"]


@st.composite
def attempts(draw: st.DrawFn) -> list[tuple[list[list[int]], str]]:
    """How the recorded sample came about: (tokens by frame, how it was cut) for each request."""
    cuts = sorted(draw(st.sets(st.integers(1, BUDGET - 1), max_size=3)))
    found, start = [], 0
    for end in [*cuts, BUDGET]:
        places = sorted(draw(st.sets(st.integers(start + 1, end - 1)))) if end - start > 1 else []
        edges = [start, *places, end]
        pieces = [list(range(a + 1, b + 1)) for a, b in pairwise(edges)]
        how = "length" if end == BUDGET else draw(st.sampled_from(HOWS))
        found.append((pieces, how))
        start = end
    return found


def recorded(engine: str, requests: list[tuple[list[list[int]], str]]) -> MemoryLog:
    path, request, stream = ENGINES[engine]
    log = MemoryLog()
    samples, start = None, 0
    name = INCREMENTAL if engine.endswith(INCREMENTAL) else "r"
    for number, (pieces, how) in enumerate(requests):
        sent = json.dumps(request([*PROMPT, *range(1, start + 1)], BUDGET - start)).encode()
        finish = None if how in ("cancelled", "reset") else how
        end: End = how if how in ("cancelled", "reset") else "eof"  # type: ignore[assignment]
        frames = stream(start, pieces, finish, f"{name}-{number}")
        samples = record(log, "k", path, sent, frames, samples=samples, end=end)
        start += sum(map(len, pieces))
    return log


def drive(playback: Playback, cut: int | None, *, abort: bool) -> bytes:
    """Read a response, up to `cut` bytes; then abort it, or leave."""
    got = b""
    while True:
        step = playback.step()
        if isinstance(step, Wait):
            if not abort:
                return got
            playback.abort()
            abort = False
        elif isinstance(step, bytes):
            got += step
            if cut is not None and len(got) >= cut:
                if not abort:
                    return got
                playback.abort()
                abort, cut = False, None
        else:
            return got


def finish(engine: str, log: MemoryLog, cuts: list[tuple[int, bool]]) -> Rollout:
    """Be a client that is cut off at those places, and goes on until it has all."""
    path, request, _ = ENGINES[engine]
    desk = Desk(log)
    samples = Samples(None)
    plan = iter(cuts)
    for _ in range(len(cuts) + 10):
        live = samples.get("k")
        have = live.rollout.choice().token_ids if live else []
        sent = json.dumps(request([*PROMPT, *have], BUDGET - len(have))).encode()
        playback = desk.take(Asked.of("POST", path, sent))
        exchange = samples.request("k", path=path, body=sent)
        exchange.respond(200, playback.script.headers)
        cut, abort = next(plan, (None, True))
        exchange.feed(drive(playback, cut, abort=abort))
        exchange.end("cancelled" if not abort else "eof")
        desk.leave(playback)
        if exchange.rollout.choice().finish_reason == "length":
            assert desk.report() == ([], [], [])
            return exchange.rollout
    raise AssertionError(f"not finished: {have}")


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40)
@given(requests=attempts(), cuts=st.lists(st.tuples(st.integers(0, 4000), st.booleans()), max_size=4))
def test_going_on_from_anywhere_gives_the_recorded_sample(engine, requests, cuts):
    log = recorded(engine, requests)
    truth = log.rollout(0)
    again = finish(engine, log, cuts)
    assert again.choice().token_ids == truth.choice().token_ids == list(range(1, BUDGET + 1))
    assert again.choice().logprobs == truth.choice().logprobs
    assert not [each for each in again.problems if each.severity == "error"]
    versions = [
        span.version
        for span in again.choice().weight_versions(again.dispatched)
        for _ in range(span.start, span.end)
    ]
    if (
        engine == "vllm"
        and all(how.startswith("abort") for _, how in requests[:-1])
        and all(abort for _, abort in cuts)
    ):
        assert versions == ["a" if place < BUDGET // 2 else "b" for place in range(BUDGET)]
