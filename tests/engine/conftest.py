"""One engine and one router for the whole session; where there are none, tests are skipped, loudly."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from engine.environment import EngineUnavailable, engine_python, router_program
from engine.server import Engine, Router

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
def engine(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running vLLM; a test that kills or configures one starts its own."""
    with Engine(log=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine


@pytest.fixture(scope="session")
def router(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A running vllm-router in front of `engine`."""
    with Router([engine.url], log=tmp_path_factory.mktemp("router") / "router.log") as router:
        yield router


@pytest.fixture(params=["direct", "router"])
def url(request: pytest.FixtureRequest, engine: Engine) -> str:
    """Where requests go: to the engine itself, and through the router."""
    server: Engine | Router = engine if request.param == "direct" else request.getfixturevalue("router")
    return server.url


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """A client without proxies and with patience."""
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        yield client


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Nobody shall take a skipped engine for a tested one."""
    if _missing in config.stash:
        message = "THE ENGINE CANNOT BE INSTALLED HERE; NOTHING WAS TESTED AGAINST IT"
        reason = " ".join(config.stash[_missing].split())
        terminalreporter.write_line(f"!!! {message} !!! {reason}", red=True, bold=True)
