"""The token ids of a sample's prompt, made by the trainer's own code where it has some."""

from __future__ import annotations

from typing import Any

from rollout_log.trainer.host import Host, Unsupported

__all__ = ["has_media", "put_prompt"]


def has_media(sample: Any) -> bool:
    """Whether a sample's prompt is more than text."""
    inputs = getattr(sample, "multimodal_inputs", None) or {}
    return any(value is not None for value in inputs.values())


def put_prompt(host: Host, sample: Any, state: Any) -> None:
    """Give a sample its prompt's ids, and `multimodal_train_inputs` where the processor makes some."""
    processor = getattr(state, "processor", None)
    wants_inputs = processor is not None and has_media(sample) and sample.multimodal_train_inputs is None
    if sample.tokens and not wants_inputs:
        return
    ids = _prompt_ids(host, sample, getattr(state, "tokenizer", None), processor)
    sample.tokens = sample.tokens or ids


def _prompt_ids(host: Host, sample: Any, tokenizer: Any, processor: Any) -> list[int]:
    if tokenizer is None and not (processor is not None and has_media(sample)):
        raise Unsupported(
            f"sample {sample.index}, which has no tokens",
            "the trainer's state has no tokenizer to make them; is --hf-checkpoint set?",
        )
    if not isinstance(sample.prompt, str) and not has_media(sample):
        wanted = getattr(sample, "apply_chat_template_kwargs", None) or {}
        ids = tokenizer.apply_chat_template(
            sample.prompt, **{"add_generation_prompt": True, **wanted, "tokenize": True, "return_dict": False}
        )
        return [int(token) for token in ids]
    prepare = getattr(host.module(host.rollout), "_prepare_prompt_ids", None)
    if prepare is not None:
        return [int(token) for token in prepare(sample, tokenizer, processor)]
    if processor is not None and has_media(sample):
        build = getattr(host.module("utils.processing_utils"), "build_processor_kwargs", dict)
        output = processor(text=sample.prompt, **build(sample.multimodal_inputs))
        rest = {name: value for name, value in output.items() if name not in {"input_ids", "attention_mask"}}
        sample.multimodal_train_inputs = sample.multimodal_train_inputs or rest or None
        return [int(token) for token in output["input_ids"][0]]
    return [int(token) for token in tokenizer.encode(sample.prompt, add_special_tokens=False)]
