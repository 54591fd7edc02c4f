"""The generate function of both plug-ins: one sample, streamed, recorded, and robust.

Whatever happens on the way (retries, a stalled engine, an abort by flag, by engine or by cancel), the sample
that was passed is in order at every await, and says at the end what it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from rollout_log.errors import RecordingFailed, RolloutLogError
from rollout_log.fold import Rollout
from rollout_log.record.call import Call
from rollout_log.record.errors import GenerationFailed
from rollout_log.record.recorder import Recorder
from rollout_log.record.watchdog import take_back_cancel
from rollout_log.trainer.host import Host, Prepared, Unsupported
from rollout_log.trainer.opening import opened_for
from rollout_log.trainer.recovery import Life
from rollout_log.trainer.resuming import older_life
from rollout_log.trainer.sample import SampleWriter
from rollout_log.trainer.session import Session, session_for
from rollout_log.trainer.tally import METADATA, facts_of, tally

__all__ = ["Prepare", "generate"]

_ABORT_GRACE_S = 2.0
"""How long a stream may wait for the engine's own abort frame, which has versions and routing."""

Prepare = Callable[[Any, Any, dict[str, Any], Any, int | None], Coroutine[Any, Any, Prepared]]
"""`await prepare(args, sample, sampling_params, state, budget) -> Prepared`."""


async def generate(
    host: Host,
    prepare: Prepare,
    args: Any,
    sample: Any,
    sampling_params: dict[str, Any],
    *,
    evaluation: bool = False,
) -> Any:
    """Generate for a sample of `host`, whose request `prepare` makes; returns the sample."""
    state = host.state(args)  # first: without its trainer nothing is opened
    session = session_for(args)
    status = type(sample).Status
    life = older_life(host, session, sample, sampling_params, state, evaluation=evaluation)
    budget = sampling_params.get("max_new_tokens")
    if budget is not None:
        budget -= sample.response_length
        if budget <= 0:
            sample.status = status.TRUNCATED
            return sample
    generation = _Generation(
        host,
        session,
        state,
        args=args,
        sample=sample,
        sampling_params=sampling_params,
        evaluation=evaluation,
        life=life,
    )
    return await generation.run(prepare(args, sample, sampling_params, state, budget))


