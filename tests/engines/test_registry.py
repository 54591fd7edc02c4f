from __future__ import annotations

import pytest

from rollout_log.engines import RequestInfo, dialect_for, dialect_named


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/inference/v1/generate", "vllm"),
        ("/inference/v1/generate/", "vllm"),
        ("/inference/v1/generate?x=/generate/no", "vllm"),
        ("/backend/3/inference/v1/generate", "vllm"),
        ("/generate", "sglang"),
        ("/workers/a/generate", "sglang"),
        ("/v1/completions", "openai"),
        ("/foo/v1/completions", "openai"),
        ("/v1/chat/completions?stream=1", "openai"),
    ],
)
def test_paths_name_their_dialect(path: str, name: str) -> None:
    dialect = dialect_for(path)
    assert dialect is not None
    assert dialect.name == name


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/render",
        "/inference/v1/abort_requests",
        "/health",
        "/",
        "",
        "/v1/models",
        "/regenerate",
    ],
)
def test_other_paths_have_none(path: str) -> None:
    assert dialect_for(path) is None


@pytest.mark.parametrize("name", ["vllm", "sglang", "openai"])
def test_a_dialect_is_found_by_its_name(name: str) -> None:
    assert dialect_named(name).name == name


def test_an_unknown_dialect_decodes_nothing_and_says_so() -> None:
    dialect = dialect_named("future")
    assert dialect.name == "future"
    assert dialect.read_request(b'{"token_ids": [1]}') == RequestInfo()
    frame = dialect.decode_frame(b'{"choices": []}', {})
    assert frame.undecodable == "no decoder for the dialect 'future'"
    assert frame == dialect.decode_body(b"{}")
