"""What stays in memory of samples that are not being generated any more."""

from __future__ import annotations

import json

import pytest

from rollout_log.record import samples as registry
from rollout_log.record.samples import Samples


def generate(samples: Samples, key: str, *choices: dict[str, object], end: bool = True) -> None:
    params = {"n": max(len(choices), 1)}
    body = json.dumps({"model": "m", "token_ids": [1] * 10, "sampling_params": params, "stream": True})
    exchange = samples.request(key, path="/inference/v1/generate", body=body.encode())
    if choices:
        exchange.respond(200, [("content-type", "text/event-stream")])
        told = [{"index": index, **choice} for index, choice in enumerate(choices)]
        exchange.feed(b"data: %b\n\n" % json.dumps({"choices": told}).encode())
    if end:
        exchange.end("eof")


def kept(samples: Samples) -> list[str]:
    return [sample.key for sample in samples.all()]


def test_samples_are_forgotten_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KEPT_IDLE", 3)
    samples = Samples(None)
    for place in range(6):
        generate(samples, f"k{place}")
    # The limit holds before another one comes.
    assert kept(samples) == ["k2", "k3", "k4", "k5"]


def test_samples_are_forgotten_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KEPT_TOKENS", 25)
    monkeypatch.setattr(registry, "_COUNT_EVERY", 1)
    samples = Samples(None)
    for place in range(5):
        generate(samples, f"k{place}")
    # 20 tokens of two, and the newest one.
    assert kept(samples) == ["k2", "k3", "k4"]


def test_an_open_request_keeps_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KEPT_IDLE", 2)
    samples = Samples(None)
    generate(samples, "open", end=False)
    for place in range(4):
        generate(samples, f"k{place}")
    assert kept(samples) == ["open", "k2", "k3"]


TOKENS = [*range(100)]


@pytest.mark.parametrize(
    ("choices", "weight"),
    [
        ([{"token_ids": TOKENS}], 100),
        ([{"token_ids": TOKENS}] * 3, 300),
        ([{"token_ids": TOKENS, "sampling_mask": [[1] * 50] * 100}], 100 + 100 * (90 + 50 * 40) // 70),
        ([{"token_ids": TOKENS, "sampling_mask": [[]] * 100}], 100 + 100 * 90 // 70),
        ([{"token_ids": TOKENS, "routed_experts": "A" * 7000}], 200),
    ],
    ids=["tokens", "choices", "sampling sets", "empty sets", "routing"],
)
def test_what_comes_with_tokens_takes_memory_as_well(choices: list[dict[str, object]], weight: int) -> None:
    samples = Samples(None)
    generate(samples, "k", *choices)
    (sample,) = samples.all()
    assert registry._tokens_of(sample) == 10 + weight
