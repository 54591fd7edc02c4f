"""Keeps a test from the network: connections and look-ups beyond loopback raise `NetworkBlocked`.

Guards Python's own sockets, which httpx, aiohttp, asyncio and requests use; not uvloop's.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

from rollout_log.errors import RolloutLogError

__all__ = ["NetworkBlocked", "blocked_network"]

_NAMES = frozenset({"", "localhost", "localhost.localdomain", "ip6-localhost"})


class NetworkBlocked(RolloutLogError):
    """A test went for the network, and must not."""


@contextlib.contextmanager
def blocked_network(*allowed: str) -> Iterator[None]:
    """Block everything but loopback, Unix sockets and the hosts that are allowed."""
    hosts = set(allowed)
    connect, connect_ex, sendto = socket.socket.connect, socket.socket.connect_ex, socket.socket.sendto
    getaddrinfo = socket.getaddrinfo

    def check(sock: socket.socket, address: Any) -> None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        host = str(address[0])
        if not _is_local(host) and host not in hosts:
            sock.close()  # its owner expects an OSError, and might forget it now
            raise NetworkBlocked(
                f"the test connects to {host}:{address[1]}, and its network is blocked; replay a "
                "recording, or mark the test with block_network=False"
            )

    def guarded_connect(self: socket.socket, address: Any) -> None:
        check(self, address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        check(self, address)
        return connect_ex(self, address)

    def guarded_sendto(self: socket.socket, data: Any, *rest: Any) -> int:
        check(self, rest[-1])
        return sendto(self, data, *rest)

    def guarded_getaddrinfo(host: Any, port: Any, *rest: Any, **named: Any) -> Any:
        name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
        if _is_address(name) or _is_local(name):
            return getaddrinfo(host, port, *rest, **named)
        if name not in hosts:
            raise NetworkBlocked(f"the test looks up {name}, and its network is blocked")
        found = getaddrinfo(host, port, *rest, **named)
        hosts.update(str(each[4][0]) for each in found)
        return found

    guards = (guarded_connect, guarded_connect_ex, guarded_sendto)
    _set(*guards)
    socket.getaddrinfo = guarded_getaddrinfo
    try:
        yield
    finally:
        _set(connect, connect_ex, sendto)
        socket.getaddrinfo = getaddrinfo


def _set(connect: Any, connect_ex: Any, sendto: Any) -> None:
    kind: Any = socket.socket
    kind.connect, kind.connect_ex, kind.sendto = connect, connect_ex, sendto


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    return host.lower() in _NAMES or (_is_address(host) and ip_address(host.partition("%")[0]).is_loopback)
