"""What else comes with tokens: versions, sampling sets, routing, speculation, usage, images."""

from __future__ import annotations

import base64
import io
import math
import struct
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from plugin.scripted import HOLD, QUESTION, Scripted, delta, generate, new_sample, result, usage
from rollout_log import slime, vime
from rollout_log.errors import RolloutLogError
from rollout_log.trainer.session import close_session, session_for
from trainer.conftest import Rig
from trainer.sample_double import Sample, Status
from trainer.trainer_double import NEW_VIME, OLD_VIME, SLIME, TrainerDouble
from trainer.truth import Tokenizer, expected_tokens, prompt_text

PROMPT = Tokenizer().encode(QUESTION)
TOKENS = expected_tokens(PROMPT, 0, 10)
SETS = [[n, n + 100] if n % 3 else [n] for n in range(10)]
IDS = [each for part in SETS for each in part]
OFFSETS = [0, *np.cumsum([len(part) for part in SETS]).tolist()]


def vime_trainer(rig: Rig, **settings: Any) -> TrainerDouble:
    return rig(NEW_VIME, generate=vime.generate, questions=[QUESTION], **settings)[1]


def slime_trainer(rig: Rig, **settings: Any) -> TrainerDouble:
    return rig(SLIME, generate=slime.generate, questions=[QUESTION], **settings)[1]


# Weight versions


@pytest.mark.parametrize("mask_offpolicy", [False, True], ids=["", "masked"])
def test_a_cancel_keeps_the_version_known_at_dispatch_where_only_the_last_frame_tells_it(
    rig: Rig, mask_offpolicy: bool
) -> None:
    questions = [
        prompt_text(0, tokens=30),
        prompt_text(1, tokens=25),
        prompt_text(2, hold=20),
        prompt_text(3, tokens=50, hold=31),
    ]
    engine, trainer = rig(
        engine={"versions": "spans"},
        generate="rollout_log.vime.generate",
        questions=questions,
        over_sampling=4,
        mask_offpolicy=mask_offpolicy,
        abort_when=lambda: engine.holding == 4 or bool(trainer.delivered),
    )
    trainer.step(0)
    engine.set_version("1")
    trainer.args.over_sampling_batch_size = 2
    second = trainer.step(1)
    assert {tuple(sample.weight_versions) for sample in second} == {("0", "1")}
    assert trainer.problems == []
    assert [call[1] for call in engine.calls if call[1] == "/weight_info"] == ["/weight_info"] * 2


def test_an_engine_that_does_not_say_its_version_is_asked_once(rig: Rig) -> None:
    trainer = vime_trainer(rig)
    engine = Scripted([delta(TOKENS[:4], 0), HOLD])
    for _ in range(2):
        sample = new_sample()
        generate(trainer, vime.generate, engine, sample, cancel=True)
        engine.holding = 0
        assert (sample.status, sample.response_length) == (Status.ABORTED, 4)
        assert sample.weight_versions == []
    assert [path for path, _ in engine.others] == ["/weight_info"]


# Top-p sets


@pytest.mark.parametrize("restart", [False, True], ids=["", "after a failed try"])
def test_top_p_sets_survive_an_abort(rig: Rig, restart: bool) -> None:
    trainer = vime_trainer(rig)
    cut = [delta(TOKENS[:4], 0, sampling_mask=SETS[:4]), HOLD]
    failed = [[delta(TOKENS[:3], 0, sampling_mask=SETS[:3]), {"error": {"message": "x", "code": 500}}]]
    sample = new_sample()
    engine = Scripted(*(failed if restart else []), cut)
    generate(trainer, vime.generate, engine, sample, cancel=True)
    assert (sample.status, sample.response_length) == (Status.ABORTED, 4)
    assert list(sample.rollout_top_p_token_ids) == IDS[: OFFSETS[4]]
    assert list(sample.rollout_top_p_token_offsets) == OFFSETS[:5]
    rest = [delta(TOKENS[4:], 4, "stop", sampling_mask=SETS[4:]), "[DONE]"]
    generate(trainer, vime.generate, Scripted(rest), sample)
    assert sample.status is Status.COMPLETED
    assert np.asarray(sample.rollout_top_p_token_ids).dtype == np.int32
    assert np.asarray(sample.rollout_top_p_token_offsets).dtype == np.int32
    assert sample.rollout_top_p_token_ids.tolist() == IDS
    assert sample.rollout_top_p_token_offsets.tolist() == OFFSETS


