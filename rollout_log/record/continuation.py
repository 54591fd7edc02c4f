"""When a retry may go on from the tokens it has, and with what request.

Pure. Going on is right only where prompt + kept tokens under the same parameters has the distribution that
one uninterrupted request has; every parameter must be on a list of those for which that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["may_continue", "request_from", "strange_field"]

_IDS = {"vllm": "token_ids", "sglang": "input_ids", "openai": "prompt"}
"""Where each dialect has the token ids."""
_MAX = {"vllm": "max_tokens", "sglang": "max_new_tokens", "openai": "max_tokens"}
_MIN = {"vllm": "min_tokens", "sglang": "min_new_tokens", "openai": "min_tokens"}

_MEMORYLESS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logprobs",
        "max_tokens",
        "max_new_tokens",
        "min_tokens",
        "min_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "no_stop_trim",
        "detokenize",
        "n",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "repetition_penalty",  # vLLM and SGLang count the prompt, so kept tokens weigh the same
        "stop",
        "logit_bias",
        "allowed_token_ids",
    }
)
"""Parameters whose effect depends on the tokens alone, not on which of them are prompt."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "seed": (None, -1),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "output_kind": (None,),
    "stream_interval": (None, 1),
}
"""Parameters that do not stand in the way at these values."""


_BESIDE: dict[str, frozenset[str]] = {
    "vllm": frozenset({"token_ids", "request_id", "priority", "features", "cache_salt", "output_mode"}),
    "sglang": frozenset(
        {"input_ids", "image_data", "rid", "return_logprob", "top_logprobs_num", "logprob_start_len",
         "return_routed_experts", "return_text_in_logprobs", "priority"}
    ),
}  # fmt: skip
"""Fields of a request beside its sampling parameters that a cut does not touch."""
_COMMON = frozenset({"model", "sampling_params", "stream", "stream_options"})


def strange_field(dialect: str, body: Mapping[str, Any]) -> str | None:
    """Return a field of a request of which it is not known that it survives a cut; None: there is none."""
    if dialect not in _BESIDE:
        return None  # all its parameters are at top level, and `may_continue` has seen them
    known = _BESIDE[dialect] | _COMMON
    return next(
        (name for name, value in body.items() if name not in known and value not in (None, False)), None
    )


def may_continue(sampling_params: Mapping[str, Any], *, seam: str | None = None) -> str | None:
    """Return None when going on equals never having stopped, else the reason why not.

    `seam`: the text of the kept tokens, where the caller can decode them; without it any stop string is a
    reason, since one may have begun before the cut.
    """
    for name, value in sampling_params.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                return f"{name}={value!r} does not survive a cut"
        elif name not in _MEMORYLESS and value is not None:
            return f"it is not known whether {name} survives a cut"
    if sampling_params.get("n") not in (None, 1):
        return "n is not 1"
    if not sampling_params.keys() & _MAX.values():
        return "without a limit of its own, the engine's default would count anew"
    stops = sampling_params.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        if seam is None:
            return "a stop string may span the cut"
        if seam.endswith("\ufffd"):
            return "a character was cut, which a stop string may have"
        if any(seam.endswith(stop[:length]) for length in range(1, len(stop) + 1)):
            return f"stop string {stop!r} may have begun before the cut"
    return None


def request_from(
    dialect: str, body: Mapping[str, Any], prompt: Sequence[int], kept: Sequence[int]
) -> dict[str, Any] | None:
    """Return the request that goes on after the `kept` tokens, None where nothing is left to generate.

    `body` is the request that began at the first of the `kept` tokens; it is not changed.
    """
    again = dict(body)
    again[_IDS[dialect]] = [*prompt, *kept]
    where = again
    if dialect != "openai":
        where = again["sampling_params"] = dict(body.get("sampling_params") or {})
    most, least = _MAX[dialect], _MIN[dialect]
    if where.get(most) is not None:
        where[most] = int(where[most]) - len(kept)
        if where[most] <= 0:
            return None
    if where.get(least):
        where[least] = max(int(where[least]) - len(kept), 0)
    return again
