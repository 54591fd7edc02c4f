"""The library tap: retry, resume and abort against an engine that misbehaves."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket

import httpx
import pytest
from typing_extensions import Self

from raw_server import RawStream, play
from rollout_log.fold import Rollout
from rollout_log.record import Call, GenerationFailed, GenerationRefused, Recorder
from rollout_log.record.retry import Backoff
from rollout_log.record.samples import Samples
from rollout_log.record.sending import _Sending
from rollout_log.record.watchdog import Watchdog

PATH = "/inference/v1/generate"
JSON = [("content-type", "application/json")]
QUICK = Backoff(first=0.001, longest=0.002, tries=5)


def frame(ids: list[int], finish: str | None = None, version: str | None = "7") -> bytes:
    logprobs = {"content": [{"token_id": i, "logprob": -i / 8} for i in ids]}
    choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "weight_version": version}).encode() + b"\n\n"


def error_frame(code: int) -> bytes:
    return b'data: {"error": {"message": "boom", "code": %d}}\n\ndata: [DONE]\n\n' % code


def usage(count: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % count


DONE = b"data: [DONE]\n\n"


def body(max_tokens: int = 10, **params: object) -> dict[str, object]:
    return {
        "model": "m",
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 1, **params},
        "stream": True,
    }


class Served:
    """An engine that plays `streams` in order, and a recorder that talks to it."""

    def __init__(self, *streams: RawStream, **settings: object) -> None:
        self.streams = streams
        self.settings = {"backoff": QUICK, **settings}

    async def __aenter__(self) -> Self:
        self._play = play(*self.streams)
        self.engine = await self._play.__aenter__()
        self.client = httpx.AsyncClient()
        self.recorder = Recorder(None, self.client, **self.settings)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.aclose()
        await self._play.__aexit__(*error)

    async def generate(self, request: dict[str, object] | None = None, **options: object):
        call = self.recorder.generate("k", self.engine.url + PATH, request or body(), **options)
        return await asyncio.wait_for(call, 20)

    def bodies(self) -> list[dict]:
        return [json.loads(request.body) for request in self.engine.requests if request.method == "POST"]


CUT = RawStream(body=frame([11]) + frame([12]), end="reset")
REST = RawStream(body=frame([13], "stop") + usage(1) + DONE)
WHOLE = RawStream(body=frame([21]) + frame([22], "stop") + usage(2) + DONE)


def causes(rollout) -> list[tuple[int, str, str | None]]:
    return [(request.base, request.cause, rollout.ended_of(request)) for request in rollout.requests]


async def test_a_whole_stream():
    async with Served(WHOLE) as served:
        rollout = await served.generate()
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [21, 22])
    assert rollout.usage == {"completion_tokens": 2}


async def test_headers_go_on_once_and_without_ours():
    headers = {
        "X-Rollout-Log-Key": "k",
        "Accept-Encoding": "gzip",
        "Content-Type": "text/json",
        "X-Session-Id": "s",
    }
    async with Served(WHOLE) as served:
        await served.generate(headers=headers)
        sent = served.engine.requests[0].headers
    names = [name.lower() for name, _ in sent]
    assert "x-rollout-log-key" not in names
    found = {name.lower(): value for name, value in sent}
    assert (found["accept-encoding"], found["content-type"]) == ("identity", "text/json")
    assert found["x-session-id"] == "s"
    assert len(names) == len(set(names))


async def test_a_lost_connection_goes_on_where_the_weights_are_known_to_be_the_same():
    async with Served(CUT, REST) as served:
        rollout = await served.generate(weight_version="7")
    assert rollout.choice().token_ids == [11, 12, 13]
    assert causes(rollout) == [(0, "first", "reset"), (2, "retry", "finished")]
    first, second = served.bodies()
    assert second["token_ids"] == [1, 2, 11, 12]
    assert (first["sampling_params"]["max_tokens"], second["sampling_params"]["max_tokens"]) == (10, 8)
    assert not [problem for problem in rollout.problems if problem.severity != "info"]


@pytest.mark.parametrize(
    ("settings", "options", "params"),
    [
        ({}, {"weight_version": "8"}, {}),
        ({}, {}, {}),
        ({"on_retry": "restart"}, {"weight_version": "7"}, {}),
        ({}, {"weight_version": "7"}, {"seed": 1}),
        ({}, {"weight_version": "7"}, {"presence_penalty": 0.5}),
        ({}, {"weight_version": "7"}, {"stop": ["\n"]}),
        ({}, {"weight_version": "7"}, {"not_known_today": True}),
    ],
    ids=["new weights", "weights unknown", "restart", "seed", "penalty", "stop string", "unknown parameter"],
)
async def test_otherwise_it_starts_again(settings, options, params):
    async with Served(CUT, WHOLE, **settings) as served:
        rollout = await served.generate(body(**params), **options)
    assert rollout.choice().token_ids == [21, 22]
    assert causes(rollout) == [(0, "first", "reset"), (0, "retry", "finished")]
    assert rollout.discarded == 2
    assert served.bodies()[1] == served.bodies()[0]


@pytest.mark.parametrize(
    ("settings", "options"), [({"on_retry": "continue"}, {}), ({}, {"masks_offpolicy": True})]
)
async def test_new_weights_are_no_obstacle_where_the_caller_says_so(settings, options):
    async with Served(CUT, REST, **settings) as served:
        rollout = await served.generate(weight_version="8", **options)
    assert rollout.choice().token_ids == [11, 12, 13]


@pytest.mark.parametrize(
    "failure",
    [
        RawStream(500, JSON, b'{"error": "x"}'),
        RawStream(429, JSON, b"{}"),
        RawStream(body=error_frame(500)),
        RawStream(body=frame([11]), end="incomplete"),
        RawStream(body=frame([11])),
        RawStream(status=None, body=b""),
    ],
    ids=["500", "429", "error frame 500", "no last chunk", "no terminal", "no response"],
)
async def test_what_passes_is_retried(failure):
    async with Served(failure, failure, WHOLE) as served:
        rollout = await served.generate()
    assert rollout.choice().token_ids == [21, 22]
    assert len(rollout.requests) == 3


async def test_a_child_is_retried_as_the_child_it_is():
    async with Served(WHOLE, CUT, REST, RawStream(500), WHOLE) as served:
        await served.generate()
        other = {**body(), "token_ids": [7, 8]}
        child = await served.generate(other, weight_version="7")
        another = await served.generate({**body(), "token_ids": [5]})
        parent = served.recorder.samples.get("k").rollout
    assert (child.opened.key, child.prompt_token_ids, child.choice().token_ids) == (
        "k~2",
        [7, 8],
        [11, 12, 13],
    )
    assert causes(child) == [(0, "first", "reset"), (2, "retry", "finished")]
    assert causes(another) == [(0, "first", "http_error"), (0, "retry", "finished")]
    assert parent.choice().token_ids == [21, 22]


async def test_a_retry_beside_an_open_request_leaves_that_alone():
    slow = RawStream(body=frame([31]), end="hang")
    async with Served(slow, RawStream(500), WHOLE) as served:
        came = asyncio.Event()
        task = asyncio.create_task(served.generate(on_read=lambda rollout: rollout.length and came.set()))
        await came.wait()
        beside = await served.generate()
        first = served.recorder.samples.get("k")
        assert (first.busy, first.rollout.choice().token_ids) == (True, [31])
        task.cancel()
    assert (beside.opened.key, beside.choice().token_ids) == ("k~2", [21, 22])


@pytest.mark.parametrize(
    "refusal",
    [
        RawStream(404, JSON, b'{"error": {"message": "no such model", "code": 404}}'),
        RawStream(body=error_frame(400)),
        RawStream(307, [("location", "/x")]),
    ],
    ids=["404", "error frame 400", "redirect"],
)
async def test_what_would_not_help_is_not_retried(refusal):
    async with Served(refusal, WHOLE) as served:
        with pytest.raises(GenerationRefused) as caught:
            await served.generate()
    assert len(served.engine.requests) == 1
    assert isinstance(caught.value, httpx.HTTPError)
    assert "'k'" in str(caught.value)


async def test_it_gives_up_after_so_many_tries():
    async with Served(*[RawStream(500)] * 6, backoff=QUICK._replace(tries=2)) as served:
        with pytest.raises(GenerationFailed, match="given up after 3 requests") as caught:
            await served.generate()
    assert caught.value.rollout.status == "failed"
    assert len(served.engine.requests) == 3


async def test_an_engine_that_is_not_there_is_warned_of_once(caplog):
    caplog.set_level(logging.INFO, "rollout_log")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}{PATH}"
        async with httpx.AsyncClient() as client:
            recorder = Recorder(None, client, backoff=QUICK._replace(tries=2))
            for key in ("a", "b"):
                with pytest.raises(GenerationFailed, match="given up after 3 requests"):
                    await recorder.generate(key, url, body())
    told = [record for record in caplog.records if record.name == "rollout_log"]
    assert [record.levelname for record in told] == ["WARNING", "INFO", "INFO", "INFO"]
    assert told[0].getMessage() == (
        f"sample 'a': no response from {url} (reset: ConnectError: All connection attempts failed); "
        f"asking again, up to 2 times, up to {QUICK.longest:g} s apart"
    )


async def test_an_engine_that_answers_is_not_warned_of(caplog):
    async with Served(RawStream(503), CUT, WHOLE) as served:
        await served.generate()
    assert caplog.messages == []


async def test_an_abort_by_the_engine_is_an_answer():
    stream = RawStream(body=frame([11]) + frame([], "abort") + DONE)
    async with Served(stream) as served:
        rollout = await served.generate()
        assert (rollout.status, rollout.choice().token_ids) == ("aborted", [11])
    assert len(served.engine.requests) == 1


async def test_a_spent_budget_is_a_finish():
    async with Served(RawStream(body=frame([11, 12]) + DONE)) as served:
        rollout = await served.generate(body(max_tokens=2))
    assert (rollout.status, causes(rollout)) == ("truncated", [(0, "first", "no_terminal")])
    assert [problem.code for problem in rollout.problems] == ["no_terminal", "finish_inferred"]


async def test_a_spent_budget_is_a_finish_also_where_the_connection_was_lost():
    async with Served(CUT) as served:
        rollout = await served.generate(body(max_tokens=2), weight_version="7")
    assert (rollout.status, rollout.choice().token_ids) == ("truncated", [11, 12])
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize("end", ["eof", "reset", "incomplete"])
async def test_a_stop_token_is_a_finish_however_the_stream_ends(end):
    async with Served(RawStream(body=frame([11, 99]), end=end), REST) as served:
        rollout = await served.generate(weight_version="7", eos_token_ids=[99])
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11, 99])
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize(
    ("request_body", "options"),
    [(body(), {"eos_token_ids": [12]}), (body(2), {}), (body(stop_token_ids=[12]), {})],
    ids=["end of sequence", "spent budget", "stop token"],
)
async def test_nothing_is_generated_past_a_finish_that_an_error_hides(request_body, options):
    failed = RawStream(body=frame([11, 12]) + error_frame(500))
    async with Served(failed, WHOLE) as served:
        rollout = await served.generate(request_body, weight_version="7", **options)
    assert causes(rollout) == [(0, "first", "engine_error"), (0, "retry", "finished")]
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [21, 22])


async def test_the_default_limit_of_the_engine_would_count_anew_so_it_starts_again():
    request = body()
    for params in ({"temperature": 1.0}, {}, None):
        request["sampling_params"] = params
        async with Served(CUT, WHOLE) as served:
            rollout = await served.generate(request, weight_version="7")
        assert rollout.choice().token_ids == [21, 22]


async def test_only_the_weights_of_the_kept_tokens_matter():
    cut = RawStream(body=frame([31], version="8"), end="reset")
    async with Served(WHOLE, cut, RawStream(body=frame([32], "stop", version="8"))) as served:
        await served.generate(weight_version="7")
        turn = {**body(), "token_ids": [1, 2, 21, 22, 50]}
        rollout = await served.generate(turn, weight_version="8")
    assert rollout.choice().token_ids == [21, 22, 50, 31, 32]
    assert causes(rollout)[1:] == [(3, "turn", "reset"), (4, "retry", "finished")]


async def test_a_cancel_leaves_an_aborted_sample_that_a_later_call_resumes():
    async with Served(RawStream(body=frame([11]), end="hang"), REST) as served:
        came = asyncio.Event()
        task = asyncio.create_task(served.generate(on_read=lambda rollout: rollout.length and came.set()))
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(served.engine.left.wait(), 10)
        rollout = await served.generate({**body(9), "token_ids": [1, 2, 11]})
    assert rollout.choice().token_ids == [11, 13]
    assert causes(rollout) == [(0, "first", "cancelled"), (1, "resume", "finished")]


async def test_a_cancel_after_the_finish_returns_the_finished_sample():
    async with Served(RawStream(body=frame([11], "stop"), end="hang")) as served:
        came = asyncio.Event()
        call = served.recorder.generate(
            "k", served.engine.url + PATH, body(), on_read=lambda rollout: rollout.length and came.set()
        )
        task = asyncio.create_task(call)
        await came.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        rollout = await task
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11])
    assert not task.cancelled()


async def test_the_run_aborts_between_reads():
    aborted = []
    async with Served(RawStream(body=frame([11]), end="hang")) as served:
        rollout = await served.generate(
            on_read=lambda rollout: rollout.length and aborted.append(True), should_stop=lambda: bool(aborted)
        )
    assert (rollout.status, rollout.choice().token_ids) == ("aborted", [11])
    assert len(served.engine.requests) == 1


async def test_the_run_aborts_while_nothing_comes():
    aborted = asyncio.Event()
    async with Served(RawStream(body=b"", end="hang")) as served:
        asyncio.get_running_loop().call_later(0.1, aborted.set)
        rollout = await served.generate(should_stop=aborted.is_set)
    assert rollout.status == "aborted"


async def test_no_retry_once_the_run_aborts():
    aborted = []
    async with Served(CUT, WHOLE) as served:
        rollout = await served.generate(
            on_read=lambda rollout: rollout.length == 2 and aborted.append(True),
            should_stop=lambda: bool(aborted),
        )
    assert rollout.choice().token_ids == [11, 12]
    assert len(served.engine.requests) == 1


def stalls(healthy: bool) -> list[RawStream]:
    health = RawStream(200 if healthy else 503)
    return [RawStream(body=frame([11]), end="hang"), health, WHOLE]


async def test_a_stalled_stream_of_a_dead_engine_is_timed_out_and_retried():
    async with Served(*stalls(healthy=False), stall_s=0.1) as served:
        rollout = await served.generate()
    assert causes(rollout) == [(0, "first", "timeout"), (0, "retry", "finished")]
    assert [request.path for request in served.engine.requests] == [PATH, "/health", PATH]


async def test_a_stalled_stream_of_a_healthy_engine_gets_one_more_limit():
    async with Served(*stalls(healthy=True), stall_s=0.1) as served:
        rollout = await served.generate()
    assert causes(rollout) == [(0, "first", "timeout"), (0, "retry", "finished")]
    assert [request.path for request in served.engine.requests] == [PATH, "/health", PATH]


async def test_nothing_is_timed_out_before_the_first_read():
    async with Served(RawStream(body=WHOLE.body, delay=0.5), stall_s=0.05) as served:
        rollout = await served.generate()
    assert causes(rollout) == [(0, "first", "finished")]


async def test_samples_and_tasks_do_not_leak():
    async with Served(*[CUT, REST] * 20) as served:
        for _ in range(20):
            await served.generate(weight_version="7")
        await asyncio.sleep(0)
        names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
    assert not [name for name in names if "Watchdog" in name or "Recorder" in name]


@pytest.fixture
def _watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run aborts is asked a hundred times a second."""
    monkeypatch.setattr("rollout_log.record.sending.Watchdog", functools.partial(Watchdog, interval=0.01))


