"""Hypothesis strategies for events, also those that no recorder would write."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from rollout_log.events import (
    Body,
    Closed,
    Delta,
    Ended,
    Event,
    Marked,
    Observed,
    Opened,
    Reads,
    Requested,
    Responded,
    Tail,
    Unknown,
    Unrecorded,
)
from rollout_log.undated import EPOCH_NS

naturals = st.integers(0, 2**40)
text = st.text(max_size=20)
json_bytes = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
).flatmap(
    lambda value: st.sampled_from(
        [
            json.dumps(value).encode(),
            json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace"),
            json.dumps({"choices": [value]}, separators=(",", ":")).encode(),
        ]
    )
)
payload = (
    json_bytes | st.binary(max_size=30) | st.sampled_from([b"[DONE]", b'{"$base64":"YQ=="}', b'{"a":1e5}'])
)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | text | st.binary(max_size=5)
loose = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(text | st.just("$msgpack") | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)
metadata = st.dictionaries(text | st.just("$base64"), loose, max_size=3)
stamps = st.just(0) | st.integers(EPOCH_NS, EPOCH_NS + 2**40)
headers = st.lists(st.tuples(text, text), max_size=2)

opened = st.builds(
    Opened,
    key=text,
    run=text,
    incarnation=naturals,
    parent=st.none() | text,
    prompt_token_ids=st.lists(naturals, max_size=4),
    continues=st.none() | st.tuples(naturals, naturals),
    opened_unix_ns=stamps,
    step=st.none() | st.integers(-5, 5),
    evaluation=st.booleans(),
    metadata=metadata,
)
"""A sample's first event."""

later: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        Requested,
        number=naturals,
        base=naturals,
        cause=st.sampled_from(["first", "retry", "resume", "turn"]),
        dialect=text,
        method=text,
        path=text,
        body=payload,
        ids_at=st.integers(-1, 9),
        ids_separator=st.sampled_from([",", ", "]),
        headers=headers,
        weight_version=st.none() | text,
        sent_unix_ns=stamps,
        step=st.none() | naturals,
    ),
    st.builds(Responded, number=naturals, status=naturals, headers=headers, time=naturals, http_version=text),
    st.builds(Delta, number=naturals, data=payload, time=naturals, raw=st.none() | payload),
    st.builds(Body, number=naturals, data=payload, time=naturals),
    st.builds(Tail, number=naturals, data=payload),
    st.builds(Reads, number=naturals, sizes=st.lists(naturals), times=st.lists(naturals)),
    st.builds(Observed, base=naturals, token_ids=st.lists(naturals)),
    st.builds(Unrecorded, base=naturals, token_ids=st.lists(naturals)),
    st.builds(
        Ended,
        number=naturals,
        how=st.sampled_from(["eof", "cancelled", "reset", "timeout"]),
        detail=st.none() | text,
        time=naturals,
    ),
    st.builds(
        Closed,
        status=st.none() | text,
        reward=loose,
        step=st.none() | naturals,
        sample=metadata,
        closed_unix_ns=stamps,
    ),
    st.builds(Marked, name=text, fields=metadata, marked_unix_ns=stamps),
    st.builds(Unknown, kind=st.integers(13, 99), fields=st.lists(loose, max_size=3)),
)
"""Any other event of a sample."""

anything = opened | later
