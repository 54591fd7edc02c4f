"""`show`: one sample, for programs and for people."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

import captures
from recorded import Writer, frame
from rollout_log.cli import _tokenizer
from rollout_log.cli._tokenizer import load_tokenizer, pieces
from rollout_log.view import SampleView


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer whose token ids are byte values."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tokenizer")
    alphabet = _bytes_to_unicode()
    made = Tokenizer(models.BPE(vocab={char: byte for byte, char in alphabet.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    return path


def _bytes_to_unicode():
    """How byte-level tokenizers write bytes as characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def test_json_is_the_view(run_log, call):
    result = call("show", run_log, "math-2", "--json")
    assert result.out.isascii()
    assert len(result.lines) == 1
    sample = msgspec.convert(result.json, SampleView)
    assert (sample.key, sample.run, sample.status, sample.step) == ("math-2", "today", "completed", 2)
    assert sample.prompt_token_ids == [1, 2, 3]
    assert sample.token_ids == [21, 22, 23, 24]
    assert sample.logprobs == [-0.5] * 4
    assert [(span.version, span.start, span.end) for span in sample.weight_versions] == [
        ("7", 0, 2),
        ("8", 2, 4),
    ]
    assert [(request.cause, request.base, request.ended) for request in sample.requests] == [
        ("first", 0, "aborted"),
        ("resume", 2, "finished"),
    ]
    assert sample.text is None


def test_json_has_null_for_a_missing_logprob(run_log, call):
    assert call("show", run_log, "chat-2", "--json").json["logprobs"] == [None]


def test_a_recorded_stream_of_an_engine(tmp_path, call):
    capture = captures.load("f1-abort-inference-v1")
    with Writer(tmp_path / "log") as writer:
        exchange = writer.samples.request(
            "k", path=capture.request["path"], body=json.dumps(capture.request["body"]).encode()
        )
        exchange.respond(capture.status, capture.headers)
        exchange.feed(capture.body)
        exchange.end("eof")
        writer.log.flush_sync()
    shown = call("show", tmp_path / "log", "k", "--json").json
    assert (shown["status"], shown["finish_reason"], len(shown["token_ids"])) == ("aborted", "abort", 20)
    text = call("show", tmp_path / "log", "k").out
    assert "✂ cut at token 20: request 0 ended aborted" in text


def test_people_see_requests_spans_and_cuts_without_colour(run_log, call):
    lines = call("show", run_log, "math-2").lines
    text = "\n".join(lines)
    assert lines[0].split() == ["sample", "math-2"]
    assert "\x1b" not in text
    first = lines.index("tokens 0 to 2: request 0, weights 7")
    assert lines[first : first + 5] == [
        "tokens 0 to 2: request 0, weights 7",
        "│ 21 22",
        "✂ cut at token 2: request 0 ended aborted",
        "tokens 2 to 4: request 1, weights 8",
        "│ 23 24",
    ]
    assert "finished: stop" in lines
    assert "│ 1 2 3" in lines