FAILURE = RawStream(body=frame([11]) + error_frame(503))
WAITING = Backoff(first=3600.0, longest=3600.0, tries=5)


async def called_off(served: Served, **options: object) -> asyncio.Task:
    """Return a call that waits for an hour before it tries again."""
    task = asyncio.create_task(served.generate(**options))
    while not ((sample := served.recorder.samples.get("k")) and sample.exchange.ended):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    return task


async def test_a_cancel_between_two_tries_leaves_an_aborted_sample_that_is_resumed():
    async with Served(FAILURE, REST, backoff=WAITING) as served:
        task = await called_off(served)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rollout = served.recorder.samples.get("k").rollout
        assert (rollout.status, rollout.choice().token_ids) == ("aborted", [11])
        assert causes(rollout) == [(0, "first", "engine_error")]
        assert [(mark.name, mark.fields["reason"]) for mark in rollout.marks] == [("called_off", "cancelled")]
        resumed = await served.generate({**body(9), "token_ids": [1, 2, 11]})
    assert (resumed.status, resumed.choice().token_ids) == ("completed", [11, 13])


async def test_a_run_that_aborts_between_two_tries_leaves_an_aborted_sample():
    aborts: list[bool] = []
    async with Served(FAILURE, backoff=WAITING) as served:
        task = await called_off(served, should_stop=lambda: bool(aborts))
        aborts.append(True)
        rollout = await task
    assert (rollout.status, rollout.choice().token_ids) == ("aborted", [11])
    assert rollout.marks[0].fields["reason"] == "the run aborts"


