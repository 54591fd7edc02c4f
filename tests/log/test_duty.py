"""A process that keeps itself to a share of a core."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.log import Log, keeping
from rollout_log.log.duty import Duty
from rollout_log.log.keeper import Plan


class Machine:
    """Clocks of a process that works, waits and sleeps."""

    def __init__(self) -> None:
        self.cpu = self.now = 0.0

    def work(self, seconds: float, beside: float = 0.0) -> None:
        """`beside`: how long others had the core meanwhile."""
        self.cpu += seconds
        self.now += seconds + beside

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def duty(machine: Machine, share: float) -> Duty:
    return Duty(share, cpu=lambda: machine.cpu, clock=lambda: machine.now, sleep=machine.sleep)


@given(
    st.floats(0.01, 1),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1),
)
def test_cpu_time_is_at_most_its_share_of_the_time(share, bits):
    machine = Machine()
    limit = duty(machine, share)
    for worked, waited in bits:
        before = machine.cpu, machine.now
        machine.work(worked, waited)
        limit.rest()
        assert machine.cpu - before[0] <= share * (machine.now - before[1]) + 1e-9


def test_what_waits_long_enough_does_not_sleep():
    machine = Machine()
    limit = duty(machine, 0.5)
    machine.work(1, beside=3)
    limit.rest()
    assert machine.now == 4
    machine.work(1)
    limit.rest()
    assert machine.now == 6, "the time that was waited before is not saved up"


_WORK = """
import time
from rollout_log.log.duty import TICK, limit_cpu
began = time.process_time(), time.monotonic()
limit_cpu(0.25)
while time.process_time() - began[0] < 0.3:
    sum(range(1000))
worked, passed = time.process_time() - began[0], time.monotonic() - began[1]
print((worked - 2 * TICK) / passed)
"""


def test_a_process_that_does_not_know_of_it_is_held_back():
    """What it did since the last rest is not paid for yet."""
    done = subprocess.run([sys.executable, "-c", _WORK], check=True, capture_output=True, text=True)
    assert float(done.stdout) <= 0.25


@pytest.mark.parametrize("cpu", [None, 0.3])
def test_whoever_seals_is_held_back_as_the_plan_says(cpu, tmp_path, monkeypatch):
    limits: list[float] = []
    monkeypatch.setattr(keeping, "limit_cpu", limits.append)
    monkeypatch.setattr(keeping.os, "nice", lambda _: None)
    monkeypatch.setattr(keeping.signal, "signal", lambda *_: None)
    keeping.main(msgspec.json.encode(Plan(tmp_path, cpu=cpu), enc_hook=str).decode())
    assert limits == [cpu] * (cpu is not None)


@pytest.mark.parametrize(("share", "limit"), [(0.2, 0.2), (1, None)])
def test_a_writer_says_how_much(share, limit, tmp_path):
    with Log.open(tmp_path / "log", seal_cpu=share) as log:
        assert log._keeper.plan.cpu == limit
    with Log.open(tmp_path / "other") as log:
        assert log._keeper.plan.cpu == 0.5


_ENDING = """
import time
def linger():
    began = time.process_time()
    while time.process_time() - began < 0.1:
        sum(range(1000))
from rollout_log.log import duty
duty.TICK = 0.001
duty.limit_cpu(1)
class Late:
    def __del__(self):
        linger()
late = Late()
"""


def test_a_limited_process_ends_as_any_other():
    """Handlers are gone before the last objects are, and an alarm would kill it then."""
    done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
