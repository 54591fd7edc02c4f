"""What to play for a match: the recorded response, or one made of recorded frames.

A request that falls on a recorded one gets its bytes as they were. Any other gets the recorded frames from
its position on; and where the recorded end has happened already, also those of the request that went on.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_log.replay.matching import Match
from rollout_log.replay.recording import Read, RecordedExchange
from rollout_log.replay.rendering import DONE, Rebase
from rollout_log.replay.script import Mark, Script, aborts, data_of, finishes, marks_of, new_tokens
from rollout_log.replay.versions import versions_of

__all__ = ["script_of"]


def script_of(match: Match, *, hold: bool, go: bool) -> Script:
    """Return what to play for a match.

    `hold`: wait where the recorded response was aborted, until the client does it. `go`: do not, and go
    on with what the next recorded request got.
    """
    exchange = match.exchange
    chain = _chain(match, go=go)
    if match.offset or len(chain) > 1:
        return _splice(match, chain, hold=hold)
    script = Script(
        exchange,
        exchange.status,
        exchange.headers,
        list(exchange.reads),
        marks_of(exchange),
        ending=exchange.ending,
        error=exchange.error,
        detail=exchange.detail,
        ended=exchange.ended,
        responded=exchange.responded,
        request_id=_request_id(exchange),
        numbers=(exchange.number,),
        streamed=exchange.whole is None,
        versions=versions_of(exchange),
    )
    if hold:
        script.hold = _hold_at(script)
    return script


def _chain(match: Match, *, go: bool) -> list[RecordedExchange]:
    """Return the requests whose frames follow each other: each went on where the one before was cut."""
    recording, chain = match.recording, [match.exchange]
    happened = match.again
    while go or happened:
        following = _goes_on(recording.exchanges, chain[-1])
        if following is None:
            break
        if len(chain) == 1 and match.offset > _kept(chain[0], following):
            break  # the client has tokens that the recorded one threw away
        chain.append(following)
        happened = following.number in recording.ended
    return chain


def _splice(match: Match, chain: list[RecordedExchange], *, hold: bool) -> Script:
    first, last = chain[0], chain[-1]
    script = Script(
        first,
        first.status,
        first.headers,
        [],
        ending=last.ending,
        error=last.error,
        detail=last.detail,
        responded=first.responded,
        ended=first.responded,
        request_id=_request_id(first),
        numbers=tuple(each.number for each in chain),
    )
    skip, carried = match.offset, None
    for each, following in zip(chain, [*chain[1:], None], strict=True):
        rename = script.request_id if each is not first else None
        rebase = Rebase(each, skip - len(script.versions), request_id=rename, carried=carried)
        limit = None if following is None else _kept(each, following)
        carried = _add(script, each, rebase, skip, limit) or carried
        skip = 0
    if hold and last.number not in match.recording.ended:
        script.hold = _hold_at(script)
    match.recording.served.update(script.numbers)
    return script


def _add(
    script: Script, exchange: RecordedExchange, rebase: Rebase, skip: int, limit: int | None
) -> bytes | None:
    """Add an exchange's frames after its first `skip` tokens; up to `limit` tokens, the stream then goes on.

    Returns the last frame that had tokens.
    """
    versions = versions_of(exchange)
    seen, before, last = 0, exchange.responded, None
    size = script.size
    for recorded, frame in zip(exchange.frames, exchange.decoded, strict=True):
        count, finish = new_tokens(frame)
        ends = bool(frame.choices) and finish is not None
        goes_on = limit is not None
        if limit is not None and (seen >= limit or not count):
            continue
        seen += count
        if skip and seen <= skip and (goes_on or not ends):
            before = recorded.time
            continue  # the client has it
        kept = min(count, seen - skip)
        script.versions += versions[seen - kept : seen]
        data = DONE
        if not frame.done:
            drop = count - kept
            data = rebase.frame(recorded.data, drop, versions=script.versions, unfinished=ends and goes_on)
        clock = script.ended + max(recorded.time - before, 0)
        before, script.ended = recorded.time, clock
        size += len(data)
        finished = (finishes(frame) and not goes_on) or bool(script.marks and script.marks[-1].finished)
        script.pieces.append(Read(clock, data))
        script.marks.append(Mark(size, len(script.versions), finished, aborted=aborts(frame) and not goes_on))
        last = data_of(data) if count else last
    return last


def _goes_on(exchanges: Sequence[RecordedExchange], exchange: RecordedExchange) -> RecordedExchange | None:
    """Return the request that went on from an exchange's tokens, where they were cut short."""
    start = exchange.info.token_ids
    if start is None or exchange.info.n != 1 or exchange.whole is not None:
        return None
    if any(finishes(frame) for frame in exchange.decoded):
        return None
    for each in exchanges:
        ids = each.info.token_ids
        if each.number <= exchange.number or ids is None or each.requested.cause == "turn":
            continue
        more = ids[len(start) :]
        fits = ids[: len(start)] == start and exchange.generated[: len(more)] == more
        whole_frames = len(more) in {0, *(mark.tokens for mark in marks_of(exchange))}
        return each if fits and whole_frames and each.status == 200 and each.whole is None else None
    return None


def _kept(exchange: RecordedExchange, following: RecordedExchange) -> int:
    """Return how many of an exchange's tokens the request after it kept."""
    return len(following.info.token_ids or ()) - len(exchange.info.token_ids or ())


def _hold_at(script: Script) -> int | None:
    """Where the recorded response stood when it was aborted; None when it was not."""
    if not script.streamed:
        return 0 if any(aborts(frame) for frame in script.exchange.decoded) else None
    start = 0
    for mark in script.marks:
        if mark.aborted:
            return start
        start = mark.end
    return None


def _request_id(exchange: RecordedExchange) -> str | None:
    return next((frame.request_id for frame in exchange.decoded if frame.request_id), None)
