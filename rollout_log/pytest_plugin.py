"""The pytest plugin: a stand-in for the engine that replays what a test recorded.

    async def test_reward(rollout_log):
        response = await rollout_log.client.post("/inference/v1/generate", json=…)

Imports nothing heavy, so that a suite which does not use it does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from rollout_log.testing import StandIn
    from rollout_log.testing.vime import Vime

MODES = ("none", "once", "new_episodes", "all")
MARKER = (
    "rollout_log(file, mode=…, upstream=…, pace=…, at_cut=…, hold_s=…, faults=…, block_network=…): where the "
    "fixture `rollout_log` reads and writes, by default fixtures/<module>.jsonl beside the module, and how"
)
_MARKS = ("file", "mode", "upstream", "pace", "at_cut", "hold_s", "faults", "block_network")
_used = pytest.StashKey[dict[str, dict[str, bool]]]()
"""File -> recording -> whether any test asked for it."""
_engine = pytest.StashKey[Any]()
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollout-log", "replay recorded token streams")
    group.addoption("--rollout-log-mode", choices=MODES, help="What may be recorded; by default none.")
    group.addoption("--rollout-log-upstream", metavar="URL", help="The engine that the other modes ask.")
    group.addoption(
        "--rollout-log-block-network",
        action="store_true",
        default=None,
        help="Let no test that uses the fixture connect beyond loopback.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.stash[_used] = {}


@pytest.fixture
def rollout_log_mode() -> str | None:
    """Redefine it to give a folder or a module of tests another mode."""
    return None


@pytest.fixture
def rollout_log_upstream() -> str | None:
    """Redefine it to say where the engine is that recording asks."""
    return None


@pytest.fixture
def rollout_log_file() -> Path | None:
    """Redefine it to have the recordings elsewhere."""
    return None


@pytest.fixture
def rollout_log(
    request: pytest.FixtureRequest,
    rollout_log_mode: str | None,
    rollout_log_upstream: str | None,
    rollout_log_file: Path | None,
) -> Iterator[StandIn]:
    """A stand-in for the engine: `.url`, `.host`, `.port`, `.client`, `.transport`, `.samples()`."""
    from rollout_log.errors import RolloutLogError
    from rollout_log.testing import Recordings, StandIn

    option = request.config.getoption
    marks: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("rollout_log"))):  # the closest one last
        marks |= {**({"file": mark.args[0]} if mark.args else {}), **mark.kwargs}
    if unknown := [name for name in marks if name not in _MARKS]:
        _refuse(f"the marker rollout_log takes no {unknown[0]!r}: there are {', '.join(_MARKS)}")
    # Command line over fixture over marker.
    mode = _first(option("--rollout-log-mode"), rollout_log_mode, marks.pop("mode", None), "none")
    upstream = _first(option("--rollout-log-upstream"), rollout_log_upstream, marks.pop("upstream", None))
    blocked = _first(option("--rollout-log-block-network"), marks.pop("block_network", None), False)
    if mode not in MODES:
        _refuse(f"{mode!r} is no mode of recording: there are {', '.join(MODES)}")
    path = _path(request.path, _first(rollout_log_file, marks.pop("file", None)))
    test = request.node.nodeid.partition("::")[2]
    try:
        engine = StandIn(Recordings(path, test), mode, upstream=upstream, **marks)
    except (RolloutLogError, ValueError) as error:
        _refuse(str(error))
    request.node.stash[_engine] = engine
    try:
        if blocked:
            yield from _blocked(engine, upstream)
        else:
            yield engine
    finally:
        failed = request.node.stash.get(_failed, False)
        engine.close(save=not failed)
        used = request.config.stash[_used].setdefault(str(path), {})
        for name, asked in engine.used().items():
            used[name] = used.get(name, False) or asked


@pytest.fixture
def rollout_log_vime(rollout_log: StandIn) -> Iterator[Vime]:
    """vime, pointed at the stand-in: `.args`, `.client`, `.engine`."""
    from rollout_log.testing.vime import pointed_vime

    with pointed_vime(rollout_log) as vime:
        yield vime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test by what the stand-in knows, whatever its client made of the answers."""
    __tracebackhide__ = True
    try:
        result = yield
    except (pytest.skip.Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        item.stash[_failed] = True
        _tell_refusals(item)
        _fail_by_engine(item, error)
        raise
    _fail_by_engine(item, None)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: tell the controller what was used."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["rollout_log"] = session.config.stash[_used]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the controller of pytest-xdist: take over what a worker tells."""
    used = node.config.stash[_used]
    for path, names in getattr(node, "workeroutput", {}).get("rollout_log", {}).items():
        ours = used.setdefault(path, {})
        for name, asked in names.items():
            ours[name] = ours.get(name, False) or asked


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the recordings that no test asked for."""
    lines = []
    for path, names in sorted(config.stash[_used].items()):
        unused = sorted(name for name, asked in names.items() if not asked)
        if unused:
            more = f" and {len(unused) - 10} more" if len(unused) > 10 else ""
            shown = ascii(", ".join(unused[:10]))[1:-1] + more
            lines.append(f"{path}: {len(unused)} of {len(names)} recordings were not asked for: {shown}")
    if lines:
        terminalreporter.section("rollout-log", sep="-")
    for line in lines:
        terminalreporter.line(line)


def _refuse(message: str) -> NoReturn:
    """End the set-up of a test with what to mend, and no traceback of this plugin."""
    raise pytest.fail.Exception(message, pytrace=False) from None


def _fail_by_engine(item: pytest.Item, error: BaseException | None) -> None:
    engine = item.stash.get(_engine, None)
    if engine is not None and (failures := engine.failures):
        item.stash[_failed] = True
        told = error is not None and all(failure in str(error) for failure in failures)
        raise pytest.fail.Exception("\n".join(failures), pytrace=False) from None if told else error


def _tell_refusals(item: pytest.Item) -> None:
    """Show what the engine that was asked said, where a client tells the HTTP status alone."""
    engine = item.stash.get(_engine, None)
    if engine is not None and (refusals := engine.refusals):
        item.add_report_section("call", "rollout-log", "\n".join(refusals))


def _blocked(engine: StandIn, upstream: str | None) -> Iterator[StandIn]:
    from urllib.parse import urlsplit

    from rollout_log.testing.network import blocked_network

    with blocked_network(*filter(None, [urlsplit(upstream or "").hostname])):
        yield engine


def _path(module: Path, given: Path | str | None) -> Path:
    """Say where the recordings of a test module are."""
    if given is not None:
        return (module.parent / given).resolve()
    plain = module.parent / "fixtures" / f"{module.stem}.jsonl"
    packed = [plain.with_name(plain.name + suffix) for suffix in (".gz", ".zst")]
    return next((path for path in (plain, *packed) if path.exists()), plain)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
