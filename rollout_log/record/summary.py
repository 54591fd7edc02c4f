"""What a sample's line in a listing says, taken from its fold."""

from __future__ import annotations

import time
from collections import Counter

from rollout_log.fold import Rollout
from rollout_log.log.summary import Summary

__all__ = ["summarize"]


def summarize(rollout: Rollout) -> Summary:
    """Return the summary record of a sample as it stands."""
    opened, closed, request = rollout.opened, rollout.closed, rollout.request
    problems = rollout.problems
    choice = rollout.choice_or_first()
    steps = [request.step for request in rollout.requests if request.step is not None]
    retries: Counter[str] = Counter(
        before.ended or "superseded"
        for before, after in zip(rollout.requests, rollout.requests[1:], strict=False)
        if after.cause == "retry"
    )
    return Summary(
        key=opened.key if opened else "",
        run=opened.run if opened else "",
        incarnation=opened.incarnation if opened else 0,
        parent=opened.parent if opened else None,
        status=rollout.status,
        step=rollout.step,
        evaluation=rollout.evaluation,
        group_index=opened.group_index if opened else None,
        index=opened.index if opened else None,
        tokens=sum(len(choice.token_ids) for choice in rollout.choices.values()),
        requests=len(rollout.requests),
        events=rollout.events,
        opened_unix_ns=opened.opened_unix_ns if opened else 0,
        updated_unix_ns=time.time_ns(),
        problems=dict(Counter(problem.code for problem in problems)),
        errors=sum(problem.severity == "error" for problem in problems),
        retries=dict(retries),
        resumes=sum(request.cause == "resume" for request in rollout.requests),
        discarded=rollout.discarded,
        versions=[span.version for span in choice.weight_versions(rollout.dispatched)],
        finish_reason=choice.finish_reason,
        trainer_status=closed.status if closed else None,
        prompt_tokens=len(rollout.prompt_token_ids),
        resumed_from=steps[0] if request and len(set(steps)) > 1 else None,
        bytes=sum(request.bytes for request in rollout.requests),
    )