async def test_a_run_that_aborts_does_not_hide_a_refusal():
    async with Served(RawStream(body=error_frame(400)), backoff=WAITING) as served:
        rollout = await served.generate(
            should_stop=lambda: bool((sample := served.recorder.samples.get("k")) and sample.exchange.ended)
        )
    assert (rollout.status, rollout.marks) == ("failed", [])


async def test_a_cancel_while_a_failure_is_written_down_leaves_an_aborted_sample(monkeypatch):
    async with Served(FAILURE, backoff=WAITING) as served:
        reached = asyncio.Event()

        async def settle(sample: object) -> bool:
            reached.set()
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr("rollout_log.record.live.LiveSample.settle", settle)
        task = asyncio.create_task(served.generate())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert served.recorder.samples.get("k").rollout.status == "aborted"


@pytest.mark.usefixtures("_watched_closely")
async def test_a_stream_that_lingers_after_its_finish_is_left(monkeypatch):
    monkeypatch.setattr("rollout_log.record.watchdog.LINGER_S", 0.1)
    async with Served(RawStream(body=frame([11], "stop"), end="hang")) as served:
        rollout = await served.generate()
        await asyncio.wait_for(served.engine.left.wait(), 10)
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11])
    assert rollout.requests[0].how == "timeout"
    assert [request.path for request in served.engine.requests if request.method == "POST"] == [PATH]


