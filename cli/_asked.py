"""What a request says in words, where it names no token ids: chat messages, or a prompt that is text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_log.ascii_json import to_json
from rollout_log.engines.wire import object_in
from rollout_log.events import Event, Requested

__all__ = ["words_asked"]


def words_asked(events: Iterable[tuple[int, Event]]) -> str | None:
    """Return what the first request asks, None where it is no text."""
    body = next((event.body for _, event in events if isinstance(event, Requested)), b"")
    asked = object_in(body)
    messages = asked.get("messages")
    if isinstance(messages, list):
        return "\n".join(map(_message, messages)) or None
    prompt = asked.get("prompt", asked.get("text"))
    return prompt if isinstance(prompt, str) and prompt else None


def _message(message: Any) -> str:
    """Show who speaks, and what; what is more than text as JSON."""
    if not isinstance(message, dict):
        return to_json(message)
    role, content = message.get("role"), message.get("content")
    if set(message) == {"role", "content"} and isinstance(role, str) and isinstance(content, str):
        return f"{role}: {content}"
    return to_json(message)
