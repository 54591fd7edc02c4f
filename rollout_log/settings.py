"""All settings of the plug-ins, in one table.

Each comes from `args.rollout_log_<name>` (vime and slime put the keys of their YAML of custom settings
there), else from the environment, `ROLLOUT_LOG_<NAME>`, else from its default. A name that is none of these
gets one warning with the nearest one, since trainers ignore flags they do not know.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from rollout_log.errors import RolloutLogError

__all__ = ["Settings", "SettingsError", "read_settings"]

_logger = logging.getLogger("rollout_log")


_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class SettingsError(RolloutLogError):
    """A setting has a value it cannot have."""


class Settings(msgspec.Struct, frozen=True):
    """Settings of a recorded run."""

    enabled: bool = True
    """False: the same generation, nothing recorded."""
    dir: str | None = None
    """The log; default `$TMPDIR/rollout-log/<run>`."""
    archive: str | None = None
    """Where sealed segments are copied; a network file system is fine here."""
    durability: Literal["window", "finish", "strict"] = "finish"
    """What a finished request waits for: nothing, its commit for at most 100 ms, its commit."""
    window_ms: _Positive = 250
    """Milliseconds of events that a killed process may lose."""
    max_bytes: _Positive | None = None
    """Cap of the log's size; default min(100 GB, 20 % of the free disk)."""
    seal_cpu: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """How much of one core the process may take that seals and archives."""
    on_retry: Literal["auto", "restart", "continue"] = "auto"
    """Whether a retry goes on from the tokens it has."""
    retries: _Natural = 60
    stall_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Seconds without a byte, in mid-stream, before the engine's health is asked."""
    no_terminal: Literal["auto", "stop", "fail", "abort"] = "auto"
    """What a clean end without a finish reason and without evidence is: a retry, or one of these."""
    missing_logprobs: Literal["refuse", "mark"] = "refuse"
    """Tokens without log-probs: the sample counts as failed, or they get NaN and loss mask 0."""
    on_failure: Literal["drop", "raise"] = "drop"
    """A sample that cannot be saved: FAILED and `remove_sample`, or an exception that ends the rollout."""
    resume: Literal["off", "continue"] = "off"
    """After a crash: whether unfinished samples of the log go on."""
    keep: tuple[Literal["routed_experts", "sampling_mask", "images"], ...] = ()
    """Large parts that are stored whole; the others as length and hash."""
    strict: bool = False
    """True: an error of the log ends the run instead of a warning."""


_NAMES = tuple(Settings.__struct_fields__)
_PREFIX, _ENVIRONMENT, _FLAG = "rollout_log_", "ROLLOUT_LOG_", "--rollout-log-"
_OTHERS = {"ROLLOUT_LOG_KILLS"}
_SWITCHES = {"on": True, "yes": True, "off": False, "no": False}
_warned: set[str] = set()


def read_settings(
    args: Any, environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> Settings:
    """Read the settings of a run. Raises `SettingsError`, which names the setting and what it may be."""
    environ = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    for name in _NAMES:
        value = getattr(args, _PREFIX + name, None)
        source = f"args.{_PREFIX}{name}"
        if value is None and (text := environ.get(_ENVIRONMENT + name.upper())) is not None:
            value, source = text, _ENVIRONMENT + name.upper()
        if value is not None:
            found[name] = _convert(name, value, source)
    _warn_of_unknown(args, environ, sys.argv if argv is None else argv)
    return Settings(**found)


def _convert(name: str, value: Any, source: str) -> Any:
    kind = next(field.type for field in msgspec.structs.fields(Settings) if field.name == name)
    if name == "keep" and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, str) and name == "max_bytes":
        value = _size(value)
    if name == "resume" and value is False:
        value = "off"  # as YAML reads that word
    if kind is bool and isinstance(value, str):
        value = _SWITCHES.get(value.strip().lower(), value)  # as YAML reads these
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}={value!r}: {_may_be(name, kind) or error}") from None


def _may_be(name: str, kind: Any) -> str | None:
    """Say what a setting may be, where msgspec's message does not."""
    if name == "max_bytes":
        return "it is a size, such as 200 GB"
    if kind is bool:
        return "it is true or false"
    words = [
        word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)
    ]
    if not words:
        return None
    return f"it is {'some' if get_origin(kind) is tuple else 'one'} of {', '.join(words)}"


def _size(text: str) -> Any:
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    digits = text.strip().lower().removesuffix("b")
    if digits and digits[-1] in units:
        try:
            return int(float(digits[:-1]) * units[digits[-1]])
        except ValueError:
            return text
    return text


def _warn_of_unknown(args: Any, environ: Mapping[str, str], argv: Sequence[str]) -> None:
    flags = (word.partition("=")[0] for word in argv if word.startswith(_FLAG))
    attributes = (name for name in getattr(args, "__dict__", ()) if name.startswith(_PREFIX))
    variables = (name for name in environ if name.startswith(_ENVIRONMENT) and name not in _OTHERS)
    _warn(attributes, [_PREFIX + name for name in _NAMES], "setting")
    _warn(variables, [_ENVIRONMENT + name.upper() for name in _NAMES], "environment variable")
    for flag in flags:
        name = _PREFIX + flag.removeprefix(_FLAG).replace("-", "_")
        if flag not in _warned:
            _warned.add(flag)
            known = [_PREFIX + each for each in _NAMES]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            _logger.warning(
                "the command line flag %s has no effect: trainers ignore it; put `%s: …` into the YAML of "
                "--custom-config-path, or set %s",
                flag,
                near,
                near.upper(),
            )


def _warn(names: Iterable[str], known: list[str], what: str) -> None:
    for name in names:
        if name in known or name in _warned:
            continue
        _warned.add(name)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        _logger.warning("unknown %s %s has no effect; did you mean %s?", what, name, near)
