"""Servers bind the loopback interface unless they are told otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from replay.memory import MemoryLog
from rollout_log.cli import record as record_verb
from rollout_log.cli import serve as serve_verb
from rollout_log.cli._arguments import address
from rollout_log.http_server import serve
from rollout_log.record.proxy import serve_proxy
from rollout_log.replay import serve_replay

LOOPBACK, ANY = "0100007F", "00000000"
LISTENING = "0A"


def listens_on(port: int) -> set[str]:
    """Addresses on which this machine takes connections to a port, as the kernel has them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        address
        for line in lines
        for address, _, number in [line[1].partition(":")]
        if line[3] == LISTENING and int(number, 16) == port
    }


SERVERS: dict[str, Callable[..., AbstractAsyncContextManager[Any]]] = {
    "server": lambda **where: serve(lambda request, responder: responder.answer(200, b""), **where),
    "proxy": lambda **where: serve_proxy(None, "http://127.0.0.1:1", **where),
    "stand-in engine": lambda **where: serve_replay(MemoryLog(), **where),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_a_server_binds_loopback_unless_told_otherwise(name):
    async with SERVERS[name]() as server:
        assert listens_on(server.port) == {LOOPBACK}
    async with SERVERS[name](host="0.0.0.0") as server:
        assert listens_on(server.port) == {ANY}


@pytest.mark.parametrize("verb", [record_verb, serve_verb], ids=["record", "serve"])
def test_a_command_binds_loopback_unless_told_otherwise(verb: ModuleType):
    default = inspect.signature(verb.run).parameters["listen"].default
    for listen in (default, ":0", "0"):
        assert ip_address(address(listen)[0]).is_loopback
    assert address("0.0.0.0:80") == ("0.0.0.0", 80)
