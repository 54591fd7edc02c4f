"""Parquet: a row a sample, list columns for what there is per token; of several choices each is a row.

What has no fixed shape is JSON text: `reward` (a number is in `reward_number` as well), `usage` and
`stop_reason`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rollout_log.ascii_json import to_json
from rollout_log.errors import RolloutLogError
from rollout_log.export.samples import Options, Sample, views, whole
from rollout_log.extras import missing
from rollout_log.view import SampleView

__all__ = ["row", "write"]

ROWS_AT_ONCE = 512
"""A row group: what is held in memory."""


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write the table. Raises RolloutLogError where pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise RolloutLogError(missing("a Parquet file", "parquet", error)) from error
    schema = _schema(pa)
    rows = (row(view) for sample in samples for view in views(sample, options.decode))
    with (
        whole(path) as draft,
        draft.open("wb") as file,  # which may be a pipe
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while group := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def row(view: SampleView) -> dict[str, Any]:
    """Return a sample as a row."""
    found: dict[str, Any] = _clean(msgspec.to_builtins(view))
    reward = view.reward
    number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
    found["reward_number"] = float(reward) if number else None
    for name in ("reward", "usage", "stop_reason"):
        found[name] = None if found[name] is None else to_json(getattr(view, name))
    return found


def _clean(value: Any) -> Any:
    """Make all text storable: a lone surrogate, which engines do send, becomes an escape."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        return [_clean(item) for item in value]
    return value


def _schema(pa: Any) -> Any:
    text, number, ids = pa.string(), pa.int64(), pa.list_(pa.int64())
    request = {
        "number": number,
        "base": number,
        "cause": text,
        "http_status": number,
        "ended": text,
        "detail": text,
        "tokens": number,
        "deltas": number,
        "tail_bytes": number,
    }
    problem = {"code": text, "severity": text, "request": number, "position": number, "message": text}
    span = {"version": text, "start": number, "end": number}

    def structs(fields: dict[str, Any]) -> Any:
        return pa.list_(pa.struct(list(fields.items())))

    columns = {
        "key": text,
        "incarnation": number,
        "run": text,
        "parent": text,
        "status": text,
        "trainer_status": text,
        "prompt_token_ids": ids,
        "token_ids": ids,
        "logprobs": pa.list_(pa.float64()),
        "loss_mask": pa.list_(pa.int8()),
        "finish_reason": text,
        "stop_reason": text,
        "text": text,
        "usage": text,
        "weight_versions": structs(span),
        "requests": structs(request),
        "problems": structs(problem),
        "step": number,
        "evaluation": pa.bool_(),
        "group_index": number,
        "index": number,
        "reward": text,
        "reward_number": pa.float64(),
        "events": number,
        "choices": number,
    }
    return pa.schema(list(columns.items()))