def test_a_request_that_reached_nobody_is_told_from_one_that_broke(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        detail = "ConnectError: All connection attempts failed"
        writer.request("k", how="reset", detail=detail, status=None)
    lines = call("show", tmp_path / "log", "k").lines
    assert next(line for line in lines if line.split()[:2] == ["0", "first"]).split()[3] == "unreachable"
    assert f"✂ cut at token 0: request 0 ended unreachable ({detail})" in lines


def test_a_retry_and_its_reason(run_log, call):
    lines = call("show", run_log, "math-3").lines
    rows = [line.split() for line in lines]
    assert any(row[:7] == ["0", "first", "0", "1", "200", "reset", "1"] for row in rows)
    assert any(row[:7] == ["1", "retry", "0", "1", "200", "finished", "2"] for row in rows)
    assert "peer went away" in "\n".join(lines)
    assert any(row == ["thrown", "away", "1", "token"] for row in rows)


def test_a_failed_sample_says_what_the_engine_said(run_log, call):
    assert (
        "✂ cut at token 0: request 0 ended http_error (overloaded)" in call("show", run_log, "chat-1").lines
    )


def test_an_open_sample_is_shown_as_far_as_it_is(run_log, call):
    lines = call("show", run_log, "chat-2").lines
    assert "│ 41" in lines
    assert "open: token 1 is the last so far" in lines


def test_weights_that_nobody_named(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        writer.request("k", [frame(5, finish="stop", version="default")], weight_version="default")
        writer.log.flush_sync()
    log = tmp_path / "log"
    assert "tokens 0 to 1: request 0, weights default (never set)" in call("show", log, "k").lines
    assert "; weights default (never set)" in call("replay", log, "k").out
    assert call("diff", log, "k", "k").out.count("default (never set)") == 2
    (span,) = call("show", log, "k", "--json").json["weight_versions"]
    assert span["version"] == "default", "for programs, what the engine said"


def test_problems_say_what_they_mean(run_log, call):
    lines = call("show", run_log, "chat-2").lines
    row, meaning = (line for line in lines if line.startswith("null_logprob"))
    assert "warning" in row
    assert "request 0, token 0" in row
    assert "importance ratios are undefined" in meaning


def test_text_of_a_tokenizer(tmp_path, tokenizer, call):
    euro = list("€".encode())
    with Writer(tmp_path / "log") as writer:
        opened = {"metadata": {"tokenizer": str(tokenizer)}}
        frames = [frame(72, 105), frame(euro[0]), frame(*euro[1:]), frame(10, 33, finish="stop")]
        writer.request("k", frames, prompt=list(b"Say hi"), opened=opened)
        writer.log.flush_sync()
    assert call("show", tmp_path / "log", "k", "--json").json["text"] == "Hi€\n!"
    lines = call("show", tmp_path / "log", "k").lines
    assert "│ Say hi" in lines
    at = lines.index("│ Hi€")
    assert lines[at + 1] == "│ !"
    given = call("show", tmp_path / "log", "k", "--tokenizer", tokenizer / "tokenizer.json", "--json")
    assert given.json["text"] == "Hi€\n!"


def test_a_tokenizer_that_is_not_there(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        writer.request("k", [frame(5, finish="stop")], opened={"metadata": {"tokenizer": "/no/\x1b[2Jsuch"}})
        writer.log.flush_sync()
    result = call("show", tmp_path / "log", "k")
    assert result.code == 0, "the log is read all the same"
    assert "│ 5" in result.lines
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("rollout-log: token ids instead of text: no tokenizer can be made of")
    assert "\x1b" not in result.err
    asked = call("show", tmp_path / "log", "k", "--tokenizer", tmp_path / "log" / "rollout-log.json")
    assert asked.code == 2, "what was asked for must be there"
    assert len(asked.err.splitlines()) == 1


def test_a_tokenizer_named_by_a_log_is_not_downloaded(monkeypatch):
    asked = {}

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name, **options):
            asked.update(options, name=name)
            raise OSError("not here")

    import transformers

    monkeypatch.setattr(transformers, "AutoTokenizer", AutoTokenizer)
    with pytest.raises(_tokenizer.TokenizerNotFound):
        load_tokenizer("someone/model")
    assert asked == {"name": "someone/model", "local_files_only": True}


@pytest.fixture
def hub(tmp_path, tokenizer):
    """A hub: `answers` is the status that it gives, None for none, 200 for a model with a tokenizer."""
    files = {
        "config.json": b"{}",
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "tokenizer.json": (tokenizer / "tokenizer.json").read_bytes(),
    }
    asked = []
    over = threading.Event()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            if server.answers is None:
                over.wait()
                return
            body = files.get(self.path.rpartition("/")[2])
            self.send_response(404 if server.answers == 200 and body is None else server.answers)
            if body is not None:
                self.send_header("etag", hashlib.sha1(body).hexdigest())
            else:
                self.send_header("x-error-code", "EntryNotFound")
            self.send_header("x-repo-commit", "0" * 40)
            self.send_header("content-length", str(len(body or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        def do_GET(self):
            self.do_HEAD()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.answers = 200
        server.asked = asked
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        server.environment = {name: os.environ[name] for name in os.environ if not name.startswith("HF_")} | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hub"),
        }
        yield server
        over.set()
        server.shutdown()


def _show(log, *args, environment):
    argv = [sys.executable, "-m", "rollout_log.cli", "show", str(log), "math-1", *args]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("answers", [None, 401, 503])
def test_a_hub_that_gives_nothing_is_asked_once(run_log, hub, answers):
    hub.answers = answers
    done = _show(run_log, "--tokenizer", "someone/model", environment=hub.environment)
    assert (done.returncode, done.stdout, len(hub.asked)) == (2, "", 1)
    assert done.stderr.startswith(
        "rollout-log: 'someone/model' is no file or directory here and no downloaded"
    )
    assert done.stderr.count("\n") == 1, "nothing of what the libraries say"


def test_a_hub_that_is_not_there(run_log, hub):
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        gone = hub.environment | {"HF_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}"}
        done = _show(run_log, "--tokenizer", "someone/model", environment=gone)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Connection refused; give a tokenizer.json or a model's directory" in done.stderr
    forbidden = hub.environment | {"HF_HUB_OFFLINE": "1"}
    done = _show(run_log, "--tokenizer", "someone/model", environment=forbidden)
    assert (done.returncode, done.stderr.count("\n"), hub.asked) == (2, 1, [])
    assert "HF_HUB_OFFLINE" in done.stderr


def test_a_tokenizer_is_downloaded_once(run_log, hub):
    for asked in (True, False):
        done = _show(run_log, "--tokenizer", "someone/model", environment=hub.environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert "│ \\x0b\\x0c" in done.stdout
        assert bool(hub.asked) == asked
        hub.asked.clear()


def test_pieces_join_to_the_whole(tokenizer):
    decode = load_tokenizer(str(tokenizer))
    ids = list("naïve 日本 👩 end".encode())
    assert pieces(decode, ids)[:4] == ["n", "a", "", "ï"]
    assert "".join(pieces(decode, ids)) == decode(ids) == "naïve 日本 👩 end"
    broken = [0xE2, 0x82, *b"ab", 0xFF, *[0x80] * 20, 10**12, -1, 65]
    assert "".join(pieces(decode, broken)) == decode(broken)
    assert pieces(decode, []) == []


def test_tokens_without_text_are_read_a_few_at_a_time():
    read = []

    def decode(token_ids):
        read.append(len(token_ids))
        return "a" * list(token_ids).count(500)

    assert pieces(decode, range(1000)) == ["a" if i == 500 else "" for i in range(1000)]
    assert max(read) <= 16


def test_several_choices(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        frames = [
            frame(1, 2, choice=0),
            frame(7, choice=1, finish="stop"),
            frame(3, choice=0, finish="length"),
        ]
        writer.request("k", frames, params={"n": 2})
        writer.log.flush_sync()
    log = tmp_path / "log"
    whole = call("show", log, "k", "--json").json
    assert (whole["choices"], whole["token_ids"], len(whole["requests"])) == (2, [], 1)
    second = call("show", log, "k#1", "--json").json
    assert (second["key"], second["token_ids"], second["status"]) == ("k#1", [7], "completed")
    lines = call("show", log, "k").lines
    assert [line.split() for line in lines if line.startswith("k#")] == [
        ["k#0", "truncated", "3", "length"],
        ["k#1", "completed", "1", "stop"],
    ]
    assert "│ 1 2 3" in call("show", log, "k#0").lines
    missing = call("show", log, "k#2")
    assert missing.code == 2
    assert missing.err == "rollout-log: sample 'k' has no choice 2; there are k#0, k#1\n"
    for name in ("k@3", "k@3#1"):
        assert call("show", log, name).err == f"rollout-log: no sample '{name}' in {log}; there is 'k@0'\n"


def test_a_child_has_a_name_of_its_own(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        first = writer.request("k", [frame(1)], how=None)
        writer.request("k", [frame(9, finish="stop")])
        first.end("cancelled")
        writer.log.flush_sync()
    child = call("show", tmp_path / "log", "k~2", "--json").json
    assert (child["key"], child["parent"], child["token_ids"]) == ("k~2", "k", [9])
    lines = call("show", tmp_path / "log", "k~2").lines
    assert ["parent", "k"] in [line.split() for line in lines]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_key_that_is_not_there_names_the_nearest(options, run_log, call):
    result = call("show", run_log, "math-9", *options)
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert "'math-1'" in result.err


def test_colours_on_a_terminal_follow_the_probability(monkeypatch, tmp_path, call):
    import sys

    with Writer(tmp_path / "log") as writer:
        frames = [
            frame(1, logprob=-0.01),
            frame(2, logprob=-0.5),
            frame(3, logprob=-9999.0),
            frame(4, logprob=None, finish="stop"),
        ]
        writer.request("k", frames)
        writer.log.flush_sync()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    out = call("show", tmp_path / "log", "k").out
    assert "\x1b[32m2 \x1b[0m" in out
    assert "\x1b[1;31m3 \x1b[0m" in out
    assert "\x1b[4;35m4" in out
    assert "no log-prob" in out, "the legend"


def test_without_colours_there_is_no_legend_of_them(monkeypatch, run_log, call, terminal):
    terminal(80)
    assert "probability" in call("show", run_log, "math-1").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "probability" not in call("show", run_log, "math-1").out


@pytest.mark.parametrize(
    ("path", "asked", "shown"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "be\nbrief"},
                    {"role": "user", "content": "hi\x1b[2J"},
                ]
            },
            ["system: be", "brief", r"user: hi\x1b[2J"],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "tool", "content": "7", "tool_call_id": "a"}, 5]},
            ["tool (a): 7", "5"],
        ),
        ("/v1/completions", {"prompt": "once upon"}, ["once upon"]),
        ("/generate", {"text": "once upon"}, ["once upon"]),
        ("/v1/chat/completions", {"messages": []}, []),
    ],
)
def test_a_prompt_in_words_is_shown_as_it_was_asked(path, asked, shown, tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        exchange = writer.samples.request("k", path=path, body=json.dumps(asked).encode())
        exchange.respond(200, [("content-type", "application/json")])
        exchange.end("eof")
    for lines in (
        call("show", tmp_path / "log", "k").lines,
        call("replay", tmp_path / "log", "k", "--at-event", 1).lines,
    ):
        start = lines.index("prompt, 0 tokens") + 1
        end = lines.index("", start)
        wanted = ["the client sent text and no tokens", *(f"│ {line}" for line in shown)] if shown else []
        assert lines[start:end] == wanted


def test_words_are_shown_beside_token_ids_that_no_tokenizer_reads(tmp_path, tokenizer, call):
    answer = frame(72, 105, finish="stop").replace(
        b'{"choices"', b'{"prompt_token_ids": [104, 105], "choices"'
    )
    with Writer(tmp_path / "log") as writer:
        asked = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
        path = "/v1/chat/completions"
        exchange = writer.samples.request("k", path=path, body=json.dumps(asked).encode())
        exchange.respond(200, [("content-type", "text/event-stream")])
        exchange.feed(answer)
        exchange.end("eof")
    lines = call("show", tmp_path / "log", "k").lines
    start = lines.index("prompt, 2 tokens")
    assert lines[start + 1 : start + 4] == ["│ 104 105", "what the client sent", "│ user: hi"]
    lines = call("show", tmp_path / "log", "k", "--tokenizer", tokenizer / "tokenizer.json").lines
    start = lines.index("prompt, 2 tokens")
    assert lines[start + 1 : start + 3] == ["│ hi", ""]
