"""What a request says in words, beside or in place of token ids: chat messages, or a prompt that is text.

For people: a message's text is whole; tools that it calls, and parts that are no text, are named in a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rollout_log.ascii_json import to_json
from rollout_log.engines.wire import object_in

__all__ = ["Said", "words_in"]

_NAMED = 80
"""Characters of a part that is no text, say an image."""
_PLAIN = frozenset({"role", "name", "tool_call_id", "content", "tool_calls"})


class Said(NamedTuple):
    """One message, or a prompt that is text."""

    by: str | None
    """Its role, and what else the message says of its sender; None for a prompt."""
    text: str


def words_in(body: bytes) -> list[Said]:
    """Return what the body of a request says; nothing where it says token ids alone."""
    asked = object_in(body)
    messages = asked.get("messages")
    if isinstance(messages, list):
        return [_message(message) for message in messages]
    prompt = asked.get("prompt", asked.get("text"))
    prompts = prompt if isinstance(prompt, list) else [prompt]
    return [Said(None, each) for each in prompts if isinstance(each, str) and each]


def _message(message: Any) -> Said:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return Said(None, _json(message))
    named = ", ".join(_text(message[name]) for name in ("name", "tool_call_id") if message.get(name))
    by = f"{message['role']} ({named})" if named else message["role"]
    return Said(by, "\n".join(_lines(message)))


def _lines(message: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of a message; all that are not known as JSON, so that nothing is left out unsaid."""
    content, calls = message.get("content"), message.get("tool_calls")
    yield from map(_part, content if isinstance(content, list) else [] if content is None else [content])
    yield from map(_call, calls if isinstance(calls, list) else [] if calls is None else [calls])
    rest = {name: value for name, value in message.items() if name not in _PLAIN and value is not None}
    if rest:
        yield _json(rest)


def _part(part: Any) -> str:
    """Return a part's text; of one that has none, what it is and how it begins."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return f"[{_cut(_json(part))}]"
    rest = {name: value for name, value in part.items() if name != "type"}
    return f"[{_cut(part['type'])} {_cut(_json(rest))}]"


def _call(call: Any) -> str:
    """Return which tool is called, with what, and the name by which its answer goes."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        return f"→ {_json(call)}"
    name = f"{_text(call['id'])}: " if call.get("id") else ""
    return f"→ {name}{_text(function['name'])}({_text(function.get('arguments', ''))})"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _cut(text: str) -> str:
    return text if len(text) <= _NAMED else text[:_NAMED] + "…"


def _json(value: Any) -> str:
    try:
        return to_json(value)
    except RecursionError:
        return "nested too deeply to be shown"