class _Generation:
    """One call."""

    def __init__(
        self,
        host: Host,
        session: Session,
        state: Any,
        *,
        args: Any,
        sample: Any,
        sampling_params: dict[str, Any],
        evaluation: bool,
        life: Life | None,
    ) -> None:
        self.host = host
        self.incomplete: GenerationFailed | None = None
        self.life = life
        self.session = session
        self.state = state
        self.args = args
        self.sample = sample
        self.evaluation = evaluation
        self.step = host.step()
        session.enter(self.step)
        self.masks_offpolicy = bool(
            getattr(args, "partial_rollout", False)
            and getattr(args, "mask_offpolicy_in_partial_rollout", False)
        )
        self.writer = SampleWriter(sample, masks_offpolicy=self.masks_offpolicy)
        self.tokenizer = getattr(state, "tokenizer", None)
        self.sampling_params = sampling_params
        self.skips_special = sampling_params.get("skip_special_tokens")
        self.key = session.key_of(sample, evaluation=evaluation)
        known = facts_of(sample)
        self.before = known if known.get("key") == self.key else {}
        live = session.samples.get(self.key)
        self.discarded = live.rollout.discarded if live is not None else 0
        self.client = host.client(args)
        self.recorder: Recorder = session.recorder(self.client)
        self._set_metadata({**self.before, "key": self.key})

    async def run(self, preparing: Coroutine[Any, Any, Prepared]) -> Any:
        sample = self.sample
        failure: Exception | None = None
        try:
            with self.host.traced(sample, {"key": self.key}) as answered:
                prepared = await preparing
                await self.session.weights.ask(self.host, self.client, prepared.url, self.step)
                try:
                    rollout = await self.recorder.run(self._call(prepared))
                finally:
                    self._take_over()
                answered(self._meta(rollout))
        except asyncio.CancelledError:
            if not self._is_finished():
                sample.status = type(sample).Status.ABORTED
                self._finish()
                self._count()
                raise
            take_back_cancel()
        except (Unsupported, RecordingFailed):  # the log fails only where `strict` says so
            raise
        except (RolloutLogError, httpx.HTTPError) as error:
            failure = error
        self._finish()
        try:
            return self._judge() if failure is None else self._fail(failure)
        finally:
            self._count()

    def _call(self, prepared: Prepared) -> Call:
        session, tokenizer = self.session, self.tokenizer
        self.writer.heads = prepared.heads
        opened = opened_for(
            self.args,
            self.sample,
            key=self.key,
            run=session.run,
            step=self.step,
            evaluation=self.evaluation,
            start=self.writer.start,
            sampling_params=self.sampling_params,
        )
        if self.life is not None:
            opened = msgspec.structs.replace(opened, run=self.life.entry.summary.run)
            path, model = urlsplit(prepared.url).path, prepared.body.get("model")
            session.samples.adopt(opened, self.life.rollout, self.life.length, path=path, model=model)
        eos = getattr(tokenizer, "eos_token_id", None)
        return Call(
            key=self.key,
            url=prepared.url,
            body=prepared.body,
            headers=prepared.headers,
            base=self.writer.start,
            opened=opened,
            weight_version=lambda: session.weights.known(self.step),
            masks_offpolicy=self.masks_offpolicy,
            eos_token_ids=() if eos is None else (eos,),
            decode=self._decode if tokenizer is not None else None,
            should_stop=lambda: bool(getattr(self.state, "aborted", False)),
            stop_grace_s=_ABORT_GRACE_S,
            on_chunk=prepared.heads.feed if prepared.heads is not None else None,
            on_read=self.writer.update,
        )

    # What comes of it

    @property
    def rollout(self) -> Rollout | None:
        return self.writer.rollout

    def _take_over(self) -> None:
        """What was folded but not yet read into the sample, when an exception came between."""
        if self.rollout is not None:
            self.writer.update(self.rollout)

    def _is_finished(self) -> bool:
        return self.rollout is not None and self.rollout.status in ("completed", "truncated")

    def _finish(self) -> None:
        """Complete the sample; the same whether it finished, was aborted or failed."""
        speculative = bool(getattr(self.args, self.host.speculative, None))
        rollout = self.rollout
        try:
            self.writer.finish(self._decode if self.tokenizer is not None else None, speculative=speculative)
            if rollout is not None and self.writer.heads is not None:
                self.writer.heads.finish(self.sample, self.writer.start)
        except Exception as error:  # a tokenizer, or an array, that cannot take what an engine sent
            message = f"sample {self.key!r} cannot be completed: {error}"
            self.incomplete = GenerationFailed(message, Rollout() if rollout is None else rollout)
        if rollout is None:
            return
        if (told := rollout.choice().told) and told[-1].end > self.writer.start:
            self.session.weights.tell(self.step, told[-1].version)

    def _count(self) -> None:
        rollout, sample = self.rollout, self.sample
        if rollout is None:
            return
        counters = tally(
            self.before,
            rollout,
            self.writer.requests,
            start=self.writer.start,
            discarded=self.discarded,
            aborted=sample.status is type(sample).Status.ABORTED,
        )
        self._set_metadata({"key": rollout.opened.key if rollout.opened else self.key, **counters})

    def _judge(self) -> Any:
        """Set the status of a sample whose generation came to an end of its own."""
        sample, rollout = self.sample, self.rollout
        status = type(sample).Status
        if rollout is None:
            sample.status = status.ABORTED
            return sample
        names = {"completed": status.COMPLETED, "truncated": status.TRUNCATED}
        sample.status = names.get(rollout.status, status.ABORTED)
        no_terminal = not self._is_finished() and rollout.ended_of(rollout.requests[-1]) == "no_terminal"
        aborted = bool(getattr(self.state, "aborted", False))
        if no_terminal and not aborted and self.session.settings.no_terminal == "fail":
            return self._fail(GenerationFailed(f"sample {self.key!r}: no finish reason came", rollout))
        failure = self.incomplete or self._take_routed_experts(rollout)
        if failure is not None:
            return self._fail(failure)
        return self._check_logprobs(rollout)

    def _take_routed_experts(self, rollout: Rollout) -> Exception | None:
        """Take the routing over; a finished sample without it cannot be trained where routing is replayed."""
        args, sample = self.args, self.sample
        if not getattr(args, "use_rollout_routing_replay", False):
            return None
        try:
            taken = self.writer.take_routed_experts(args.num_layers, args.moe_router_topk)
        except (RolloutLogError, ValueError) as error:
            return GenerationFailed(f"sample {self.key!r}: {error} (--use-rollout-routing-replay)", rollout)
        if taken or sample.status is type(sample).Status.ABORTED:
            return None
        message = (
            f"sample {self.key!r}: no routed experts came with its finish, and --use-rollout-routing-replay "
            "needs them; does the engine return them?"
        )
        return GenerationFailed(message, rollout)

    def _check_logprobs(self, rollout: Rollout) -> Any:
        missing = self.writer.missing_logprobs()
        if not missing:
            return self.sample
        if self.session.settings.missing_logprobs == "mark":
            for position in missing:
                self.sample.loss_mask[position] = 0
            return self.sample
        message = (
            f"sample {self.key!r}: {len(missing)} of its tokens came without log-probs, the first at "
            f"{missing[0]}; with rollout_log_missing_logprobs=mark they would be masked"
        )
        return self._fail(GenerationFailed(message, rollout))

    def _fail(self, error: Exception) -> Any:
        """A sample that cannot be saved: out of the training data, or out of the run."""
        sample = self.sample
        if bool(getattr(self.state, "aborted", False)):
            sample.status = type(sample).Status.ABORTED
            return sample
        if self.session.settings.on_failure == "raise":
            raise error
        self.session.say_once(
            "a sample failed and will not be trained on (rollout_log_on_failure=drop): %s. More failures are "
            "counted, not printed.",
            error,
        )
        sample.status = type(sample).Status.FAILED
        sample.remove_sample = True
        return sample

    def _set_metadata(self, facts: dict[str, Any]) -> None:
        # A new dict: siblings may share the old one.
        self.sample.metadata = {**(getattr(self.sample, "metadata", None) or {}), METADATA: facts}

    def _decode(self, token_ids: list[int]) -> str:
        skips = True if self.skips_special is None else bool(self.skips_special)
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skips))  # type: ignore[union-attr]

    def _meta(self, rollout: Rollout) -> dict[str, Any]:
        """An answer as the trainer's own trace helper reads it."""
        request, choice = rollout.requests[-1], rollout.choice()
        usage = request.usage or {}
        return {
            "request_id": request.request_id,
            "id": request.request_id,
            "choices": [{"finish_reason": choice.finish_reason, "index": 0}],
            "finish_reason": {"type": choice.finish_reason},
            "usage": usage,
            "metrics": request.metrics,
            **{name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage},
        }
