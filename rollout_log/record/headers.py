"""Which headers and URLs may be written down: everything but credentials."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

__all__ = ["BASE_HEADER", "KEY_HEADER", "safe_headers", "safe_url"]

KEY_HEADER = "x-rollout-log-key"
"""Names the sample a request is made for; taken off before the request goes on."""
BASE_HEADER = "x-rollout-log-base"
"""States the base explicitly; taken off as well."""

_SECRET = re.compile(
    r"auth|cookie|token|secret|passw|credential|(?<!routing)[-_]key$|api[-_]?key|^key$|^sig$|signature|session$",
    re.IGNORECASE,
)
REDACTED = "[redacted]"


def safe_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return headers as recorded: names lower-case, credentials and cookies left out."""
    return [(name.lower(), value) for name, value in headers if not _SECRET.search(name)]


@lru_cache(maxsize=256)
def safe_url(url: str) -> str:
    """Return a URL as recorded: no user, no password, secret-looking query values redacted."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket alone; whatever it is, nothing was sent there
        return REDACTED
    host = parts.netloc.rpartition("@")[2]
    query = parts.query
    if query:
        pairs = parse_qsl(query, keep_blank_values=True)
        if any(_SECRET.search(name) for name, _ in pairs):
            query = urlencode([(name, REDACTED if _SECRET.search(name) else value) for name, value in pairs])
    return urlunsplit((parts.scheme, host, parts.path, query, ""))
