"""Which sample a request belongs to, and where it goes on from."""

from __future__ import annotations

import json

import pytest

from rollout_log.errors import RecordingFailed
from rollout_log.events import Closed, Delta, Opened, Reads, Requested, restore_body
from rollout_log.fold import fold
from rollout_log.record.exchange import Exchange
from rollout_log.record.samples import Samples

PATH = "/inference/v1/generate"
SSE = [("content-type", "text/event-stream")]


def body(ids: list[int] | None, model: str = "m", **params: object) -> bytes:
    request = {"model": model, "sampling_params": {"max_tokens": 9, "logprobs": 1, **params}, "stream": True}
    return json.dumps(request if ids is None else {**request, "token_ids": ids}).encode()


def frame(ids: list[int], finish: str | None = None) -> bytes:
    logprobs = {"content": [{"token_id": i, "logprob": -0.5} for i in ids]}
    choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Client:
    """A client of one key, request by request."""

    def __init__(self, key: str | None = "k") -> None:
        self.samples = Samples(None)
        self.key = key

    def begin(self, ids: list[int] | None, path: str = PATH, **options: object) -> Exchange:
        model = str(options.pop("model", "m"))
        exchange = self.samples.request(self.key, path=path, body=body(ids, model), **options)
        exchange.respond(200, SSE)
        return exchange

    def ask(
        self, ids: list[int] | None, answer: list[int], finish: str | None = "stop", **options: object
    ) -> Exchange:
        exchange = self.begin(ids, **options)
        exchange.feed(frame(answer, finish))
        exchange.end("eof" if finish else "reset")
        return exchange


def facts(exchange: Exchange) -> list[tuple[int, str]]:
    return [(request.base, request.cause) for request in exchange.rollout.requests]


def codes(exchange: Exchange) -> list[str]:
    return [problem.code for problem in exchange.rollout.problems]


def test_a_retry_from_scratch_starts_again():
    client = Client()
    client.ask([1, 2], [11, 12], None)
    exchange = client.ask([1, 2], [21])
    assert facts(exchange) == [(0, "first"), (0, "retry")]
    assert exchange.rollout.choice().token_ids == [21]


def test_a_resume_goes_on_from_what_its_ids_say():
    client = Client()
    client.ask([1, 2], [11, 12], "abort")
    exchange = client.ask([1, 2, 11], [22])
    assert facts(exchange) == [(0, "first"), (1, "resume")]
    assert exchange.rollout.choice().token_ids == [11, 22]
    assert exchange.key == "k"


def test_extra_ids_after_a_finish_are_a_turn():
    client = Client()
    client.ask([1, 2], [11, 12])
    exchange = client.ask([1, 2, 11, 12, 40], [13])
    assert facts(exchange) == [(0, "first"), (3, "turn")]
    assert exchange.rollout.choice().loss_mask == [1, 1, 0, 1]
    assert codes(exchange) == []


def test_a_turn_whose_end_was_cut_is_noted():
    client = Client()
    client.ask([1, 2], [11, 12, 99])
    exchange = client.ask([1, 2, 11, 12, 40], [13])
    assert exchange.rollout.choice().token_ids == [11, 12, 40, 13]
    assert facts(exchange)[1] == (3, "turn")
    assert codes(exchange) == ["response_trimmed"]


def test_ids_that_contradict_an_unfinished_response_are_an_error():
    client = Client()
    client.ask([1, 2], [11, 12, 13], None)
    exchange = client.ask([1, 2, 11, 77], [14])
    assert exchange.rollout.choice().token_ids == [11, 77, 14]
    assert codes(exchange) == ["prompt_mismatch"]
    assert exchange.rollout.problems[0].position == 1


def test_an_explicit_base_goes_before_inference():
    client = Client()
    client.ask([1, 2], [11, 12, 13])
    exchange = client.ask([1, 2, 11, 12, 13], [14], base=2)
    assert facts(exchange)[1] == (3, "turn")
    assert exchange.rollout.choice().loss_mask == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([1, 2, 11], {"path": "/generate"}),
        ([1, 2, 11], {"model": "reference"}),
        (None, {}),
        ([7, 8], {}),
    ],
    ids=["another path", "another model", "no ids", "another prompt"],
)
def test_a_foreign_request_is_a_child(ids, options):
    client = Client()
    first = client.ask([1, 2], [11])
    child = client.begin(ids, **options)
    assert child.key == "k~2"
    assert child.rollout.opened.parent == "k"
    assert child.rollout.choice().token_ids == []
    assert first.rollout.choice().token_ids == [11]
    assert codes(first) == []


