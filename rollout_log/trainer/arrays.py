"""Arrays as trainers want them: torch tensors where torch is there, else numpy, else lists."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from rollout_log.errors import RolloutLogError

__all__ = ["int32", "routed_experts", "rows_of"]


def int32(values: Sequence[int]) -> Any:
    """Return a one-dimensional int32 tensor."""
    try:
        import torch
    except ImportError:
        pass
    else:
        return torch.tensor(values, dtype=torch.int32)
    try:
        import numpy as np
    except ImportError:
        return list(values)
    return np.asarray(values, dtype=np.int32)


def rows_of(values: Sequence[Any], width: int | None, kind: str) -> Any:
    """Return a numpy array of shape (rows, width), or (values,) where there is no width. Needs numpy."""
    import numpy as np

    return np.asarray(values, dtype=kind).reshape((-1,) if width is None else (len(values), width))


def routed_experts(
    encoded: str, rows: int, layers: int, top_k: int, *, before: Any = None, start: int = 0
) -> Any:
    """Decode an engine's routing of `rows` tokens, shape (rows, layers, top_k), int32.

    `encoded` is base64 of a .npy (vLLM) or of bare int32 (SGLang), from row `start` on; the rows before that
    are those of `before`. Raises `RolloutLogError` when it is neither, or the elements do not fit. Needs
    numpy, which every trainer has.
    """
    import numpy as np

    try:
        array = _integers(base64.b64decode(encoded))
    except Exception as error:  # of a broken header, numpy raises whatever Python's tokenizer does
        raise RolloutLogError(f"routed experts cannot be read: {error}") from error
    wanted = (max(rows - start, 0), layers, top_k)
    if array.size != wanted[0] * layers * top_k:
        raise RolloutLogError(f"routed experts have {array.size} elements, {wanted} are needed")
    array = array.reshape(wanted).astype(np.int32)
    if start:
        known = np.asarray([] if before is None else before, dtype=np.int32)
        if len(known) < start:
            raise RolloutLogError(f"routed experts begin at row {start}, the sample has {len(known)}")
        array = np.concatenate([known[:start], array])
    try:
        import torch
    except ImportError:
        return array
    return torch.from_numpy(array)


def _integers(data: bytes) -> Any:
    import numpy as np

    if data[:6] != b"\x93NUMPY":
        return np.frombuffer(data, dtype=np.int32)
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if array.dtype.kind not in "iu":
        raise ValueError(f"they are of type {array.dtype}")
    return array
