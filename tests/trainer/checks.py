"""What has to hold for a sample, at every moment and at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from trainer.engine_double import EngineDouble
from trainer.sample_double import Sample, Status
from trainer.truth import EOS, TOOL, Tokenizer, decode, expected_tokens, version_of

__all__ = ["Watch", "WatchedLoop", "open_spans", "verify"]


class WatchedLoop(asyncio.SelectorEventLoop):
    """Looks after every iteration, so it sees what any task leaves behind at any `await`."""

    on_tick: Callable[[], None] | None = None

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        if self.on_tick is not None:
            self.on_tick()


class Watch:
    """Samples that are being generated. `problems`: what was ever wrong with one, once per sample."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.looks = 0
        self._samples: dict[int, tuple[Sample, int]] = {}

    def add(self, sample: Sample, prompt_length: int) -> None:
        self._samples[id(sample)] = (sample, prompt_length)

    def remove(self, sample: Sample) -> None:
        self._samples.pop(id(sample), None)

    @property
    def samples(self) -> list[Sample]:
        return [sample for sample, _ in self._samples.values()]

    def look(self) -> None:
        self.looks += 1
        for key, (sample, prompt_length) in list(self._samples.items()):
            problem = _uneven(sample, prompt_length)
            if problem is not None:
                self.problems.append(f"{_name(sample)}, while it was generated: {problem}")
                del self._samples[key]


def _uneven(sample: Sample, prompt_length: int) -> str | None:
    length = sample.response_length
    if sample.tokens and len(sample.tokens) != prompt_length + length:
        return f"{len(sample.tokens)} tokens for {prompt_length} + {length}"
    if length and not sample.tokens:
        return f"no tokens for a response of {length}"
    if sample.loss_mask is not None and len(sample.loss_mask) != length:
        return f"loss_mask has {len(sample.loss_mask)} entries for {length} tokens"
    if len(sample.rollout_log_probs or ()) != length:
        return f"rollout_log_probs has {len(sample.rollout_log_probs or ())} entries for {length} tokens"
    offsets = sample.rollout_top_p_token_offsets
    if offsets is not None and len(offsets) != length + 1:
        return f"top-p offsets have {len(offsets)} entries for {length} tokens"
    return None


def verify(
    sample: Sample,
    *,
    budget: int,
    versions: Sequence[str],
    engine: EngineDouble | None = None,
    masked: int = 0,
    exact_versions: bool = True,
) -> list[str]:
    """Everything that is wrong with a sample that nobody generates any more.

    `versions`: all that were ever loaded. With `engine`, a log-prob has to be one that it sent for that
    position. `masked`: how many tokens have mask 0 because they are off-policy. Without `exact_versions`
    the list `weight_versions` is not compared (an engine that tells only its last one).
    """
    prompt = Tokenizer().encode(sample.prompt)
    length = sample.response_length
    uneven = _uneven(sample, len(prompt))
    if uneven is not None:
        return [f"{_name(sample)}: {uneven}"]
    response = sample.tokens[len(prompt) :]
    problems = [
        *_wrong_tokens(sample, prompt, response),
        *_wrong_logprobs(sample, prompt, response, versions, engine, exact_versions=exact_versions),
        *_wrong_status(sample, prompt, response, budget, engine),
    ]
    text = decode(response)
    if sample.response != text:
        problems.append(f"response is {sample.response[-20:]!r} at its end, its tokens say {text[-20:]!r}")
    if sample.loss_mask is not None:
        mask = [int(at >= masked and token < TOOL) for at, token in enumerate(response)]
        if sample.loss_mask != mask:
            problems.append(f"loss_mask is {sample.loss_mask}, not {mask}")
    elif masked:
        problems.append(f"no loss_mask, though {masked} tokens are off-policy")
    if open_spans(sample):
        problems.append(f"spans never closed: {open_spans(sample)}")
    if length > budget:
        problems.append(f"{length} tokens, the budget is {budget}")
    return [f"{_name(sample)}: {problem}" for problem in problems]


def _wrong_tokens(sample: Sample, prompt: list[int], response: list[int]) -> Iterable[str]:
    if sample.tokens and sample.tokens[: len(prompt)] != prompt:
        yield "the prompt's tokens changed"
    said = expected_tokens(prompt, 0, len(response))
    for at, token in enumerate(response):
        if token < TOOL and (at >= len(said) or token != said[at]):
            yield f"token {at} is {token}, the engine said {said[at] if at < len(said) else 'no more'}"
            return


def _wrong_logprobs(
    sample: Sample,
    prompt: list[int],
    response: list[int],
    versions: Sequence[str],
    engine: EngineDouble | None,
    *,
    exact_versions: bool,
) -> Iterable[str]:
    sent: dict[int, set[str]] = {}
    for served in engine.served if engine is not None else ():
        if served.prompt == prompt:
            for at, version in enumerate(served.versions, served.start):
                sent.setdefault(at, set()).add(version)
    used = []
    for at, (token, logprob) in enumerate(zip(response, sample.rollout_log_probs or (), strict=True)):
        if token >= TOOL:
            continue
        version = version_of(prompt, at, logprob, versions)
        if version is None:
            yield f"log-prob {at} is {logprob}, which belongs to no version of this token"
            return
        if engine is not None and version not in sent.get(at, ()):
            yield f"log-prob {at} is of version {version}, which the engine never sent there"
            return
        used.append(version)
    if exact_versions:
        runs = [version for version, _ in groupby(used)]
        told = [version for version, _ in groupby(sample.weight_versions)]
        if told != runs:
            yield f"weight_versions is {sample.weight_versions}, the tokens are of {runs}"


def _wrong_status(
    sample: Sample, prompt: list[int], response: list[int], budget: int, engine: EngineDouble | None
) -> Iterable[str]:
    ended = bool(response) and response[-1] == EOS
    match sample.status:
        case Status.COMPLETED:
            stopped = engine is not None and any(
                served.prompt == prompt and served.finish == "stop" and served.end == len(response)
                for served in engine.served
            )
            if not ended and not stopped:
                yield f"completed after {len(response)} tokens, without an end"
        case Status.TRUNCATED:
            if len(response) != budget:
                yield f"truncated at {len(response)} tokens, the budget is {budget}"
        case Status.ABORTED:
            if ended:
                yield "aborted, though its last token is EOS"
        case Status.FAILED:
            if not sample.remove_sample:
                yield "failed without remove_sample: it would be trained"
        case Status.PENDING:
            if response:
                yield f"pending with {len(response)} tokens"


def open_spans(sample: Sample) -> list[str]:
    """Names of the trace spans that were begun and not ended."""
    open_by_id: dict[str, str] = {}
    trace: dict[str, Any] = getattr(sample, "trace", None) or {}
    for event in trace.get("events", ()):
        if event["type"] == "span_start":
            open_by_id[event["span_id"]] = event["name"]
        elif event["type"] == "span_end":
            open_by_id.pop(event["span_id"], None)
    return list(open_by_id.values())


def _name(sample: Sample) -> str:
    return (
        f"sample {sample.index} ({sample.prompt!r}, {sample.status.value}, {sample.response_length} tokens)"
    )