def test_a_request_beside_an_open_one_is_a_child_and_noted():
    client = Client()
    first = client.begin([1, 2])
    second = client.begin([1, 2])
    third = client.begin([1, 2])
    assert [second.key, third.key] == ["k~2", "k~3"]
    second.feed(frame([21]))
    first.feed(frame([11]))
    assert first.rollout.choice().token_ids == [11]
    assert second.rollout.choice().token_ids == [21]
    first.end("eof")
    assert codes(first) == ["concurrent_request", "concurrent_request", "no_terminal"]


def test_a_sub_agent_goes_on_in_its_own_child():
    client = Client()
    client.ask([1, 2], [11])
    client.ask([7, 8], [21])
    again = client.ask([7, 8, 21, 40], [22])
    assert again.key == "k~2"
    assert again.rollout.choice().token_ids == [21, 40, 22]
    assert client.ask([1, 2, 11, 41], [12]).rollout.choice().token_ids == [11, 41, 12]


def test_a_parallel_request_goes_on_in_its_own_child_also_once_the_first_has_ended():
    client = Client()
    first, second = client.begin([1, 2]), client.begin([1, 2])
    for exchange, token in ((first, 11), (second, 21)):
        exchange.feed(frame([token], "stop"))
        exchange.end("eof")
    turn_of_the_second = client.ask([1, 2, 21, 40], [22])
    turn_of_the_first = client.ask([1, 2, 11, 40], [12])
    assert (turn_of_the_second.key, turn_of_the_first.key) == ("k~2", "k")
    assert turn_of_the_second.rollout.choice().token_ids == [21, 40, 22]
    assert turn_of_the_first.rollout.choice().token_ids == [11, 40, 12]
    assert (codes(first), codes(second)) == (["concurrent_request"], [])


def test_what_the_sample_and_a_child_have_both_goes_on_in_the_longer_one():
    client = Client()
    first, second = client.begin([1, 2]), client.begin([1, 2])
    for exchange, tokens in ((first, [11]), (second, [11, 12])):
        exchange.feed(frame(tokens, "stop"))
        exchange.end("eof")
    assert client.ask([1, 2, 11, 12, 40], [13]).key == "k~2"
    assert client.ask([1, 2, 11, 50], [14]).key == "k"
    assert client.ask([1, 2], [15]).key == "k"


def test_a_base_below_zero_is_the_beginning():
    client = Client()
    client.ask([1, 2], [11, 12])
    exchange = client.ask([1, 2, 11, 12], [13], base=-1)
    assert exchange.rollout.choice().token_ids == [11, 12, 13]


def test_a_caller_that_says_so_supersedes_an_open_request():
    log = Listening()
    client = Client()
    client.samples = Samples(log)  # type: ignore[arg-type]
    first = client.begin([1, 2])
    first.feed(frame([11]))
    second = client.ask([1, 2, 11], [12], supersede=True)
    first.feed(frame([99]))
    first.end("eof")
    assert second.key == "k"
    recorded = fold(enumerate(log.events))
    for rollout in (second.rollout, recorded):
        assert rollout.choice().token_ids == [11, 12]
        assert rollout.status == "completed"
        assert [problem.code for problem in rollout.problems if problem.severity == "info"] == ["late_delta"]
    assert b"99" in b"".join(event.data for event in log.events if isinstance(event, Delta))


def test_what_was_read_before_a_request_that_supersedes_its_own_is_in_the_response():
    client = Client()
    first = client.begin([1, 2])
    first.put(frame([11]))
    second = client.ask([1, 2, 11], [12], supersede=True)
    first.put(frame([99]))
    first.end("eof")
    assert facts(second) == [(0, "first"), (1, "retry")]
    assert second.rollout.choice().token_ids == [11, 12]
    assert "late_delta" in codes(second)