def int32(values: list[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode()


@pytest.mark.parametrize("encode", [list, int32], ids=["lists", "base64"])
@pytest.mark.parametrize("names", ["top_p_token", "top_p_kept_token"])
def test_top_p_sets_of_sglang_are_cumulative(
    rig: Rig, encode: Callable[[list[int]], Any], names: str
) -> None:
    trainer = slime_trainer(rig)

    def frame(count: int, finish: str | None = None, first: int = 0) -> dict[str, Any]:
        offsets = [place - OFFSETS[first] for place in OFFSETS[first : count + 1]]
        sets = {
            f"{names}_ids": encode(IDS[OFFSETS[first] : OFFSETS[count]]),
            f"{names}_offsets": encode(offsets),
        }
        return result(TOKENS[first:count], finish, **sets)

    sample = new_sample()
    generate(trainer, slime.generate, Scripted([frame(2), frame(5), HOLD]), sample, cancel=True)
    assert sample.rollout_top_p_token_offsets.tolist() == OFFSETS[:6]
    generate(trainer, slime.generate, Scripted([frame(8, first=5), frame(10, "stop", first=5)]), sample)
    assert sample.rollout_top_p_token_ids.tolist() == IDS
    assert sample.rollout_top_p_token_offsets.tolist() == OFFSETS
    assert sample.tokens == PROMPT + TOKENS


# Routed experts


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def routes(rows: int) -> Any:
    return np.arange(rows * 4, dtype=np.int32).reshape(rows, 2, 2)


def test_routed_experts_of_an_aborted_and_of_a_finished_request(rig: Rig) -> None:
    trainer = vime_trainer(rig, use_rollout_routing_replay=True)
    rows = len(PROMPT) + 9
    sample = new_sample()
    aborted = [delta(TOKENS[:4], 0, "abort", routed_experts=npy(routes(len(PROMPT) + 3))), "[DONE]"]
    generate(trainer, vime.generate, Scripted(aborted), sample)
    assert sample.status is Status.ABORTED
    assert np.array_equal(sample.rollout_routed_experts, routes(len(PROMPT) + 3))
    rest = [delta(TOKENS[4:], 4, "stop", routed_experts=npy(routes(rows))), "[DONE]"]
    generate(trainer, vime.generate, Scripted(rest), sample)
    assert sample.status is Status.COMPLETED
    assert np.asarray(sample.rollout_routed_experts).dtype == np.int32
    assert np.array_equal(sample.rollout_routed_experts, routes(rows))


def test_routing_of_an_earlier_call_is_not_taken_for_that_of_a_cut_one(rig: Rig) -> None:
    trainer = vime_trainer(rig, use_rollout_routing_replay=True, rollout_log_no_terminal="abort")
    sample = new_sample()
    aborted = [delta(TOKENS[:4], 0, "abort", routed_experts=npy(routes(len(PROMPT) + 3))), "[DONE]"]
    generate(trainer, vime.generate, Scripted(aborted), sample)
    (live,) = session_for(trainer.args).samples.all()
    assert live.rollout.choice().routed_experts is None, "the sample has it, and the memory it takes"
    generate(trainer, vime.generate, Scripted([delta(TOKENS[4:6], 4), "[DONE]"]), sample)
    assert (sample.status, sample.response_length) == (Status.ABORTED, 6)


def test_sglang_may_send_the_routing_from_a_row_on(rig: Rig) -> None:
    trainer = slime_trainer(rig, use_rollout_routing_replay=True)
    rows, first = len(PROMPT) + 9, len(PROMPT) + 3
    sample = new_sample()
    raw = base64.b64encode(routes(first).tobytes()).decode()
    engine = Scripted([result(TOKENS[:4], "abort", routed_experts=raw)])
    generate(trainer, slime.generate, engine, sample)
    assert engine.bodies[0]["return_routed_experts"] is True
    rest = base64.b64encode(routes(rows)[first:].tobytes()).decode()
    meta = {"routed_experts": rest, "routed_experts_start_len": first}
    generate(trainer, slime.generate, Scripted([result(TOKENS[4:], "stop", **meta)]), sample)
    assert sample.status is Status.COMPLETED
    assert np.array_equal(sample.rollout_routed_experts, routes(rows))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "no routed experts came"),
        (npy(routes(3)), "12 elements"),
        (npy(np.array([None])), "allow_pickle"),
        (npy(np.array(["a"])), "of type <U1"),
        (base64.b64encode(b"\x93NUMPY\x01\x00\x03\x00(((").decode(), "cannot be read"),
    ],
    ids=["none", "of another length", "an object", "no integers", "no header"],
)
def test_a_finished_sample_without_its_routing_is_not_trained(
    rig: Rig, sent: str | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = vime_trainer(rig, use_rollout_routing_replay=True)
    sample = new_sample()
    engine = Scripted([delta(TOKENS, 0, "stop", routed_experts=sent), "[DONE]"])
    generate(trainer, vime.generate, engine, sample)
    assert (sample.status, sample.remove_sample) == (Status.FAILED, True)
    assert said in caplog.text
    assert "--use-rollout-routing-replay" in caplog.text


# Speculative decoding and usage


def test_figures_that_are_no_numbers_are_left_out(rig: Rig) -> None:
    trainer = vime_trainer(rig, vllm_speculative_config="{}")
    odd = usage(12, 10, metrics={"speculative_decoding": {"num_draft_tokens": "8", "num_spec_steps": 3}})
    odd["usage"] |= {"prompt_tokens": [12], "prompt_tokens_details": {"cached_tokens": "4"}}
    sample = new_sample()
    generate(trainer, vime.generate, Scripted([delta(TOKENS, 0, "stop"), odd, "[DONE]"]), sample)
    assert sample.status is Status.COMPLETED
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (0, 0)
    assert (sample.spec_info.spec_draft_token_num, sample.spec_info.spec_verify_ct) == (0, 3)


@pytest.mark.parametrize(
    "metrics",
    [
        {
            "request_spec_decode_stats": {
                "num_accepted_tokens": 6,
                "num_draft_tokens": 8,
                "num_verify_steps": 3,
            }
        },
        {
            "metrics": {
                "speculative_decoding": {
                    "num_accepted_draft_tokens": 6,
                    "num_draft_tokens": 8,
                    "num_spec_steps": 3,
                }
            }
        },
    ],
    ids=["older", "newer"],
)
def test_speculation_and_usage_add_up_over_requests(rig: Rig, metrics: dict[str, Any]) -> None:
    trainer = vime_trainer(rig, vllm_speculative_config='{"method": "ngram"}')
    sample = new_sample()
    first = [delta(TOKENS[:4], 0, "abort"), usage(20, 4, **metrics), "[DONE]"]
    rest = [delta(TOKENS[4:], 4, "stop"), usage(24, 6, **metrics), "[DONE]"]
    generate(trainer, vime.generate, Scripted(first), sample)
    generate(trainer, vime.generate, Scripted(rest), sample)
    assert sample.spec_info == Sample.SpecInfo(12, 16, 6, 10)
    assert sample.prefix_cache_info == Sample.PrefixCacheInfo(8, 44)


def test_speculation_of_sglang(rig: Rig) -> None:
    trainer = slime_trainer(rig, sglang_speculative_algorithm="EAGLE")
    sample = new_sample()
    figures = {"spec_accept_token_num": 6, "spec_draft_token_num": 8, "spec_verify_ct": 3}
    generate(trainer, slime.generate, Scripted([result(TOKENS, "stop", **figures), "[DONE]"]), sample)
    assert sample.spec_info == Sample.SpecInfo(6, 8, 3, 10)
    assert sample.prefix_cache_info == Sample.PrefixCacheInfo(3, len(PROMPT))


def test_without_speculation_its_figures_are_left_alone(rig: Rig) -> None:
    trainer = vime_trainer(rig)
    sample = new_sample()
    metrics = {"request_spec_decode_stats": {"num_accepted_tokens": 6}}
    generate(trainer, vime.generate, Scripted([delta(TOKENS, 0, "stop"), usage(20, 10, **metrics)]), sample)
    assert sample.spec_info == Sample.SpecInfo()


# Images


def add_helpers(trainer: TrainerDouble, *, old: bool = False) -> list[str]:
    """What vime has to render prompts; returns what was primed."""
    primed: list[str] = []
    processing = trainer.modules["vime.utils.processing_utils"]
    rollout = trainer.modules["vime.rollout.vllm_rollout"]

    def build_multimodal_messages(prompt: str, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        urls = [processing.encode_image_for_rollout_engine(image) for image in inputs["images"]]
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [{"role": "user", "content": [{"type": "text", "text": prompt}, *images]}]

    def align(body: dict[str, Any], tokens: list[int]) -> None:
        for place in body["features"]["mm_placeholders"]["image"]:
            needle = body["token_ids"][place["offset"] :][: place["length"]]
            starts = range(len(tokens) - len(needle) + 1)
            found = next((at for at in starts if tokens[at : at + len(needle)] == needle), None)
            if found is None:
                raise ValueError("placeholder not found")
            place["offset"] = found

    async def prime_encoder(args: Any, messages: list[dict[str, Any]]) -> None:
        primed.extend(part["image_url"]["url"] for part in messages[0]["content"][1:])

    if not old:
        processing.build_multimodal_messages = build_multimodal_messages
    rollout._mm_render_response_to_generate_body = lambda rendered, model: {"model": model, **rendered}
    rollout._align_mm_feature_placeholders_to_tokens = align
    rollout.prime_encoder = prime_encoder
    return primed


def processor(text: str, images: list[str]) -> dict[str, Any]:
    ids = [7, *[2] * 4 * len(images), *Tokenizer().encode(text)]
    return {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "pixel_values": [0.5]}


@pytest.mark.parametrize("old", [False, True], ids=["newer", "older"])
def test_a_prompt_with_an_image_is_rendered_then_generated(rig: Rig, old: bool) -> None:
    layout = OLD_VIME if old else NEW_VIME
    engine, trainer = rig(
        layout,
        engine={"versions": "field"},
        generate=vime.generate,
        questions=[QUESTION],
        vllm_model_encoder_endpoints={"default": ("m", ["http://encoder"])},
        router_policy="consistent_hash",
    )
    primed = add_helpers(trainer, old=old)
    trainer.get_state().processor = processor
    sample = new_sample(multimodal_inputs={"images": ["cat"]})
    trainer.run(vime.generate(trainer.args, sample, trainer.sampling_params))
    assert sample.status is Status.COMPLETED
    assert sample.multimodal_train_inputs == {"pixel_values": [0.5]}
    assert sample.tokens[:5] == [7, 2, 2, 2, 2]
    assert primed == ["data:image/png;base64,cat"]
    body = engine.served[0].body
    assert body["token_ids"] == sample.tokens[: len(sample.tokens) - sample.response_length]
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 4}]}
    assert body["sampling_params"]["logprobs"] == 1
    assert engine.served[0].headers["x-session-id"] == sample.session_id


