"""The page itself: one file, which loads nothing and runs nothing but its own script.

A Content-Security-Policy names the style and the scripts by hash and forbids the rest, strings that turn
into markup included. Data is packed: JSON, deflated, in base64, so no byte of it means anything to HTML.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

from rollout_log.ascii_json import to_json

__all__ = ["pack", "parts"]

_SCRIPTS = ("format.js", "plots.js", "sample.js", "timeline.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def pack(value: Any) -> str:
    """Write a value so that it can stand anywhere in a page; the page's `unpack` reads it."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    data = deflate.compress(to_json(value).encode("ascii")) + deflate.flush()
    return b64encode(data).decode("ascii")


def parts(data: Mapping[str, Iterator[str]]) -> Iterator[str]:
    """Yield the page piece by piece; `data` fills the places of these names in the template."""
    style = _read("page.css")
    scripts = [_read(name) for name in _SCRIPTS]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {' '.join(map(_hash, scripts))}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        ]
    )
    fixed = {
        "policy": policy,
        "style": style,
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    template = _read("page.html")
    end = 0
    for place in _PLACE.finditer(template):
        yield template[end : place.start()]
        if place[1] in fixed:
            yield fixed[place[1]]
        else:
            yield from data[place[1]]
        end = place.end()
    yield template[end:]


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