async def test_what_was_read_is_taken_in_before_whatever_else_is_written_down():
    log = Listening()
    first = Samples(log).request("k", path=PATH, body=body([1, 2]))  # type: ignore[arg-type]
    first.respond(200, SSE)
    first.put(frame([11]))
    first.mark("paused")
    first.put(frame([12]))
    first.sample.close(Closed(reward=1.0))
    first.put(frame([13], "stop"))
    first.end("eof")
    first.put(frame([14]))
    first.take()
    names = [type(event).__name__ for event in log.events[2:]]
    assert names == ["Responded", "Delta", "Marked", "Delta", "Closed", "Delta", "Reads", "Ended"]
    assert first.rollout.choice().token_ids == [11, 12, 13]


def test_without_an_event_loop_of_asyncio_what_is_put_is_recorded_and_folded_at_once():
    log = Listening()
    exchange = Samples(log).request("k", path=PATH, body=body([1, 2]))  # type: ignore[arg-type]
    exchange.respond(200, SSE)
    assert exchange.put(frame([11]))
    assert isinstance(log.events[-1], Delta)
    assert exchange.rollout.choice().token_ids == [11]


def test_a_request_beside_another_is_marked_after_what_that_one_had_read():
    client = Client()
    first = client.begin([1, 2])
    first.put(frame([11]))
    assert client.begin([1, 2]).key == "k~2"
    assert first.rollout.choice().token_ids == [11]


def test_a_closed_sample_begins_a_new_life():
    client = Client()
    first = client.ask([1, 2], [11])
    first.rollout.apply(Closed(reward=1.0))
    second = client.ask([1, 2], [21])
    assert (first.rollout.opened.incarnation, second.rollout.opened.incarnation) == (0, 1)
    assert second.rollout.choice().token_ids == [21]


def test_without_a_key_every_request_is_a_sample_of_its_own():
    client = Client(None)
    keys = {client.ask([1, 2], [11]).key for _ in range(10)}
    assert len(keys) == 10


def test_what_the_trainer_knows_is_in_the_first_event_and_its_step_in_each_request():
    client = Client()
    client.ask([1, 2], [11], "abort", opened=Opened(key="k", step=3, group_index=5, index=7))
    exchange = client.ask([1, 2, 11], [12], opened=Opened(key="k", step=4))
    opened = exchange.rollout.opened
    assert (opened.step, opened.group_index, opened.index, opened.prompt_token_ids) == (3, 5, 7, [1, 2])
    assert [request.step for request in exchange.rollout.requests] == [3, 4]
    assert exchange.rollout.step == 4


class Listening:
    """A log that keeps what it is given."""

    run = "r"
    hold_back_s = 3600.0

    def __init__(self) -> None:
        self.events = []
        self.accepts = True

    def create(self, opened):
        return 7

    def append(self, sample, first, events, summary=None, since=None):
        if not self.accepts:
            return False
        assert first == len(self.events)
        self.events += events
        return True


def test_the_body_is_kept_as_sent_without_repeating_the_ids():
    log = Listening()
    sent = body(list(range(1000)))
    Samples(log).request("k", path=PATH, body=sent)  # type: ignore[arg-type]
    opened, requested = log.events
    assert isinstance(requested, Requested)
    assert len(requested.body) < 200
    assert restore_body(requested, opened.prompt_token_ids) == sent


def test_credentials_are_not_written_down():
    log = Listening()
    headers = [
        ("Authorization", "Bearer s3cret"),
        ("Cookie", "s3cret"),
        ("X-Api-Key", "s3cret"),
        ("accept", "*/*"),
    ]
    samples = Samples(log)  # type: ignore[arg-type]
    url = "http://user:s3cret@engine/generate?api_key=s3cret&x=1"
    samples.request("k", path="/generate?api_key=s3cret", url=url, body=b"{}", headers=headers)
    requested = log.events[1]
    assert "s3cret" not in repr(requested)
    assert requested.headers == [("accept", "*/*")]