def test_a_rendering_that_does_not_fit_drops_the_sample(rig: Rig) -> None:
    _, trainer = rig(engine={"versions": "field"}, generate=vime.generate, questions=[QUESTION])
    add_helpers(trainer)
    sample = new_sample(multimodal_inputs={"images": ["cat"]}, tokens=PROMPT, multimodal_train_inputs={})
    trainer.run(vime.generate(trainer.args, sample, trainer.sampling_params))
    assert (sample.status, sample.remove_sample) == (Status.FAILED, True)


def test_slime_sends_text_with_images_and_ids_to_go_on(rig: Rig) -> None:
    trainer = slime_trainer(rig)
    trainer.get_state().processor = processor
    sample = new_sample(multimodal_inputs={"images": ["cat"]})
    broken = [result(TOKENS[:2]), {"error": {"message": "x", "code": 500}}]
    engine = Scripted(broken, [result(TOKENS[:4]), HOLD])
    generate(trainer, slime.generate, engine, sample, cancel=True)
    assert (sample.status, sample.response_length) == (Status.ABORTED, 4)
    assert [set(body) & {"text", "input_ids"} for body in engine.bodies] == [{"text"}, {"text"}]
    assert engine.bodies[0]["image_data"] == ["data:image/png;base64,cat"]
    again = Scripted([result(TOKENS[4:], "stop")])
    generate(trainer, slime.generate, again, sample)
    assert again.bodies[0]["input_ids"] == sample.tokens[:-6]
    assert sample.status is Status.COMPLETED
    assert sample.metadata["rollout_log"]["key"] == f"t0-{sample.session_id[:12]}"


