"""What is large and can be had again is kept as length and hash."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from rollout_log.engines import dialect_named
from rollout_log.events import Body, Delta, Ended, Requested, restore_body
from rollout_log.record.elision import LARGE, elide

EXPERTS = base64.b64encode(bytes(range(256)) * 40).decode()
MASK = [list(range(1000)), list(range(5000, 6000))]


def frame(**more: object) -> bytes:
    choice = {
        "index": 0,
        "token_ids": [7],
        "finish_reason": None,
        "logprobs": {"content": [{"logprob": -0.5}]},
        **more,
    }
    return json.dumps({"choices": [choice]}).encode()


def test_small_frames_are_the_same_objects():
    events = [Delta(0, frame(routed_experts="abcd")), Ended(0, "eof")]
    assert elide(events) is events


def test_routed_experts_become_a_note_and_the_tokens_stay():
    data = frame(routed_experts=EXPERTS)
    (elided,) = elide([Delta(0, data, 5)])
    choice = json.loads(elided.data)["choices"][0]
    assert choice["routed_experts"] is None
    text = json.dumps(EXPERTS).encode()
    assert choice["routed_experts_elided"] == {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    assert len(elided.data) < 400
    found = dialect_named("vllm").decode_frame(elided.data, {}).choices[0]
    assert (found.token_ids, found.logprobs, found.routed_experts) == ([7], [-0.5], None)


@pytest.mark.parametrize(
    "keep", [("routed_experts", "sampling_mask"), ("sampling_mask",), ("routed_experts",), ()]
)
def test_what_is_to_be_kept_is_kept(keep):
    data = frame(routed_experts=EXPERTS, sampling_mask=MASK)
    (elided,) = elide([Delta(0, data)], keep)
    choice = json.loads(elided.data)["choices"][0]
    assert choice["routed_experts"] == (EXPERTS if "routed_experts" in keep else None)
    assert choice["sampling_mask"] == (MASK if "sampling_mask" in keep else None)
    assert (elided.data == data) == (len(keep) == 2)


def test_unusual_framing_and_bodies_are_cut_as_well():
    data = frame(routed_experts=EXPERTS)
    raw = b": ping\n\ndata:" + data + b"\r\n\r\n"
    delta, body = elide([Delta(0, data, 1, raw), Body(0, data, 2)])
    assert delta.raw == b": ping\n\ndata:" + delta.data + b"\r\n\r\n"
    assert body.data == delta.data
    assert (delta.time, body.time) == (1, 2)


@pytest.mark.parametrize("ids_first", [True, False])
def test_images_of_a_request_are_cut_and_its_ids_still_find_their_place(ids_first):
    image = base64.b64encode(b"\x89PNG" * 2000).decode()
    parts = ['"token_ids":[]', f'"image":"data:image/png;base64,{image}"']
    body = ("{" + ",".join(parts if ids_first else parts[::-1]) + "}").encode()
    requested = Requested(0, 0, "first", "vllm", "POST", "/x", body, body.index(b"[]") + 1)
    (elided,) = elide([requested])
    assert len(elided.body) < 200
    shown = json.loads(restore_body(elided, [1, 2]))
    assert shown["token_ids"] == [1, 2]
    assert shown["image"].startswith(f"data:image/png;base64,elided:{len(image)}:")
    assert elide([requested], ["images"])[0].body == body


def test_a_long_frame_with_nothing_to_cut_is_left_alone():
    data = frame(text="x" * 2 * LARGE)
    event = Delta(0, data)
    assert elide([event])[0] is event