def test_a_request_the_log_did_not_take_is_made_up_for_by_the_next():
    log = Listening()
    client = Client()
    client.samples = Samples(log)  # type: ignore[arg-type]
    exchange = client.begin([1, 2])
    exchange.feed(frame([11]))
    log.accepts = False
    exchange.feed(frame([12, 13]))
    log.accepts = True
    exchange.feed(frame([14]))
    exchange.end("cancelled")
    assert exchange.rollout.choice().token_ids == [11, 12, 13, 14]

    again = client.ask([1, 2, 11, 12, 13, 14], [15])
    recorded = fold(enumerate(log.events))
    assert recorded.choice().token_ids == [11, 12, 13, 14, 15]
    assert "log_gap" in [problem.code for problem in recorded.problems]
    assert again.rollout.choice().token_ids == [11, 12, 13, 14, 15]


def test_what_the_environment_added_meanwhile_is_made_up_for_as_its_own():
    log = Listening()
    client = Client()
    client.samples = Samples(log)  # type: ignore[arg-type]
    client.ask([1, 2], [11])
    log.accepts = False
    client.ask([1, 2, 11, 40], [12])
    log.accepts = True
    live = client.ask([1, 2, 11, 40, 12, 41], [13]).rollout.choice()
    recorded = fold(enumerate(log.events)).choice()
    assert recorded.token_ids == live.token_ids == [11, 40, 12, 41, 13]
    assert recorded.loss_mask == live.loss_mask == [1, 0, 1, 0, 1]
    assert [run.origin.value for run in recorded.runs] == [
        "generated",
        "observed",
        "unrecorded",
        "observed",
        "generated",
    ]


def test_a_sample_that_began_unrecorded_is_made_up_for_as_well():
    log = Listening()
    log.accepts = False
    client = Client()
    client.samples = Samples(log)  # type: ignore[arg-type]
    client.ask([1, 2], [11, 12], "abort")
    log.accepts = True
    client.ask([1, 2, 11, 12], [13])
    assert fold(enumerate(log.events)).choice().token_ids == [11, 12, 13]