# Score centering


def centering_trainer(rig: Rig, **settings: Any) -> TrainerDouble:
    """With the module that newer vime has."""
    trainer = vime_trainer(rig, use_score_centering=True, **settings)

    def score_centering_request(args: Any, params: dict[str, Any]) -> dict[str, Any]:
        params.setdefault("temperature", 1.0)
        if params.setdefault("top_p", args.rollout_top_p) != args.rollout_top_p:
            raise ValueError("Score centering requires the configured rollout top_p.")
        return {}

    module = ModuleType("vime.utils.score_centering")
    module.score_centering_request = score_centering_request
    sys.modules[module.__name__] = module  # the rig takes it away
    return trainer


def heads_of(tokens: list[int], at: int, finish: str | None = None) -> dict[str, Any]:
    """A frame with the three likeliest of each token: the sampled one is the least of four."""
    frame = delta(tokens, at, finish)
    for place, entry in enumerate(frame["choices"][0]["logprobs"]["content"], at):
        likely = [{"token": f"token_id:{place + n}", "logprob": -float(n)} for n in (3, 1, 2)]
        entry["top_logprobs"] = [{"token_id": tokens[place - at], "logprob": entry["logprob"]}, *likely]
    return frame


def test_score_centering_takes_the_likeliest_of_each_token(rig: Rig) -> None:
    trainer = centering_trainer(rig, score_centering_top_k=2)
    sample = new_sample()
    broken = [heads_of(TOKENS[:2], 0), {"error": {"message": "x", "code": 500}}]
    engine = Scripted(broken, [heads_of(TOKENS[:4], 0), HOLD])
    generate(trainer, vime.generate, engine, sample, cancel=True)
    assert engine.bodies[0]["sampling_params"]["logprobs"] == 3
    assert (sample.status, sample.response_length) == (Status.ABORTED, 4)
    assert sample.rollout_topk_token_ids.shape == sample.rollout_topk_log_probs.shape == (4, 2)
    generate(trainer, vime.generate, Scripted([heads_of(TOKENS[4:], 4, "stop"), "[DONE]"]), sample)
    assert sample.status is Status.COMPLETED
    assert sample.rollout_topk_token_ids.dtype == np.int32
    assert sample.rollout_topk_log_probs.dtype == np.float32
    expected = [head(place) for place in range(10)]
    assert sample.rollout_topk_token_ids.tolist() == [[i for i, _ in each] for each in expected]
    assert sample.rollout_topk_log_probs.tolist() == [
        [float(np.float32(x)) for _, x in each] for each in expected
    ]
    sample._validate_response_metadata_lengths()


