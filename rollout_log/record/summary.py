"""What a sample's line in a listing says, taken from its fold."""

from __future__ import annotations

import time

from rollout_log.fold import Rollout
from rollout_log.log.summary import Summary
from rollout_log.problems import PROBLEMS

__all__ = ["summarize"]


def summarize(rollout: Rollout) -> Summary:
    """Return the summary record of a sample as it stands; it costs what the latest request brought."""
    opened, closed, request, history = rollout.opened, rollout.closed, rollout.request, rollout.history
    problems = rollout.count_problems()
    choice = rollout.choice_or_first()
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
        problems=problems,
        errors=sum(count for code, count in problems.items() if PROBLEMS[code].severity == "error"),
        retries=history.retries.copy(),
        resumes=history.resumes,
        discarded=rollout.discarded,
        versions=choice.versions(rollout.dispatched),
        finish_reason=choice.finish_reason,
        trainer_status=closed.status if closed else None,
        prompt_tokens=len(rollout.prompt_token_ids),
        resumed_from=history.first_step if history.steps_differ else None,
        spans=[(step, *span) for step, span in history.spans.items()] if history.steps_differ else [],
        bytes=history.bytes + (request.bytes if request is not None else 0),
    )
