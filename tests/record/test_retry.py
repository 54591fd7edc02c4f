"""What an ended request calls for, and how long a retry waits."""

from __future__ import annotations

import pytest

from rollout_log.events import Delta, Ended, Opened, Requested, Responded
from rollout_log.fold import Rollout, fold
from rollout_log.record.retry import Backoff, judge


def ended(status: int = 200, error_code: str | None = None, how: str = "eof") -> Rollout:
    request = Requested(0, 0, "first", "vllm", "POST", "/inference/v1/generate", b"{}")
    events = [Opened("k"), request, Responded(0, status)]
    if error_code is not None:
        events.append(Delta(0, b'{"error": {"message": "boom", "code": %b}}' % error_code.encode()))
    return fold(enumerate([*events, Ended(0, how)]))  # type: ignore[arg-type]


def verdict(rollout: Rollout, **options: bool) -> str:
    return judge(rollout, rollout.requests[0], **options).kind


@pytest.mark.parametrize("code", [408, 425, 429, 500, 502, 503])
def test_what_passes_is_tried_again_as_a_status_and_as_an_error_frame(code: int) -> None:
    assert verdict(ended(code)) == "retry"
    assert verdict(ended(error_code=str(code))) == "retry"


@pytest.mark.parametrize("code", [400, 401, 404, 409, 422])
def test_what_will_not_pass_is_refused_as_a_status_and_as_an_error_frame(code: int) -> None:
    assert verdict(ended(code)) == "refused"
    assert verdict(ended(error_code=str(code))) == "refused"


def test_an_error_frame_without_a_code_is_the_engine_s_own() -> None:
    assert verdict(ended(error_code="null")) == "retry"


@pytest.mark.parametrize("how", ["reset", "timeout"])
def test_a_lost_stream_is_tried_again(how: str) -> None:
    assert verdict(ended(how=how)) == "retry"


def test_a_consumer_that_left_wants_nothing_more() -> None:
    assert verdict(ended(how="cancelled")) == "final"


def test_an_end_without_terminal_is_tried_again_unless_the_caller_says_otherwise() -> None:
    assert verdict(ended()) == "retry"
    assert verdict(ended(), retry_without_terminal=False) == "final"


def test_delays_double_up_to_the_longest() -> None:
    full = [Backoff().delay(attempt, lambda: 1.0) for attempt in range(7)]
    assert full == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert Backoff().delay(10**6, lambda: 1.0) == 30.0


def test_jitter_takes_off_up_to_half() -> None:
    assert Backoff().delay(0, lambda: 0.0) == 0.5
    assert Backoff().delay(0, lambda: 0.5) == 0.75
