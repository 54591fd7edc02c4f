"""One engine and one router for the whole session; where there are none, tests are skipped, loudly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from engine.environment import EngineUnavailable, engine_python, router_program
from engine.server import Engine, Router
from rollout_log.fold import Rollout
from rollout_log.log import Log, LogReader
from rollout_log.record.proxy import serve_proxy

_missing = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def installed(pytestconfig: pytest.Config) -> None:
    """Skip where the engine cannot be installed."""
    if _missing not in pytestconfig.stash:
        try:
            engine_python()
            router_program()
        except EngineUnavailable as error:
            pytestconfig.stash[_missing] = str(error)
    if _missing in pytestconfig.stash:
        pytest.skip("the engine cannot be installed here")


@pytest.fixture(scope="session")
def engine(
    request: pytest.FixtureRequest, installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A running vLLM, one at a time; a module may ask for another command line by parametrising this."""
    arguments = getattr(request, "param", ())
    with Engine(*arguments, log=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine


@pytest.fixture(scope="session")
def router(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A running vllm-router in front of `engine`."""
    with Router([engine.url], log=tmp_path_factory.mktemp("router") / "router.log") as router:
        yield router


@dataclass
class Proxy:
    """A running recording proxy, and what it records."""

    url: str
    log: Log

    def rollout(self, key: str) -> Rollout:
        """Fold what the log has of a sample by now."""
        self.log.flush_sync()
        with LogReader.open(self.log.path) as reader:
            return reader.rollout(key)


@pytest.fixture(scope="session")
def proxy(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A recording proxy in front of `engine`, on an event loop of its own."""
    with (
        contextlib.closing(Log.open(tmp_path_factory.mktemp("proxy") / "log")) as log,
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve_proxy(log, engine.url)) as server,
    ):
        yield Proxy(server.url, log)


@pytest.fixture(params=["direct", "router", "proxy"])
def url(request: pytest.FixtureRequest, engine: Engine) -> str:
    """Where requests go: to the engine itself, through the router, through the recording proxy."""
    name = "engine" if request.param == "direct" else request.param
    server: Engine | Router | Proxy = request.getfixturevalue(name)
    return server.url


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """A client without proxies and with patience."""
    with httpx.Client(timeout=120.0, trust_env=False, limits=httpx.Limits(keepalive_expiry=2.0)) as client:
        yield client


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Nobody shall take a skipped engine for a tested one."""
    if _missing in config.stash:
        message = "THE ENGINE CANNOT BE INSTALLED HERE; NOTHING WAS TESTED AGAINST IT"
        reason = " ".join(config.stash[_missing].split())
        terminalreporter.write_line(f"!!! {message} !!! {reason}", red=True, bold=True)
