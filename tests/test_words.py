"""What a request says in words: messages with who says them, tools and images named, text whole."""

from __future__ import annotations

import json

import pytest

from rollout_log.words import Said, words_in

CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}


def said(message) -> Said:
    [found] = words_in(json.dumps({"messages": [message]}).encode())
    return found


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "user", "content": "two\nlines"}, ("user", "two\nlines")),
        ({"role": "user", "content": "x" * 5000}, ("user", "x" * 5000)),
        ({"role": "user", "name": "Bo", "content": "hi"}, ("user (Bo)", "hi")),
        ({"role": "assistant", "content": None, "refusal": None}, ("assistant", "")),
        (
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            ("assistant", 'Let me see.\n→ call-1: weather({"city": "Rom"})'),
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]}, ("assistant", "→ now()")),
        ({"role": "tool", "tool_call_id": "call-1", "content": "7 °C"}, ("tool (call-1)", "7 °C")),
        (
            {"role": "user", "content": [{"type": "text", "text": "what is this?"}, IMAGE, "and this?"]},
            (
                "user",
                'what is this?\n[image_url {"image_url":{"url":"data:image/png;base64,'
                + "A" * (80 - len('{"image_url":{"url":"data:image/png;base64,'))
                + "…]\nand this?",
            ),
        ),
        ({"role": "assistant", "reasoning": "hm"}, ("assistant", '{"reasoning":"hm"}')),
    ],
)
def test_a_message_is_said_by_a_role(message, shown):
    assert said(message) == shown


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (5, (None, "5")),
        ({"content": "hi"}, (None, '{"content":"hi"}')),
        ({"role": ["user"]}, (None, '{"role":["user"]}')),
        ({"role": "user", "content": 7}, ("user", "[7]")),
        ({"role": "user", "content": {"type": 1}}, ("user", '[{"type":1}]')),
        ({"role": "user", "tool_calls": ["x", {"function": 1}]}, ("user", '→ "x"\n→ {"function":1}')),
        ({"role": "tool", "tool_call_id": 3, "content": "x"}, ("tool (3)", "x")),
    ],
)
def test_a_message_of_no_known_shape_is_said_all_the_same(message, shown):
    assert said(message) == shown


@pytest.mark.parametrize("depth", [100, 900, 2000, 100_000])
def test_a_message_that_is_nested_deeply_is_said_to_be(depth):
    nested = "[" * depth + "]" * depth
    found = words_in(b'{"messages":[{"role":"user","extra":%b}]}' % nested.encode())
    shown = [f'{{"extra":{nested}}}', "nested too deeply to be shown"]
    assert found in ([Said("user", shown[0])], [Said("user", shown[1])], [])  # each Python has its own limit


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"prompt": "once"}, ["once"]),
        ({"prompt": ["once", "upon"]}, ["once", "upon"]),
        ({"text": "once"}, ["once"]),
        ({"prompt": [1, 2]}, []),
        ({"prompt": ""}, []),
        ({"messages": []}, []),
        ({"token_ids": [1]}, []),
        ([], []),
    ],
)
def test_a_prompt_that_is_text(asked, texts):
    assert words_in(json.dumps(asked).encode()) == [(None, text) for text in texts]
