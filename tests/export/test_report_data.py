"""What a report holds, read back from the page as its script reads it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from recorded import PATH, Writer, frame
from rollout_log.errors import LogDamaged
from rollout_log.events import Delta, Ended, Event, Opened, Requested
from rollout_log.export.report import Report, by_interest
from rollout_log.export.report.arrivals import follow
from rollout_log.export.report.page import pack
from rollout_log.export.report.vocabulary import Vocabulary
from rollout_log.log import LogReader
from rollout_log.sources import open_source
from rollout_log.view import view
from stored import store

TEXTS = {1: "a", 2: " b", 3: "\ufffd", 4: "\ufffd", 21: "x", 22: "</script>", 23: "y", 24: "z"}


def decode(token_ids) -> str:
    """A tokenizer of which 3 and 4 make one character together."""
    return "".join(TEXTS.get(i, "") for i in token_ids).replace("\ufffd\ufffd", "é")


def unpack(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(packed), -15))


def data(*ids: int) -> bytes:
    """What a frame of these tokens holds."""
    return frame(*ids).removeprefix(b"data: ").strip()


def request(number: int, *frames: bytes, base: int = 0, sent_unix_ns: int = 0) -> list[Event]:
    """A request whose connection is lost after its frames, a second apart."""
    asked = Requested(number, base, "first", "vllm", "POST", PATH, b"{}", sent_unix_ns=sent_unix_ns)
    deltas = [Delta(number, frame, 10**6 * i) for i, frame in enumerate(frames, 1)]
    return [asked, *deltas, Ended(number, "reset", None, 10**7)]


class Page:
    """A written report."""

    def __init__(self, path: Path) -> None:
        self.html = path.read_text()
        blocks = re.findall(r'<script type="text/plain" id="(\w+)">(.*?)</script>', self.html, re.DOTALL)
        self.blocks = dict(blocks)
        self.overview = unpack(self.blocks["overview"])
        self.details = [unpack(line) for line in self.blocks["details"].split()]
        self.lanes = {lane["name"]: lane for lane in self.overview["lanes"]}

    def response(self, name: str) -> dict[str, Any]:
        return self.details[self.lanes[name]["detail"]]["choices"][0]


@pytest.fixture
def report(tmp_path):
    """Writes the report of a log."""

    def write(log: Path, step: int | None = None, **options: Any) -> Page:
        with LogReader.open(log) as reader:
            made = Report(reader, step, **options)
            for entry in by_interest(reader.samples(step=step)):
                made.add(entry)
            made.write(tmp_path / "report.html")
        return Page(tmp_path / "report.html")

    return write


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A sample that went on in step 2, a retried one, and one that just finished."""
    path = tmp_path_factory.mktemp("report") / "log"
    with Writer(path, run="today") as writer:
        writer.request("fine", [frame(21, finish="stop", version="7")], step=1)
        aborted = [frame(21, 22, version="7"), frame(finish="abort", version="7")]
        writer.request("went-on", aborted, step=1, weight_version="7")
        writer.request("retried", [frame(31, 32)], step=1, how="reset", detail="peer went away")
        writer.request("retried", [frame(34, finish="length", logprob=None)], step=1, base=0)
        writer.request("went-on", [frame(23, 24, finish="stop", version="8")], step=2)
        writer.log.flush_sync()
    return path


def test_a_lane_has_the_requests_and_how_they_ended(log, report):
    page = report(log, 1)
    assert list(page.lanes) == ["fine", "went-on", "retried"]
    ended = {
        name: [(bar["cause"], bar["ended"], bar["step"]) for bar in lane["bars"]]
        for name, lane in page.lanes.items()
    }
    assert ended == {
        "fine": [("first", "finished", 1)],
        "went-on": [("first", "aborted", 1), ("resume", "finished", 2)],
        "retried": [("first", "reset", 1), ("retry", "finished", 1)],
    }
    assert page.lanes["retried"]["bars"][0]["detail"] == "peer went away"
    assert (page.lanes["retried"]["tokens"], page.lanes["retried"]["discarded"]) == (1, 2)
    assert page.lanes["went-on"]["step"] == 2
    assert [version for version, _ in page.overview["versions"]] == ["7", "8"]


def test_the_span_is_that_of_the_steps_own_requests(log, report):
    overview = report(log, 1).overview
    own = [bar for lane in overview["lanes"] for bar in lane["bars"] if bar["step"] == 1]
    assert overview["start"] == min(bar["sent"] for bar in own)
    assert overview["end"] == max(bar["end"] for bar in own)


def test_tokens_have_their_log_probs_origin_version_and_arrival(log, report):
    page = report(log, 1)
    found = page.response("went-on")
    assert found["ids"] == [21, 22, 23, 24]
    assert found["logprobs"] == [-0.5] * 4
    assert found["runs"] == [["generated", 0, 0, 2], ["generated", 1, 2, 4]]
    assert found["versions"] == [["7", 0, 2], ["8", 2, 4]]
    bars = page.lanes["went-on"]["bars"]
    for time, bar in zip(found["times"], [bars[0], bars[0], bars[1], bars[1]], strict=True):
        assert bar["sent"] <= time <= bar["end"]


def test_a_retry_leaves_only_its_own_tokens_and_arrivals(log, report):
    page = report(log, 1)
    found = page.response("retried")
    assert (found["ids"], found["logprobs"]) == ([34], [None])
    assert found["times"] == [page.lanes["retried"]["bars"][1]["first"]]
    # All that came is in the plot of speed, thrown away or not; log-probs are those of what is left.
    assert sum(page.overview["rate"]["tokens"]) == 8
    assert page.overview["logprobs"]["missing"] == 1
    assert sum(page.overview["logprobs"]["tokens"]) == 5


