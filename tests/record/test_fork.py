"""A sample that was open when its process was forked: the child goes on with it in a life of its own."""

from __future__ import annotations

import threading

import pytest

from log.test_processes import in_fork
from recorded import Writer, frame
from rollout_log.events import Closed
from rollout_log.log import LogReader
from rollout_log.log.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def finish(writer: Writer) -> list[int]:
    exchange = writer.request("k", [frame(13, finish="stop", version="7")])
    assert writer.log.flush_sync(timeout=30)
    writer.close()
    return list(exchange.rollout.choice().token_ids)


def test_a_child_goes_on_with_a_sample_of_its_parent(tmp_path):
    writer = Writer(tmp_path / "log")
    writer.request("k", [frame(11, version="7"), frame(12, version="7")], how="reset")
    assert writer.log.flush_sync()
    assert in_fork(lambda: finish(writer)) == [11, 12, 13]
    writer.request("k", [frame(14, finish="stop")])
    writer.close()
    assert verify(tmp_path / "log").damage == []
    with LogReader.open(tmp_path / "log") as reader:
        parents, childs = reader.rollout("k@0"), reader.rollout("k@1")
    assert parents.choice().token_ids == [11, 12, 14]
    assert childs.choice().token_ids == [11, 12, 13]
    assert childs.choice().logprobs == [-0.5] * 3, "what the parent recorded is the child's as well"
    assert [run.origin.name for run in childs.choice().runs] == ["INHERITED", "GENERATED"]
    assert childs.opened.continues == (0, 2)
    assert (parents.problems, childs.problems) == ([], [])


def test_a_child_makes_up_for_what_neither_log_has(tmp_path):
    """An open stream that goes on in the child has no place in its log; its tokens do."""
    writer = Writer(tmp_path / "log")
    stream = writer.request("k", [frame(11)], how=None)
    assert writer.log.flush_sync()

    def work() -> list[int]:
        stream.feed(frame(12))
        stream.end("reset")
        return finish(writer)

    assert in_fork(work) == [11, 12, 13]
    stream.end("reset")
    writer.close()
    with LogReader.open(tmp_path / "log") as reader:
        parents, childs = reader.rollout("k@0"), reader.rollout("k@1")
    assert parents.choice().token_ids == [11]
    assert childs.choice().token_ids == [11, 12, 13]
    assert [run.origin.name for run in childs.choice().runs] == ["INHERITED", "UNRECORDED", "GENERATED"]
    assert {problem.code for problem in childs.problems} == {"log_gap"}


def test_a_child_that_only_closes_a_sample_leaves_it_to_its_parent(tmp_path):
    writer = Writer(tmp_path / "log")
    exchange = writer.request("k", [frame(11, finish="stop")])

    def work() -> None:
        exchange.sample.close(Closed(status="completed"))
        writer.close()

    in_fork(work)
    exchange.sample.close(Closed(status="completed", reward=1.0))
    writer.close()
    with LogReader.open(tmp_path / "log") as reader:
        assert [entry.name for entry in reader.samples()] == ["k"]
        assert reader.rollout("k").closed.reward == 1.0


def test_a_lock_that_another_thread_held_is_free_in_the_child(tmp_path):
    writer = Writer(tmp_path / "log")
    writer.request("k", [frame(11), frame(12)], how="reset")
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with writer.samples._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_fork(lambda: finish(writer)) == [11, 12, 13]
    finally:
        release.set()
        thread.join()
    writer.close()