def head(place: int) -> list[tuple[int, float]]:
    candidates = {place + n: -float(n) for n in (1, 2, 3)}
    candidates[TOKENS[place]] = delta(TOKENS)["choices"][0]["logprobs"]["content"][place]["logprob"]
    return sorted(candidates.items(), key=lambda item: -item[1])[:2]


def test_score_centering_below_top_p_1_takes_the_whole_set(rig: Rig) -> None:
    trainer = centering_trainer(rig, rollout_top_p=0.9)
    sets = [[token, token + 1] for token in TOKENS]
    logprobs = [[-0.5, -float(n + 1)] for n in range(10)]
    more = [
        {"sampling_mask": sets[a:b], "sampling_mask_logprobs": logprobs[a:b]} for a, b in ((0, 4), (4, 10))
    ]
    sample = new_sample()
    cut = [delta(TOKENS[:4], 0, **more[0]), HOLD]
    generate(trainer, vime.generate, Scripted(cut), sample, cancel=True, top_p=0.9)
    rest = [delta(TOKENS[4:], 4, "stop", **more[1]), "[DONE]"]
    generate(trainer, vime.generate, Scripted(rest), sample, top_p=0.9)
    assert sample.status is Status.COMPLETED
    assert sample.rollout_top_p_token_ids.tolist() == [each for part in sets for each in part]
    assert sample.rollout_top_p_log_probs.tolist() == [each for part in logprobs for each in part]
    assert sample.rollout_top_p_token_offsets.tolist() == list(range(0, 21, 2))
    assert sample.rollout_log_probs == [-0.5] * 10