def test_a_prompt_is_kept_once(log, report):
    page = report(log, 1)
    assert len({lane["prompt"] for lane in page.lanes.values()}) == 1
    assert page.details[page.lanes["fine"]["prompt"]]["ids"] == [1, 2, 3]
    assert len(page.details) == 4


def test_a_prompt_in_words_is_that_of_the_first_request(tmp_path, report):
    def asked(number: int, text: str) -> Requested:
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        return Requested(number, 0, "first", "openai", "POST", "/v1/chat/completions", body)

    samples = [[Opened(key, run="r"), asked(0, "hi"), asked(1, "again")] for key in "ab"]
    page = report(store(tmp_path / "log", samples))
    assert page.lanes["a"]["prompt"] == page.lanes["b"]["prompt"]
    assert page.details[page.lanes["a"]["prompt"]] == {"ids": [], "joined": {}, "words": [["user", "hi"]]}


def test_beyond_its_limit_a_page_leaves_out_the_tokens_of_uneventful_samples(log, report):
    page = report(log, 1, limit=250)
    assert page.overview["left_out"] >= 1
    assert page.lanes["fine"]["detail"] is None
    assert page.lanes["went-on"]["detail"] is not None
    assert page.lanes["fine"]["tokens"] == 1


def test_a_sample_that_cannot_be_read_is_shown_as_that(log, report, monkeypatch):
    def damaged(reader, ref, start=0):
        if ref.key == "fine":
            raise LogDamaged("block 3 fails its checksum")
        return blocks(reader, ref, start)

    blocks = LogReader.blocks
    monkeypatch.setattr(LogReader, "blocks", damaged)
    page = report(log, 1)
    assert page.lanes["fine"]["unreadable"] == "block 3 fails its checksum"
    assert (page.lanes["fine"]["status"], page.lanes["fine"]["tokens"]) == ("completed", 1)
    assert page.response("went-on")["ids"] == [21, 22, 23, 24]


def test_nothing_but_the_pages_own_scripts_may_run(log, report):
    html = report(log, 1, decode=decode).html
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        parts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert rules[rule].split() == [f"'sha256-{found}'" for found in hashes]
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?:", html)


def test_what_comes_from_the_log_is_base64_alone(log, report):
    page = report(log, 1, decode=decode)
    assert page.overview["vocabulary"]["22"] == "</script>"
    for block in page.blocks.values():
        assert re.fullmatch(r"[A-Za-z0-9+/=\n]*", block)
    assert unpack(pack({"text": "</script>\u2028\ud800\0"})) == {"text": "</script>\u2028\ud800\0"}


def test_a_vocabulary_gives_each_token_its_text_within_a_text():
    def stripping(token_ids) -> str:  # as SentencePiece's do, at the start of a text
        return decode(token_ids).removeprefix(" ")

    vocabulary = Vocabulary(stripping)
    assert vocabulary.add([1, 2, 3, 4, 3]) == {2: "", 3: "", 4: "é\ufffd"}
    assert vocabulary.texts == {1: "a", 2: " b", 3: "\ufffd", 4: "\ufffd"}
    assert vocabulary.add([3, 1]) == {}


def test_watching_a_fold_does_not_change_it(root):
    with open_source(root / "fixtures" / "demo.jsonl.zst") as reader:
        for entry in reader.samples():
            followed = follow(reader, entry.ref)
            assert view(followed.rollout) == view(reader.rollout(entry.ref))
            (times,) = followed.times.values()
            assert len(times) == len(followed.rollout.choice().token_ids)
            assert times == sorted(times)


def test_a_new_life_has_the_tokens_of_the_old_one_without_their_arrivals(tmp_path, report):
    old = [Opened("a", run="r"), *request(0, data(5, 6), sent_unix_ns=10**18)]
    going_on = Opened("a", run="r", incarnation=1, continues=(0, 1))
    new = [going_on, *request(0, data(7), base=1, sent_unix_ns=2 * 10**18)]
    page = report(store(tmp_path / "log", [old, new]))
    assert list(page.lanes) == ["a@0", "a"]
    found = page.response("a")
    assert found["ids"] == [5, 7]
    assert found["runs"] == [["inherited", None, 0, 1], ["generated", 0, 1, 2]]
    assert [time is None for time in found["times"]] == [True, False]


def test_each_choice_of_several_has_its_own_tokens(tmp_path, report):
    with Writer(tmp_path / "log") as writer:
        both = [frame(1, 2), frame(3, choice=1, finish="stop"), frame(4, finish="length")]
        writer.request("two", both, params={"n": 2})
        writer.log.flush_sync()
    page = report(tmp_path / "log")
    choices = page.details[page.lanes["two"]["detail"]]["choices"]
    assert [(choice["index"], choice["ids"], choice["status"]) for choice in choices] == [
        (0, [1, 2, 4], "truncated"),
        (1, [3], "completed"),
    ]
    assert page.lanes["two"]["tokens"] == 4


def test_log_probs_are_counted_whatever_they_are(tmp_path, report) -> None:
    logprobs = [float("-inf"), -16.0, -15.99, -0.25, -0.24, 0.0, 0.5, float("inf"), float("nan")]
    with Writer(tmp_path / "log") as writer:
        frames = [frame(n, logprob=logprob) for n, logprob in enumerate(logprobs)]
        writer.request("k", [*frames, frame(finish="stop")])
    found = report(tmp_path / "log").overview["logprobs"]
    assert (found["less"], found["missing"]) == (2, 1)
    assert {place: count for place, count in enumerate(found["tokens"]) if count} == {0: 4, 1: 1, 63: 1}
