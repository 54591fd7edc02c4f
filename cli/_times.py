"""Times for people: clock times of this time zone, durations, and how to ask for them."""

from __future__ import annotations

import re
import time
from datetime import datetime

import typer

from rollout_log.undated import since_epoch_ns

__all__ = ["brief_clock", "clock", "duration", "parse_time", "time_of_day"]

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def clock(unix_ns: int) -> str:
    """Show a wall-clock stamp in local time, to the second; nothing for 0.

    A fixture has no date: `1.2 s into the fixture`.
    """
    if unix_ns <= 0:
        return ""
    if (since_ns := since_epoch_ns(unix_ns)) is not None:
        return f"{_since(since_ns)} into the fixture"
    try:
        return datetime.fromtimestamp(unix_ns // 10**9).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a stamp that no calendar has
        return str(unix_ns)


def brief_clock(unix_ns: int) -> str:
    """As `clock`, for a column: without the year and the seconds, and `+1.2 s` in a fixture."""
    if (since_ns := since_epoch_ns(unix_ns)) is not None:
        return f"+{_since(since_ns)}"
    shown = clock(unix_ns)
    return shown[5:16] if shown[4:5] == "-" else shown


def time_of_day(unix_ns: int) -> str:
    """As `clock`, for a line: without the date, and `+1.2 s` in a fixture."""
    return brief_clock(unix_ns) if since_epoch_ns(unix_ns) is not None else clock(unix_ns)[11:]


def _since(since_ns: int) -> str:
    return duration(since_ns / 1e9) if since_ns else "0 s"


def duration(seconds: float | None) -> str:
    """Show a stretch of time in two or three digits: `24 ms`, `1.2 s`, `3m05s`, `2h03m`."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1000:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m"


def parse_time(text: str | None) -> int | None:
    """Read `2026-05-01T22:30`, `22:30` (today) or `90m` (ago) as nanoseconds since 1970.

    Seconds may follow minutes. Without a zone it is local time. Raises typer's BadParameter.
    """
    if text is None:
        return None
    if ago := _AGO.fullmatch(text.strip()):
        return time.time_ns() - int(float(ago[1]) * _SECONDS[ago[2]] * 1e9)
    today = datetime.now().astimezone().strftime("%Y-%m-%d")
    try:
        found = datetime.fromisoformat(text if "-" in text else f"{today}T{text}")
        return int(found.timestamp()) * 10**9 + found.microsecond * 1000
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"{text!r} is no time: give 2026-05-01T22:30, 22:30 or 22:30:05 for today, "
            "or 90m for 90 minutes ago (s, m, h, d)"
        ) from error
