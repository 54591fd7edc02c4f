"""What all dialects share for reading frames that lie as columns: one is decoded, the others are like it."""

from __future__ import annotations

from rollout_log.engines.frame import AlikeFrames, Tokens

__all__ = ["read_tokens"]


def read_tokens(
    frames: AlikeFrames, first: Tokens, token_ids: str, logprobs: str, *, single: tuple[str, ...]
) -> Tokens | None:
    """Return what frames say of which the first says `first`; None where that cannot be told.

    `token_ids` and `logprobs` are the paths of what `Tokens` has of each token. `single`: those of numbers
    that must be the same in all frames.
    """
    if any(len(set(frames.numbers(path) or ())) > 1 for path in single):
        return None
    ids = frames.numbers(token_ids)
    values: list[float] | None = None
    if first.logprobs is not None:
        found = frames.numbers(logprobs)
        if not found or frames.counts(logprobs) != frames.counts(token_ids):
            return None
        values = [float(value) for value in found] if isinstance(found[0], int) else found  # type: ignore[assignment]
    if not ids or min(ids) < 0:
        return None
    tokens = Tokens(first.index, ids, values, first.weight_version, first.request_id)  # type: ignore[arg-type]
    return tokens if _beginning(tokens, len(first.token_ids)) == repr(first) else None


def _beginning(tokens: Tokens, count: int) -> str:
    """Print the first tokens: integers and floats, 0.0 and -0.0 are told apart."""
    logprobs = None if tokens.logprobs is None else tokens.logprobs[:count]
    return repr(
        Tokens(tokens.index, tokens.token_ids[:count], logprobs, tokens.weight_version, tokens.request_id)
    )