@pytest.mark.parametrize("named", [False, True], ids=["none", "of tokens told as text"])
def test_without_its_rows_a_sample_is_not_trained(rig: Rig, named: bool) -> None:
    trainer = centering_trainer(rig, score_centering_top_k=2)
    sample = new_sample()
    frame = delta(TOKENS, 0, "stop")
    for entry in frame["choices"][0]["logprobs"]["content"] if named else ():
        entry["top_logprobs"] = [{"token": text, "logprob": -1.0} for text in ("word", "17", "x:5")]
    generate(trainer, vime.generate, Scripted([frame, "[DONE]"]), sample)
    assert (sample.status, sample.remove_sample) == (Status.FAILED, True)


def test_parameters_that_it_cannot_have_are_refused(rig: Rig) -> None:
    trainer = centering_trainer(rig, score_centering_top_k=2)
    with pytest.raises(RolloutLogError, match="configured rollout top_p"):
        generate(trainer, vime.generate, Scripted([]), new_sample(), top_p=0.5)


# Prompts


def test_a_prompt_of_messages_is_put_through_the_chat_template(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def apply_chat_template(conversation: Any, return_dict: bool = True, **wanted: Any) -> Any:
        """As of transformers 5, which gives a dict unless told otherwise."""
        asked.append({"conversation": conversation, **wanted})
        return {"input_ids": [1, 2]} if return_dict else [1, 2]

    trainer = vime_trainer(rig)
    monkeypatch.setattr(trainer.tokenizer, "apply_chat_template", apply_chat_template, raising=False)
    messages = [{"role": "user", "content": "two"}]
    sample = new_sample(prompt=messages, apply_chat_template_kwargs={"enable_thinking": False})
    engine = Scripted([delta(TOKENS, 0, "stop"), "[DONE]"])
    generate(trainer, vime.generate, engine, sample)
    assert (engine.bodies[0]["token_ids"], sample.tokens) == ([1, 2], [1, 2, *TOKENS])
    (given,) = asked
    assert given == {
        "conversation": messages,
        "add_generation_prompt": True,
        "enable_thinking": False,
        "tokenize": True,
    }


# What a tokenizer cannot take


@pytest.mark.parametrize("cancel", [False, True], ids=["", "cancelled"])
def test_tokens_that_have_no_text_cost_their_sample_and_no_more(
    rig: Rig, cancel: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = vime_trainer(rig)

    def decode(token_ids: list[int], **_: Any) -> str:
        raise IndexError("piece id is out of range.")

    monkeypatch.setattr(trainer.tokenizer, "decode", decode)
    sample = new_sample()
    frames = [delta(TOKENS[:4], 0), HOLD] if cancel else [delta(TOKENS, 0), "[DONE]"]
    engine = Scripted(frames, [delta(TOKENS, 0, "stop"), "[DONE]"])
    generate(trainer, vime.generate, engine, sample, cancel=cancel, stop=["x"])
    if cancel:
        assert (sample.status, sample.response_length) == (Status.ABORTED, 4)
        return
    assert (sample.status, sample.remove_sample) == (Status.FAILED, True)
    assert "piece id is out of range" in caplog.text


# What cannot be served says so


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_score_centering": True}, "--use-score-centering"),  # this vime has no such module
        ({"vllm_router_ip": None}, "vllm_router_ip"),
    ],
)
def test_what_cannot_be_served_names_the_flag(rig: Rig, settings: dict[str, Any], said: str) -> None:
    trainer = vime_trainer(rig, **settings)
    with pytest.raises(RolloutLogError, match=said):
        generate(trainer, vime.generate, Scripted([]), new_sample())


