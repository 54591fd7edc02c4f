"""What is said of a library that is not installed because it comes with an extra."""

from __future__ import annotations

__all__ = ["missing"]


def missing(what: str, extra: str, error: ImportError) -> str:
    """Say which library `what` needs, and which extra brings it."""
    return (
        f"{what} needs the library {error.name!r}: install the extra `{extra}` "
        f"(in a checkout: pip install '.[{extra}]')"
    )