class Failing(Listening):
    """A log whose append raises after some events."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self.error = error
        self.after = after

    def append(self, sample, first, events, summary=None, since=None):
        if len(self.events) >= self.after:
            raise self.error
        return super().append(sample, first, events, summary)


def test_a_log_that_raises_stops_the_recording_and_not_the_sample(caplog):
    client = Client()
    client.samples = Samples(Failing(RuntimeError("a bug"), 3))  # type: ignore[arg-type]
    exchange = client.ask([1, 2], [11, 12])
    assert exchange.rollout.choice().token_ids == [11, 12]
    assert exchange.rollout.status == "completed"
    assert exchange.broken is None
    assert len([record for record in caplog.records if "stopped" in record.message]) == 1


def test_a_log_that_raises_at_once_leaves_the_sample_alone(caplog):
    client = Client()
    client.samples = Samples(Failing(OSError("no space"), 0))  # type: ignore[arg-type]
    assert client.ask([1, 2], [11, 12]).rollout.status == "completed"
    assert "recording of 'k' stopped: OSError: no space" in caplog.text


def test_a_strict_log_raises():
    client = Client()
    client.samples = Samples(Failing(RecordingFailed("disk full"), 3))  # type: ignore[arg-type]
    exchange = client.begin([1, 2])
    with pytest.raises(RecordingFailed, match="disk full"):
        exchange.feed(frame([11]))


async def test_a_strict_log_that_refuses_what_was_read_before_the_end_leaves_no_request_open():
    client = Client()
    client.samples = Samples(Failing(RecordingFailed("disk full"), 3))  # type: ignore[arg-type]
    exchange = client.begin([1, 2])
    exchange.put(frame([11]))
    with pytest.raises(RecordingFailed, match="disk full"):
        exchange.end("eof")
    assert not exchange.sample.busy
    assert exchange.rollout.ended_of(exchange.rollout.requests[0]) == "no_terminal"


def test_what_the_log_does_not_keep_is_cut_there_and_not_in_the_sample():
    log = Listening()
    samples = Samples(log)  # type: ignore[arg-type]
    experts = "QUJD" * 2000
    exchange = samples.request("k", path=PATH, body=body([1, 2]))
    exchange.respond(200, SSE)
    choice = {"index": 0, "token_ids": [11], "finish_reason": "stop", "routed_experts": experts}
    data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    for part in (data[:100], data[100:]):
        exchange.feed(part)
    exchange.end("eof")
    assert exchange.rollout.choice().routed_experts == experts
    delta = next(event for event in log.events if isinstance(event, Delta))
    reads = next(event for event in log.events if isinstance(event, Reads))
    assert len(delta.data) < 400
    assert sum(reads.sizes) == len(b"data: " + delta.data + b"\n\n")
    assert fold(enumerate(log.events)).choice().token_ids == [11]


def test_an_error_is_a_body_whatever_its_type_says():
    exchange = Samples(None).request("k", path=PATH, body=body([1, 2]))
    exchange.respond(503, SSE)
    exchange.feed(frame([11], "stop"))
    exchange.end("eof")
    request = exchange.rollout.requests[0]
    assert (exchange.rollout.status, request.deltas, request.tokens) == ("failed", 0, 0)
    assert request.bytes == len(frame([11], "stop"))


def test_the_shortest_length_that_the_log_missed_counts():
    log = Listening()
    client = Client()
    client.samples = Samples(log)  # type: ignore[arg-type]
    client.ask([1, 2], [11, 12], "abort")
    log.accepts = False
    client.ask([1, 2], [21, 22, 23], "abort")
    client.ask([1, 2, 21, 22, 23], [24], "abort")
    log.accepts = True
    client.ask([1, 2, 21, 22, 23, 24], [25])
    assert fold(enumerate(log.events)).choice().token_ids == [21, 22, 23, 24, 25]


def test_an_explicit_base_alone_does_not_end_an_open_request():
    client = Client()
    first = client.begin([1, 2])
    second = client.begin([1, 2], base=0)
    assert (first.ended, second.key) == (False, "k~2")


def test_an_event_stream_may_be_written_in_any_case():
    client = Client()
    exchange = client.samples.request("k", path=PATH, body=body([1, 2]))
    exchange.respond(200, [("Content-Type", "Text/Event-Stream")])
    exchange.feed(frame([11]))
    assert exchange.rollout.choice().token_ids == [11]


def own(client: Client, key: str) -> Client:
    """Another client of the same process, with a key of its own."""
    other = Client(key)
    other.samples = client.samples
    return other


@pytest.mark.parametrize("busy", [False, True], ids=["an ended child", "an open child"])
def test_a_key_that_is_a_childs_name_is_its_callers_own(busy):
    client = Client("a")
    client.ask([1, 2], [11])
    child = client.begin([7, 8])
    child.feed(frame([21]))
    if not busy:
        child.end("eof")
    theirs = own(client, "a~2").ask([7, 8], [31])
    assert child.key == theirs.key == "a~2"
    assert (child.rollout.opened.parent, theirs.rollout.opened.parent) == ("a", None)
    assert (child.rollout.opened.incarnation, theirs.rollout.opened.incarnation) == (0, 1)
    child.feed(frame([22], "stop"))
    child.end("eof")
    assert child.rollout.choice().token_ids == ([21, 22] if busy else [21])
    assert theirs.rollout.choice().token_ids == [31]
    assert client.ask([7, 8, 31], [32]).key == "a~3", "another's sample is nobody's child"
    client.samples.forget("a")
    assert [sample.key for sample in client.samples.all()] == ["a~2"]
    assert own(client, "a~2").ask([7, 8, 31], [33]).rollout.choice().token_ids == [31, 33]


def test_a_child_does_not_take_a_name_that_is_in_use():
    client = Client("a")
    theirs = own(client, "a~2").ask([7, 8], [31])
    client.ask([1, 2], [11])
    child = client.ask([7, 8], [21])
    assert (child.key, child.rollout.opened.parent) == ("a~3", "a")
    assert theirs.rollout.choice().token_ids == [31]


def test_a_child_is_taken_up_by_its_name_where_it_stands():
    client = Client("a")
    client.ask([1, 2], [11])
    child = client.ask([7, 8], [21])
    again = own(client, "a~2").ask([7, 8, 21, 40], [22])
    assert again.sample is child.sample
    assert again.rollout.choice().token_ids == [21, 40, 22]


def test_a_request_stays_with_the_sample_that_its_caller_has():
    client = Client("a")
    client.ask([1, 2], [11])
    child = client.ask([7, 8], [21], None)
    own(client, "a~2").ask([7, 8], [31])
    again = client.ask([7, 8, 21], [22], sample=child.sample)
    assert again.sample is child.sample
    assert again.rollout.choice().token_ids == [21, 22]
