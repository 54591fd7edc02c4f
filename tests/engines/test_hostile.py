"""Whatever an engine or a model sends, decoding gives a frame; and ids are never guessed."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.engines import Dialect, Frame, dialect_named

DIALECTS = [dialect_named(name) for name in ("vllm", "sglang", "openai", "future")]
VLLM, SGLANG, OPENAI, _ = DIALECTS


def is_sound(frame: Frame) -> bool:
    """The promises every consumer builds on."""
    for choice in frame.choices:
        assert choice.index >= 0
        assert all(type(token) is int and 0 <= token < 2**63 for token in choice.token_ids)
        assert choice.logprobs is None or all(type(value) is float for value in choice.logprobs)
        assert choice.logprobs is None or len(choice.logprobs) <= len(choice.token_ids)
    assert frame.weight_version is None or type(frame.weight_version) is str
    assert frame.error is None or frame.error.code is None or 0 <= frame.error.code < 1000
    if frame.undecodable is not None:
        assert frame == Frame(undecodable=frame.undecodable)
    msgspec.json.encode(frame)  # no lone surrogates: all of it can be written down
    return True


def decode_all(data: bytes) -> None:
    for dialect in DIALECTS:
        assert is_sound(dialect.decode_frame(data, {0: 1, 1: 2}))
        assert is_sound(dialect.decode_body(data))
        info = dialect.read_request(data)
        assert info.n >= 1
        assert info.token_ids is None or all(0 <= token < 2**63 for token in info.token_ids)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    decode_all(data)


_odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([17, 0, -1, 2**63, 2**64, 10**400]),
    st.floats(),
    st.text(st.characters(), max_size=5),  # surrogates included
    st.sampled_from(["17", "token_id:17", "stop", "nan", "null", "\ud800", "default"]),
)
_value = st.recursive(
    _odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_ids = st.lists(st.integers(0, 2**63 - 1), max_size=4)


def shaped(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: field | _value for name, field in fields.items()})


_entries = st.lists(shaped(logprob=st.floats(), token=st.text(max_size=3)) | _value, max_size=4)
_span = shaped(version=st.text(max_size=2), start=st.integers(0, 9), end=st.integers(0, 9))
_choice = shaped(
    index=st.integers(0, 3),
    token_ids=_ids,
    logprobs=shaped(
        content=_entries, tokens=st.lists(st.text(max_size=3)), token_logprobs=st.lists(st.floats())
    ),
    weight_versions=st.lists(_span, max_size=2),
    delta=shaped(content=st.text(max_size=3)),
    **dict.fromkeys(
        ("finish_reason", "stop_reason", "text", "sampling_mask", "routed_experts"), st.text(max_size=3)
    ),
)
_meta = shaped(
    completion_tokens=st.integers(0, 5),
    output_token_logprobs=st.lists(st.tuples(st.floats(), st.integers(0, 9), st.none()) | _value, max_size=4),
    finish_reason=shaped(type=st.text(max_size=3), matched=st.integers()),
    weight_version=st.integers(),
)
_answer = shaped(
    choices=st.lists(_choice, max_size=3),
    meta_info=_meta,
    output_ids=_ids,
    index=st.integers(0, 3),
    error=shaped(message=st.text(max_size=3), code=st.integers()),
    usage=st.dictionaries(st.text(max_size=3), _value, max_size=2),
    metrics=shaped(speculative_decoding=_value),
    sampling_params=shaped(n=st.integers(), max_tokens=st.integers()),
    **dict.fromkeys(
        ("detail", "message", "code", "object", "weight_version", "prompt_token_ids", "id"), _value
    ),
)


@given(_answer | st.lists(_answer, max_size=2), st.booleans())
def test_arbitrary_json_in_an_answers_shape(value: Any, ascii_only: bool) -> None:
    decode_all(json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))


def vllm(choice: bytes) -> Frame:
    return VLLM.decode_frame(b'{"choices": [{' + choice + b"}]}", {})


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (b"NaN", math.nan),
        (b"-Infinity", -math.inf),
        (b"1e999", math.inf),
        (b"-1e999", -math.inf),
        (b'"-0.5"', -0.5),
        (b'"NaN"', math.nan),
        (b"-0.5", -0.5),
        (b"-1", -1.0),
        (b"null", math.nan),
    ],
)
def test_log_probs_that_json_does_not_know(number: bytes, value: float) -> None:
    choice = vllm(b'"token_ids": [17], "logprobs": {"content": [{"logprob": ' + number + b"}]}").choices[0]
    assert choice.token_ids == [17]
    assert choice.logprobs == pytest.approx([value], nan_ok=True)


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (rb'"\ud800x"', "\ufffdx"),
        (b'"\xffx"', "\ufffdx"),
        (b'"\xed\xa0\x80x"', "\ufffd\ufffd\ufffdx"),
        (rb'"\ud83d\ude80"', "\U0001f680"),
        (b'"a\xc2\x85\xe2\x80\xa8b"', "a\u0085\u2028b"),
        (b'"\\u001b[31m"', "\x1b[31m"),
    ],
)
def test_text_that_is_not_unicode_is_replaced_and_the_tokens_stay(wire: bytes, text: str) -> None:
    choice = vllm(b'"token_ids": [17], "text": ' + wire).choices[0]
    assert (choice.token_ids, choice.text) == ([17], text)


@pytest.mark.parametrize(
    "token", [b"-1", b"1.5", b"true", b"null", b'"x"', b"9223372036854775808", b"9" * 5000]
)
@pytest.mark.parametrize("dialect", [VLLM, OPENAI, SGLANG], ids=lambda dialect: dialect.name)
def test_a_token_id_that_is_none_makes_the_frame_undecodable(token: bytes, dialect: Dialect) -> None:
    data = (
        b'{"choices": [{"token_ids": [1, T]}], "meta_info": {"completion_tokens": 2}, "output_ids": [1, T]}'
    )
    frame = dialect.decode_frame(data.replace(b"T", token), {})
    assert frame.undecodable is not None
    assert "[1]" in frame.undecodable  # says where
    assert frame.choices == []


def test_token_ids_in_strings_are_numbers() -> None:
    assert vllm(b'"index": "1", "token_ids": ["17", 18]').choices[0].token_ids == [17, 18]
    assert vllm(b'"index": "1", "token_ids": ["17", 18]').choices[0].index == 1


@pytest.mark.parametrize("dialect", DIALECTS[:3], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"choices": []} x', "not JSON"),
        (b"<html>502</html>", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"x": ' * 100_000, "nested too deeply"),
        (b"3", "Expected `object"),
        (b"null", "Expected `object"),
    ],
)
def test_what_cannot_be_read_says_why(dialect: Dialect, data: bytes, why: str) -> None:
    for frame in (dialect.decode_frame(data, {}), dialect.decode_body(data)):
        assert frame.undecodable is not None
        assert frame.undecodable.startswith(why)
        assert frame == Frame(undecodable=frame.undecodable)


def test_unknown_fields_do_not_matter_however_odd() -> None:
    assert vllm(b'"token_ids": [17], "new": {"deep": [1e999, -0, "x"]}').choices[0].token_ids == [17]
