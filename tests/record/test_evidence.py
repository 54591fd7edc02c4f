"""What the output of a request proves about its finish."""

from __future__ import annotations

import pytest

from rollout_log.engines import RequestInfo
from rollout_log.record.evidence import evidence_of_finish


def reason(
    tokens: list[int], *, max_tokens: int | None = 5, text: str | None = None, **params: object
) -> str | None:
    info = RequestInfo(max_tokens=max_tokens, sampling_params=params)
    found = evidence_of_finish(info, tokens, eos_token_ids=[9], text=text)
    return found.finish_reason if found else None


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        ([1, 2, 3, 4, 5], {}, "length"),
        ([1, 2, 3, 4], {}, None),
        ([1, 2, 3, 4, 5], {"max_tokens": None}, None),
        ([], {"max_tokens": 0}, None),
        ([1, 9], {}, "stop"),
        ([9, 1], {}, None),
        ([1, 9], {"ignore_eos": True}, None),
        ([1, 7], {"stop_token_ids": [7, 8]}, "stop"),
        ([1, 7], {"stop_token_ids": [7], "ignore_eos": True}, "stop"),
        ([7, 1], {"stop_token_ids": [7]}, None),
        ([1], {"stop": "END", "text": "the END"}, "stop"),
        ([1], {"stop": ["\n", "END"], "text": "the END"}, "stop"),
        ([1], {"stop": ["END"], "text": "END of it"}, None),
        ([1], {"stop": ["END"]}, None),
        ([1], {"stop": [""], "text": "anything"}, None),
    ],
)
def test_evidence(tokens: list[int], options: dict[str, object], expected: str | None) -> None:
    assert reason(tokens, **options) == expected  # type: ignore[arg-type]
