"""Which recording answers which request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.memory import MemoryLog, record
from replay.streams import VLLM, aborted, body, sample, sse, whole
from rollout_log.replay import ReplayMiss
from rollout_log.replay.asking import Asked
from rollout_log.replay.desk import Desk
from rollout_log.replay.library import list_recordings
from rollout_log.replay.matching import Match, Matcher
from rollout_log.replay.playback import Over
from rollout_log.replay.prompts import Prompts

PROMPT = [7, 8, 9]


def ask(
    token_ids: Sequence[int],
    max_tokens: int = 4,
    *,
    key: str | None = None,
    hint: str | None = None,
    **params: Any,
) -> Asked:
    request = json.dumps(body(token_ids, max_tokens, **params)).encode()
    return Asked.of("POST", VLLM, request, key=key, hint=hint)


def matcher(log: MemoryLog, **options: Any) -> Matcher:
    return Matcher(list_recordings(log), **options)


def where(match: Match) -> tuple[str, int, int]:
    return match.recording.name, match.exchange.number, match.offset


def eight(log: MemoryLog) -> None:
    for number in range(8):
        sample(log, f"k{number}", PROMPT, [100 + number, 1, 2, 3])


def test_identical_requests_get_each_recording_once():
    log = MemoryLog()
    eight(log)
    desk = matcher(log)
    matches = [desk.match(ask(PROMPT)) for _ in range(8)]
    assert [match.recording.name for match in matches] == [f"k{number}" for number in range(8)]
    with pytest.raises(ReplayMiss, match="is being served to another request") as busy:
        desk.match(ask(PROMPT))
    assert busy.value.busy
    for match in matches:
        desk.release(match, finished=True)
    with pytest.raises(ReplayMiss, match=r"no recording is left .* 8 were served \('k0', 'k1', 'k2', …\)"):
        desk.match(ask(PROMPT))


def test_a_key_names_its_sample_whatever_the_order():
    log = MemoryLog()
    eight(log)
    desk = matcher(log)
    assert where(desk.match(ask(PROMPT, key="k5"))) == ("k5", 0, 0)
    assert where(desk.match(ask(PROMPT, hint="k3"))) == ("k3", 0, 0)
    assert where(desk.match(ask(PROMPT, hint="a session of today"))) == ("k0", 0, 0)
    sample(log, "other", [5], [6])
    desk = matcher(log)
    assert where(desk.match(ask([5], 1, hint="k3"))) == ("other", 0, 0), "a session that also asked for that"
    with pytest.raises(ReplayMiss, match="names the sample 'k9', which has no recording here"):
        desk.match(ask(PROMPT, key="k9"))


def test_spelling_and_request_ids_do_not_matter():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2, 3, 4])
    request = {**body(PROMPT, 4), "request_id": "another", "user": "me"}
    spelled = json.dumps(dict(reversed(request.items())), indent=3).encode()
    assert where(matcher(log).match(Asked.of("POST", "/v7" + VLLM + "/?x=1", spelled))) == ("k", 0, 0)


def test_tokens_that_were_served_bind_what_goes_on():
    log = MemoryLog()
    for key, first in (("a", 1), ("b", 2)):
        samples = sample(log, key, PROMPT, [], chunks=aborted([first, 5]), max_tokens=4)
        sample(log, key, [*PROMPT, first, 5], [6, 7], samples=samples)
    desk = matcher(log)
    ours, theirs = desk.match(ask(PROMPT)), desk.match(ask(PROMPT))
    assert (ours.recording.name, theirs.recording.name) == ("a", "b")
    desk.release(ours, finished=False)
    desk.release(theirs, finished=False)
    assert where(desk.match(ask([*PROMPT, 2, 5], 2))) == ("b", 1, 0)
    assert where(desk.match(ask([*PROMPT, 1, 5], 2))) == ("a", 1, 0)
    assert desk.report().unused == []
    assert desk.report().partly == []


def test_of_siblings_that_began_alike_each_goes_on_with_its_own():
    log = MemoryLog()
    for key, tokens in (("a", [1, 2]), ("b", [1, 2, 3, 4])):
        samples = sample(log, key, PROMPT, [], chunks=aborted(tokens), max_tokens=9)
        sample(log, key, [*PROMPT, *tokens], range(len(tokens) + 1, 10), samples=samples)
    desk = matcher(log)
    first, second = desk.match(ask(PROMPT, 9)), desk.match(ask(PROMPT, 9))
    desk.release(first, tokens=1, finished=False)
    desk.release(second, tokens=4, finished=False)
    assert where(desk.match(ask([*PROMPT, 1, 2, 3, 4], 5))) == ("b", 1, 0)
    assert where(desk.match(ask([*PROMPT, 1], 8))) == ("a", 0, 1)


def test_an_early_abort_stands_for_every_recorded_one_it_came_before():
    """A sample aborted at 2, 4 and 6: aborted three times, wherever, it then goes on to its end."""
    log = MemoryLog()
    samples = None
    for cut in (0, 2, 4):
        chunks = aborted([cut + 1, cut + 2])
        samples = sample(
            log, "k", [*PROMPT, *range(1, cut + 1)], [], chunks=chunks, samples=samples, max_tokens=8 - cut
        )
    sample(log, "k", [*PROMPT, *range(1, 7)], [7, 8], samples=samples)
    desk = Desk(log)
    reached = []
    for have in (0, 1, 3, 5):
        request = json.dumps(body([*PROMPT, *range(1, have + 1)], 8 - have)).encode()
        playback = desk.take(Asked.of("POST", VLLM, request))
        while isinstance(piece := playback.step(), bytes):
            if playback.script.tokens_at(playback.sent) + have in {1, 3, 5}:
                break
        reached.append((have + playback.script.tokens_at(playback.sent), isinstance(piece, Over)))
        desk.leave(playback)
    assert reached == [(1, False), (3, False), (5, False), (8, True)]
    assert desk.report() == ([], [], [])


def test_any_position_or_recorded_ones_only():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2, 3, 4])
    desk = matcher(log)
    desk.release(desk.match(ask(PROMPT)), finished=False)
    again = desk.match(ask([*PROMPT, 1, 2], 2))
    assert where(again) == ("k", 0, 2)
    assert again.again
    exact = matcher(log, cut="exact")
    exact.release(exact.match(ask(PROMPT)), finished=False)
    with pytest.raises(ReplayMiss, match="no recorded request has just its first 5 token ids"):
        exact.match(ask([*PROMPT, 1, 2], 2))


def test_what_a_fault_ended_is_as_good_as_unasked():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2, 3, 4])
    desk = matcher(log, cut="exact")
    desk.release(desk.match(ask(PROMPT)), finished=False, ended=False)
    assert where(desk.match(ask(PROMPT))) == ("k", 0, 0)


def test_the_turn_of_an_agent():
    log = MemoryLog()
    samples = sample(log, "k", PROMPT, [1, 2])
    sample(log, "k", [*PROMPT, 1, 2, 50, 51], [3, 4], samples=samples)
    desk = matcher(log)
    desk.release(desk.match(ask(PROMPT, 2)), finished=True)
    with pytest.raises(ReplayMiss, match="'k' request 1: token 6 is 99, recorded 51"):
        desk.match(ask([*PROMPT, 1, 2, 50, 99], 2))
    assert where(desk.match(ask([*PROMPT, 1, 2, 50, 51], 2))) == ("k", 1, 0)


@pytest.mark.parametrize(
    ("asked", "difference"),
    [
        (ask([7, 8, 10]), "nearest is k: token 2 is 10, recorded 9"),
        (ask([7, 8]), "nearest is k: the request ends at token 2, recorded is 9 there"),
        (ask([1]), "nearest is k: token 0 is 1, recorded 7"),
        (ask([*PROMPT, 1, 9]), "nearest is 'k' request 0: token 4 is 9, recorded 2"),
        (ask(PROMPT, 5), "nearest is 'k' request 0: max_tokens is 5, recorded 4"),
        (ask(PROMPT, temperature=0.5), "nearest is 'k' request 0: temperature is 0.5, recorded 1.0"),
        (ask(PROMPT, top_p=0.9, temperature=1), "nearest is 'k' request 0: top_p is 0.9, recorded absent"),
        (
            Asked.of("POST", "/generate", b"{}"),
            "no recording of /generate; none of the 1 recorded is like it",
        ),
    ],
)
def test_a_miss_names_the_nearest_and_the_first_difference(asked, difference):
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2, 3, 4], temperature=1.0)
    with pytest.raises(ReplayMiss) as miss:
        matcher(log).match(asked)
    assert difference in str(miss.value)


def test_of_recordings_of_a_prompt_the_nearest_differs_least():
    log = MemoryLog()
    sample(log, "far", PROMPT, [1, 2, 3, 4], seed=2, temperature=0.5)
    sample(log, "near", PROMPT, [1, 2, 3, 4], seed=3, temperature=1.0)
    sample(log, "as near", PROMPT, [1, 2, 3, 4], seed=4, temperature=1.0)
    with pytest.raises(ReplayMiss, match="nearest is 'near' request 0: seed is 1, recorded 3"):
        matcher(log).match(ask(PROMPT, seed=1, temperature=1.0))


def test_the_same_number_is_the_same_parameter():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2, 3, 4], temperature=1.0)
    assert where(matcher(log).match(ask(PROMPT, temperature=1))) == ("k", 0, 0)


def test_text_matches_by_what_the_body_says():
    log = MemoryLog()
    for key, text in (("a", "hello"), ("b", "bye")):
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": True}
        frame = sse({"choices": [{"index": 0, "delta": {"content": key}, "finish_reason": "stop"}]})
        record(log, key, "/v1/chat/completions", json.dumps(chat).encode(), [frame])
    desk = matcher(log)
    request = b'{"stream":true,"messages":[{"content":"bye","role":"user"}],"model":"tiny","user":"me"}'
    assert where(desk.match(Asked.of("POST", "/v1/chat/completions", request))) == ("b", 0, 0)
    with pytest.raises(ReplayMiss, match="messages is"):
        desk.match(Asked.of("POST", "/v1/chat/completions", request.replace(b"bye", b"adieu")))


def test_the_report_tells_what_nobody_asked_for():
    log = MemoryLog()
    eight(log)
    samples = sample(log, "two", [1], [2], max_tokens=4, chunks=aborted([2]))
    sample(log, "two", [1, 2], [3, 4, 5], samples=samples)
    desk = matcher(log)
    desk.match(ask([1]))
    with pytest.raises(ReplayMiss) as miss:
        desk.match(ask([5]))
    desk.miss(miss.value)
    report = desk.report()
    assert report.unused == [f"k{number}" for number in range(8)]
    assert report.partly == [("two", [1])]
    assert report.misses == [str(miss.value)]


def test_many_samples_of_many_prompts():
    log = MemoryLog()
    prompts = [[number // 100, number % 100, *range(number % 7)] for number in range(1000)]
    for number, prompt in enumerate(prompts):
        sample(log, f"k{number}", prompt, [1], chunks=whole([1]))
    desk = matcher(log)
    found = {desk.match(ask(prompt, 1)).recording.name for prompt in reversed(prompts)}
    assert len(found) == len(prompts)


tokens = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@settings(max_examples=50)
@given(st.lists(tokens, max_size=12), tokens)
def test_prefixes_are_found_by_bisection(prompts, request_ids):
    expected = {prompt for prompt in prompts if request_ids[: len(prompt)] == prompt}
    found = list(Prompts(prompts).prefixes_of(request_ids))
    assert found == sorted(expected, key=len, reverse=True)


@settings(max_examples=50)
@given(st.lists(tokens, min_size=1, max_size=12), tokens)
def test_the_nearest_shares_the_longest_prefix(prompts, request_ids):
    def shared(prompt: tuple[int, ...]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(prompt, request_ids, strict=False)) if a != b),
            min(len(prompt), len(request_ids)),
        )

    near = Prompts(prompts).nearest(request_ids)
    assert near is not None
    assert near[1] == shared(near[0]) == max(map(shared, prompts))