@pytest.mark.usefixtures("_watched_closely")
async def test_an_aborting_run_waits_for_the_last_word_of_the_engine():
    """The abort frame has what only the engine knows."""
    stream = RawStream(body=frame([11]) + frame([], "abort") + DONE, reads=[len(frame([11]))], delay=0.2)
    aborts: list[bool] = []
    async with Served(stream) as served:
        rollout = await served.generate(
            on_read=lambda rollout: rollout.length and aborts.append(True),
            should_stop=lambda: bool(aborts),
            stop_grace_s=3600.0,
        )
    assert (rollout.status, rollout.choice().token_ids) == ("aborted", [11])
    assert causes(rollout) == [(0, "first", "aborted")]


@pytest.mark.usefixtures("_watched_closely")
async def test_an_aborting_run_is_not_patient_for_ever():
    aborts: list[bool] = []
    async with Served(RawStream(body=frame([11]), end="hang")) as served:
        rollout = await served.generate(
            on_read=lambda rollout: rollout.length and aborts.append(True),
            should_stop=lambda: bool(aborts),
            stop_grace_s=0.05,
        )
    assert causes(rollout) == [(0, "first", "cancelled")]


async def test_waits_grow_over_tries_in_vain_and_begin_anew_after_tokens(monkeypatch):
    asked: list[int] = []

    def delay(backoff: Backoff, attempt: int) -> float:
        asked.append(attempt)
        return 0.0

    monkeypatch.setattr(Backoff, "delay", delay)
    down = RawStream(500)
    async with Served(
        down, down, down, CUT, down, down, CUT, WHOLE, backoff=QUICK._replace(tries=9)
    ) as served:
        rollout = await served.generate()
    assert rollout.status == "completed"
    assert asked == [0, 1, 2, 0, 0, 1, 0]


async def test_a_callers_error_as_a_request_begins_leaves_no_request_open():
    def refuse(rollout: Rollout) -> None:
        raise LookupError("no such field")

    async with Served(WHOLE) as served:
        with pytest.raises(LookupError, match="no such field"):
            await served.generate(on_read=refuse)
        sample = served.recorder.samples.get("k")
        assert sample is not None
        assert not sample.busy
        assert served.engine.requests == []


@pytest.mark.parametrize(
    ("error", "healthy"), [(httpx.PoolTimeout, True), (httpx.ConnectError, False), (httpx.ReadTimeout, False)]
)
async def test_a_full_pool_says_nothing_against_the_engine(error, healthy):
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("", request=request)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        call = Call(key="k", url=f"http://engine{PATH}", body={})
        exchange = Samples(None).request("k", path=PATH, body=b"{}")
        sending = _Sending(client, call, exchange, b"{}", 1.0)
        assert await sending._is_healthy() is healthy