def test_images_without_the_helpers_to_render_them_are_refused(rig: Rig) -> None:
    trainer = vime_trainer(rig)
    sample = new_sample(tokens=PROMPT, multimodal_inputs={"images": ["cat"]}, multimodal_train_inputs={})
    with pytest.raises(RolloutLogError, match="_mm_render_response_to_generate_body"):
        generate(trainer, vime.generate, Scripted([]), sample)


# Log-probs


@pytest.mark.parametrize("missing", ["refuse", "mark"])
def test_missing_log_probs_are_marked_or_refused(rig: Rig, missing: str) -> None:
    trainer = vime_trainer(rig, rollout_log_missing_logprobs=missing)
    frame = delta(TOKENS, 0, "stop")
    frame["choices"][0]["logprobs"]["content"][3]["logprob"] = None
    sample = new_sample()
    generate(trainer, vime.generate, Scripted([frame, "[DONE]"]), sample)
    assert [at for at, each in enumerate(sample.rollout_log_probs) if math.isnan(each)] == [3]
    if missing == "mark":
        assert sample.status is Status.COMPLETED
        assert sample.loss_mask == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    else:
        assert (sample.status, sample.remove_sample) == (Status.FAILED, True)


# An end without a terminal


@pytest.mark.parametrize(
    ("no_terminal", "status"),
    [
        ("auto", Status.COMPLETED),
        ("stop", Status.COMPLETED),
        ("fail", Status.FAILED),
        ("abort", Status.ABORTED),
    ],
)
def test_an_end_without_a_finish_is_what_the_setting_says(
    rig: Rig, no_terminal: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plugin.test_loop import quick

    quick(monkeypatch)
    trainer = vime_trainer(rig, rollout_log_no_terminal=no_terminal, rollout_log_on_retry="continue")
    engine = Scripted([delta(TOKENS[:4])], [delta(TOKENS[4:], 4, "stop")])
    sample = new_sample()
    generate(trainer, vime.generate, engine, sample)
    assert sample.status is status
    assert sample.response_length == (10 if no_terminal == "auto" else 4)
    assert len(engine.bodies) == (2 if no_terminal == "auto" else 1)
    assert sample.remove_sample == (no_terminal == "fail")


@pytest.mark.parametrize("no_terminal", ["auto", "fail", "abort"])
@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"max_new_tokens": 4}, Status.TRUNCATED),
        ({"stop_token_ids": [TOKENS[3]]}, Status.COMPLETED),
        ({"stop": [Tokenizer().decode(TOKENS[:4])[-1:]]}, Status.COMPLETED),
    ],
    ids=["budget", "stop token", "stop string"],
)
def test_evidence_goes_before_the_setting(
    rig: Rig, no_terminal: str, params: dict[str, Any], status: Status
) -> None:
    trainer = vime_trainer(rig, rollout_log_no_terminal=no_terminal)
    engine = Scripted([delta(TOKENS[:4])])
    sample = new_sample()
    generate(trainer, vime.generate, engine, sample, **params)
    assert (sample.status, sample.response_length) == (status, 4)
    assert len(engine.bodies) == 1


def test_an_abort_frame_may_be_missing(rig: Rig) -> None:
    """Some engines drop the closing frame of an aborted stream."""
    trainer = vime_trainer(rig)
    sample = new_sample()

    def aborting(body: dict[str, Any]) -> list[Any]:
        trainer.get_state().aborted = True
        return [delta(TOKENS[:4]), "[DONE]"]

    generate(trainer, vime.generate, Scripted(aborting), sample)
    assert (sample.status, sample.response_length, sample.remove_sample) == (Status.ABORTED, 4, False)


# Failure


def test_a_failure_is_dropped_or_raised(rig: Rig) -> None:
    refusal = (400, {"error": {"message": "too long", "code": 400}})
    trainer = vime_trainer(rig)
    sample = new_sample()
    generate(trainer, vime.generate, Scripted(refusal), sample)
    assert (sample.status, sample.remove_sample, sample.response) == (Status.FAILED, True, "")
    close_session()
    trainer.args.rollout_log_on_failure = "raise"
    with pytest.raises(RolloutLogError, match="too long"):
        generate(trainer, vime.generate, Scripted(refusal), new_sample())
