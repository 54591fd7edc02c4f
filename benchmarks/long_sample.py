"""What one long sample costs a trainer: `python -m benchmarks.long_sample`.

The plug-in generates one sample of 16,384 and one of 32,768 tokens, one token a chunk, recorded, against a
server in another process; the baseline drains the same stream and throws it away. Measured is CPU time of
the whole process, the log's thread included. A function that decodes everything again with every chunk
needs hundreds of times the baseline; what is wanted is 1.5 times.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import msgspec

from benchmarks.frames import BODY, PATH
from benchmarks.measure import Row, cpu
from benchmarks.server import engine
from rollout_log.trainer.generate import generate
from rollout_log.trainer.host import Prepared
from rollout_log.trainer.session import close_session
from rollout_log.vime.request import VIME

__all__ = ["rows"]

HOST = msgspec.structs.replace(VIME, version_path=None)
"""The server knows no versions."""
LENGTHS = (16_384, 32_768)
LIMIT = 1.5
RUNS = 5


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Counts:
    """Usage that nobody reads here."""

    def add(self, figures: dict[str, Any]) -> None:
        """Do nothing."""


@dataclass
class Sample:
    """The attributes that generation writes."""

    Status = Status
    prompt: str = ""
    tokens: list[int] = field(default_factory=lambda: list(BODY["token_ids"]))  # type: ignore[call-overload]
    response: str = ""
    response_length: int = 0
    rollout_log_probs: list[float] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False
    rollout_top_p_token_offsets: None = None
    prefix_cache_info: Counts = field(default_factory=Counts)
    spec_info: Counts = field(default_factory=Counts)


class Tokenizer:
    """As costly as a real one is cheap: one character a token."""

    eos_token_id = None

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return one character a token."""
        return "".join(map(chr, (token % 0xD800 for token in token_ids)))


def pretend_vime(client: httpx.AsyncClient) -> None:
    """Put the two modules there that the plug-in looks for."""
    state = SimpleNamespace(tokenizer=Tokenizer(), processor=None, aborted=False)
    contents: dict[str, dict[str, Any]] = {
        "vime": {"__path__": []},
        "vime.rollout": {"__path__": []},
        "vime.utils": {"__path__": []},
        "vime.rollout.vllm_rollout": {"GenerateState": lambda _: state},
        "vime.utils.http_utils": {"_http_client": client},
    }
    for name, attributes in contents.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(attributes)


async def drain(url: str) -> None:
    """The baseline."""
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("POST", url, json=BODY) as response,
    ):
        async for _ in response.aiter_raw():
            pass


async def sample(url: str, log: Path, tokens: int) -> None:
    """Generate one sample through the plug-in."""
    args = SimpleNamespace(rollout_log_dir=str(log), rollout_log_missing_logprobs="mark")

    async def prepare(*_: Any) -> Prepared:
        return Prepared(url=url, body=BODY)

    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        pretend_vime(client)
        made = Sample()
        await generate(HOST, prepare, args, made, {"max_new_tokens": 1 << 20})
    close_session()
    if made.status is not Status.TRUNCATED or made.response_length != tokens + 1:
        raise SystemExit(f"{made.status} after {made.response_length} tokens, of {tokens + 1}")


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure both lengths; quick: a short one, once."""
    with engine() as server, tempfile.TemporaryDirectory() as folder:
        for tokens in (1024,) if quick else LENGTHS:
            url = f"{server}{PATH}?tokens={tokens}&chunk=1"
            ratios = []
            for run in range(1 if quick else RUNS):
                log = Path(folder, f"{tokens}-{run}")
                baseline = cpu(lambda url=url: asyncio.run(drain(url)))  # type: ignore[misc]
                ours = cpu(lambda: asyncio.run(sample(url, log, tokens)))  # noqa: B023 - called at once
                ratios.append(ours / baseline)
            what = f"a sample of {tokens:,} tokens, one a chunk"
            yield Row("long sample", what, "draining", statistics.median(ratios), LIMIT)


def main() -> None:
    """Print the ratios."""
    for row in rows(quick="--quick" in sys.argv):
        print(f"{row.what}: {row.value:.2f} × {row.baseline} (wanted: at most {row.limit})")


if __name__ == "__main__":
    main()
