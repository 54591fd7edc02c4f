"""The httpx tap: which sample a request goes to, and that the consumer notices nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from raw_server import RawStream, play
from rollout_log.errors import RecordingFailed, RolloutLogError
from rollout_log.log import Log
from rollout_log.record import RecordingTransport, recording
from rollout_log.record.samples import Samples

PATH = "/inference/v1/generate"
URL = "http://engine" + PATH
BODY = {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
SSE = {"content-type": "text/event-stream"}


def frame(ids: list[int], finish: str | None = None) -> bytes:
    choice = {"index": 0, "token_ids": ids, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


WHOLE = [frame([11])[:20], frame([11])[20:], frame([12], "stop")]


class Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in parts, and an error after them."""

    def __init__(self, parts: list[bytes], error: Exception | None = None) -> None:
        self.parts = parts
        self.error = error
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1


class Engine(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers every request with the same parts, and keeps what it was asked."""

    def __init__(self, parts: list[bytes] | None = None, error: Exception | None = None) -> None:
        self.stream = Parts(WHOLE if parts is None else parts, error)
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200, headers=SSE, stream=self.stream)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


def recorded(engine: httpx.BaseTransport, **options: object) -> tuple[httpx.Client, Samples]:
    samples = Samples(None)
    transport = RecordingTransport(None, engine, samples=samples, **options)  # type: ignore[arg-type]
    return httpx.Client(transport=transport), samples


def keys(samples: Samples) -> list[str]:
    return [sample.key for sample in samples.all()]


def test_reads_reach_a_consumer_as_they_came():
    client, samples = recorded(Engine())
    with client.stream("POST", URL, json=BODY, headers={"X-Rollout-Log-Key": "k"}) as response:
        assert list(response.iter_raw()) == WHOLE
    rollout = samples.get("k").rollout
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11, 12])


async def test_reads_reach_an_async_consumer_as_they_came():
    samples = Samples(None)
    transport = RecordingTransport(None, Engine(), samples=samples)
    async with httpx.AsyncClient(transport=transport) as client:
        with recording("k", step=3):
            async with client.stream("POST", URL, json=BODY) as response:
                assert [part async for part in response.aiter_raw()] == WHOLE
    rollout = samples.get("k").rollout
    assert (rollout.status, rollout.choice().token_ids, rollout.step) == ("completed", [11, 12], 3)


def test_the_key_is_the_extension_then_the_header_then_the_context_then_the_session():
    client, samples = recorded(Engine())
    ways = [
        {"extensions": {"rollout_log": {"key": "extension"}}},
        {"headers": {"X-Rollout-Log-Key": "header"}},
        {},
        {"headers": {"x-session-id": "session"}},
    ]
    everything = {"headers": {"X-Rollout-Log-Key": "header", "x-session-id": "session"}}
    with recording("context"):
        client.post(URL, json=BODY, **everything, **ways[0])
        client.post(URL, json=BODY, **everything)
        client.post(URL, json=BODY, **ways[3])
    client.post(URL, json=BODY, **ways[3])
    assert keys(samples) == ["extension", "header", "context", "session"]
    client.post(URL, json=BODY)
    assert len(keys(samples)) == 5


def test_our_headers_are_taken_off_and_no_compression_is_asked_for():
    engine = Engine()
    client, samples = recorded(engine)
    client.post(URL, json=BODY, headers={"X-Rollout-Log-Key": "k"})
    client.post(
        URL,
        json={**BODY, "token_ids": [1, 2, 11]},
        headers={"X-Rollout-Log-Key": "k", "X-Rollout-Log-Base": "1"},
    )
    sent = engine.requests[1].headers
    assert not [name for name in sent if name.startswith("x-rollout-log")]
    assert sent["accept-encoding"] == "identity"
    assert [request.base for request in samples.get("k").rollout.requests] == [0, 1]


def test_only_generations_are_recorded_unless_a_key_is_given():
    client, samples = recorded(Engine())
    client.get(URL, headers={"X-Rollout-Log-Key": "k"})
    client.post("http://engine/pause", json={})
    assert keys(samples) == []
    client.post("http://engine/score", json={}, headers={"X-Rollout-Log-Key": "k"})
    assert keys(samples) == ["k"]


def test_a_scoped_transport_records_inside_of_recording_only():
    client, samples = recorded(Engine(), scoped=True)
    client.post(URL, json=BODY)
    with recording("k"):
        client.post(URL, json=BODY)
    assert keys(samples) == ["k"]


def test_wrapping_twice_is_noticed():
    with pytest.raises(RolloutLogError, match="records already"):
        RecordingTransport(None, RecordingTransport(None, Engine()))


@pytest.mark.parametrize(
    ("error", "ended"),
    [(httpx.ReadTimeout("slow"), "timeout"), (httpx.ReadError("gone"), "reset"), (OSError("gone"), "reset")],
)
def test_an_error_ends_the_request_and_reaches_the_consumer(error, ended):
    client, samples = recorded(Engine([frame([11])], error))
    with recording("k"), pytest.raises(type(error)):
        client.post(URL, json=BODY)
    rollout = samples.get("k").rollout
    assert (rollout.ended_of(rollout.requests[0]), rollout.choice().token_ids) == (ended, [11])


def test_an_engine_that_cannot_be_reached_leaves_an_aborted_sample():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client, samples = recorded(httpx.MockTransport(refuse))
    with recording("k"), pytest.raises(httpx.ConnectError):
        client.post(URL, json=BODY)
    rollout = samples.get("k").rollout
    assert (rollout.status, rollout.ended_of(rollout.requests[0])) == ("aborted", "reset")


@pytest.mark.parametrize("reads", [0, 1])
def test_a_consumer_that_leaves_early_cancels(reads):
    engine = Engine([frame([11]), frame([12]), frame([13], "stop")])
    client, samples = recorded(engine)
    with recording("k"), client.stream("POST", URL, json=BODY) as response:
        for _, _part in zip(range(reads), response.iter_raw(), strict=False):
            pass
        response.close()
        response.close()
    rollout = samples.get("k").rollout
    assert (rollout.status, rollout.ended_of(rollout.requests[0])) == ("aborted", "cancelled")
    assert rollout.choice().token_ids == [11][:reads]
    assert engine.stream.closed == 1


async def test_a_consumer_that_leaves_closes_its_connection_even_where_a_strict_log_refuses(
    tmp_path, monkeypatch
):
    def refuse(*_: object) -> bool:
        raise RecordingFailed("the disk is gone")

    with Log.open(tmp_path, strict=True) as log:
        engine = Engine([frame([11]), frame([12]), frame([13], "stop")])
        async with httpx.AsyncClient(transport=RecordingTransport(log, engine)) as client:
            response = await client.send(client.build_request("POST", URL, json=BODY), stream=True)
            await anext(response.aiter_raw())
            monkeypatch.setattr("rollout_log.log.queue.Queue.append", refuse)
            with pytest.raises(RecordingFailed):
                await response.aclose()
        assert engine.stream.closed == 1


def test_a_consumer_that_leaves_after_the_finish_has_a_finished_sample():
    client, samples = recorded(Engine([*WHOLE, b"data: [DONE]\n\n"]))
    with recording("k"), client.stream("POST", URL, json=BODY) as response:
        for part in response.iter_raw():
            if part == WHOLE[-1]:
                break
    assert samples.get("k").rollout.status == "completed"


MADE_UP = httpx.MockTransport(lambda _: httpx.Response(200, headers=SSE, content=b"".join(WHOLE)))


def test_a_response_that_was_made_up_with_its_body_is_recorded_as_well():
    client, samples = recorded(MADE_UP)
    with recording("k"):
        assert client.post(URL, json=BODY).content == b"".join(WHOLE)
    rollout = samples.get("k").rollout
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11, 12])


async def test_also_for_an_async_client():
    samples = Samples(None)
    async with httpx.AsyncClient(transport=RecordingTransport(None, MADE_UP, samples=samples)) as client:
        with recording("k"):
            assert (await client.post(URL, json=BODY)).content == b"".join(WHOLE)
    assert samples.get("k").rollout.choice().token_ids == [11, 12]


def test_an_event_hook_may_read_the_response_first():
    client, samples = recorded(Engine())
    client.event_hooks = {"response": [lambda response: response.read()]}
    with recording("k"):
        assert client.post(URL, json=BODY).content == b"".join(WHOLE)
    assert samples.get("k").rollout.status == "completed"


class Refusing(Samples):
    """Fails at every request."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        self.error = error

    def request(self, *args, **options):
        raise self.error


def test_what_cannot_be_recorded_passes(caplog):
    transport = RecordingTransport(None, Engine(), samples=Refusing(RuntimeError("a bug")))
    assert httpx.Client(transport=transport).post(URL, json=BODY).content == b"".join(WHOLE)
    assert "goes unrecorded: RuntimeError: a bug" in caplog.text


def test_unless_the_log_is_strict():
    transport = RecordingTransport(None, Engine(), samples=Refusing(RecordingFailed("disk full")))
    with pytest.raises(RecordingFailed, match="disk full"):
        httpx.Client(transport=transport).post(URL, json=BODY)


async def test_over_a_real_connection():
    samples = Samples(None)
    transport = RecordingTransport(None, httpx.AsyncHTTPTransport(), samples=samples)
    stream = RawStream(body=b"".join(WHOLE))
    async with play(stream) as engine, httpx.AsyncClient(transport=transport) as client:
        with recording("k"):
            assert (await client.post(engine.url + PATH, json=BODY)).content == b"".join(WHOLE)
    assert samples.get("k").rollout.choice().token_ids == [11, 12]
