"""The pytest plugin, in suites of its own: modes, files, misses, reports, network, workers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from rollout_log.fixture import FixtureReader
from rollout_log.http_server import serve
from rollout_log.testing.stand_in import _ServerThread

pytest_plugins = ["pytester"]

MODULE = """
import httpx, pytest
PATH = "/inference/v1/generate"

def body(*ids, **params):
    return {"token_ids": list(ids), "sampling_params": {"max_tokens": 2, **params}, "stream": True}
"""
DIRECT = MODULE + "\ndef test_direct(rollout_log):\n    with rollout_log.sync_client as client:\n"
ASK = '        assert client.post(PATH, json=body(1, 2)).text.count("data: ") == 3\n'


class Engine:
    """Streams two tokens for any prompt, other ones for each request."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.refuses: bytes | None = None

    async def __call__(self, request, responder) -> None:
        if self.refuses is not None:
            await responder.answer(404, self.refuses, [("content-type", "application/json")])
            return
        ids = json.loads(request.body)["token_ids"]
        self.asked.append(ids)
        await responder.start(200, [("content-type", "text/event-stream")])
        first = 10 * len(self.asked)
        for token, finish in ((first, None), (first + 1, "length")):
            choice = {"index": 0, "token_ids": [token], "finish_reason": finish}
            responder.send(
                b"data: %b\n\n" % json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
            )
        responder.send(b"data: [DONE]\n\n")
        await responder.finish()


@pytest.fixture
def engine():
    engine = Engine()

    @contextlib.asynccontextmanager
    async def run():
        async with serve(engine) as server:
            yield server

    thread = _ServerThread(run)
    engine.url = thread.server.url
    yield engine
    thread.stop()


@pytest.fixture
def suite(pytester, engine):
    """Runs one module of tests; `mode` records from the engine."""
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")

    def run(source: str | None, *args: str, mode: str | None = None):
        if source is not None:
            pytester.makepyfile(test_it=source)
        options = ["--rollout-log-mode", mode, "--rollout-log-upstream", engine.url] if mode else []
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options, *args)

    run.file = pytester.path / "fixtures" / "test_it.jsonl"
    run.samples = lambda: [
        (entry.ref.run, entry.ref.key, reader.rollout(entry.ref).choice().token_ids)
        for reader in [FixtureReader.open(run.file)]
        for entry in reader.samples()
    ]
    return run


def test_once_records_and_none_replays(suite, engine):
    suite(DIRECT + ASK, mode="once").assert_outcomes(passed=1)
    assert suite.samples() == [("test_direct", "test_direct-1", [10, 11])]
    text = suite.file.read_text()
    assert '"metadata":{"test":"test_direct"}' in text
    assert "127.0.0.1" not in text

    suite(None).assert_outcomes(passed=1)
    suite(None, mode="once").assert_outcomes(passed=1)
    assert engine.asked == [[1, 2]]
    assert suite.file.read_text() == text


def test_without_a_recording_a_test_fails_and_says_how_to_record(suite):
    result = suite(DIRECT + ASK)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*test_it.jsonl has no recording for test_direct: record it with --rollout-*"]
    )


def test_an_unrecorded_request_fails_the_test_and_names_the_nearest_recording(suite, engine):
    suite(DIRECT + ASK, mode="once")
    for way in (
        DIRECT + "        with pytest.raises(httpx.TransportError):\n"
        "            client.post(PATH, json=body(1, 2, temperature=0.5))\n",
        MODULE + "\ndef test_direct(rollout_log):\n"
        "    answer = httpx.post(rollout_log.url + PATH, json=body(1, 2, temperature=0.5))\n"
        "    assert answer.status_code == 404\n",
        MODULE + "\ndef test_direct(rollout_log):\n"
        "    httpx.post(rollout_log.url + PATH, json=body(1, 2, temperature=0.5)).raise_for_status()\n",
    ):
        result = suite(way)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["*the nearest is 'test_direct-1' request 0: temperature is 0.5, recorded absent*"]
        )
    assert len(engine.asked) == 1


def test_a_miss_is_told_once(suite):
    suite(DIRECT + ASK, mode="once")
    result = suite(DIRECT + "        client.post(PATH, json=body(1, 2, temperature=0.5))\n")
    told = [line for line in result.outlines if "temperature is 0.5" in line and "FAILED" not in line]
    assert len(told) == 1
    assert not any("direct cause" in line for line in result.outlines)


def test_another_error_after_a_miss_is_told_as_its_cause(suite):
    suite(DIRECT + ASK, mode="once")
    result = suite(
        MODULE + "\ndef test_direct(rollout_log):\n"
        "    httpx.post(rollout_log.url + PATH, json=body(1, 2, temperature=0.5)).json()['choices']\n"
    )
    result.stdout.fnmatch_lines(["'choices'", "*direct cause*", "*temperature is 0.5*"])


@pytest.mark.parametrize(
    ("upstream", "said"),
    [
        (None, "answered /inference/v1/generate with HTTP 404: no such model"),
        ("http://127.0.0.1:1", "answered /inference/v1/generate with reset: ConnectError: *"),
    ],
)
def test_what_the_engine_refused_is_shown_with_the_failure(suite, engine, upstream, said):
    engine.refuses = b'{"error": {"message": "no such model", "code": 404}}'
    url = upstream or engine.url
    options = ["--rollout-log-mode", "once", "--rollout-log-upstream", url]
    result = suite(DIRECT + "        client.post(PATH, json=body(1, 2)).raise_for_status()\n", *options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Captured rollout-log call*", f"{url} {said}"])


def test_new_episodes_replays_what_is_there_and_records_the_rest(suite, engine):
    suite(DIRECT + ASK, mode="once")
    more = DIRECT + ASK + "        client.post(PATH, json=body(1, 2, 3))\n"
    suite(more, mode="once").assert_outcomes(failed=1)
    suite(more, mode="new_episodes").assert_outcomes(passed=1)
    assert engine.asked == [[1, 2], [1, 2, 3]]
    assert suite.samples() == [
        ("test_direct", "test_direct-1", [10, 11]),
        ("test_direct", "test_direct-2", [20, 21]),
    ]
    suite(None).assert_outcomes(passed=1)


def test_all_takes_the_place_of_what_the_test_had_and_of_nothing_else(suite, engine):
    both = (
        DIRECT + ASK + "\ndef test_other(rollout_log):\n    with rollout_log.sync_client as client:\n" + ASK
    )
    suite(both, mode="once").assert_outcomes(passed=2)
    suite(None, "-k", "direct", mode="all").assert_outcomes(passed=1)
    assert suite.samples() == [
        ("test_direct", "test_direct-1", [30, 31]),
        ("test_other", "test_other-1", [20, 21]),
    ]


def test_each_test_replays_its_own_recording_of_the_same_request(suite):
    source = MODULE + (
        "\n@pytest.mark.parametrize('first', [10, 20])\n"
        "def test_tokens(rollout_log, first):\n"
        "    with rollout_log.sync_client as client:\n"
        "        assert f'[{first}]' in client.post(PATH, json=body(1, 2)).text\n"
        "    assert [sample.token_ids for sample in rollout_log.samples()] == [[first, first + 1]]\n"
    )
    suite(source, mode="once").assert_outcomes(passed=2)
    suite(None).assert_outcomes(passed=2)
    assert [run for run, _, _ in suite.samples()] == ["test_tokens[10]", "test_tokens[20]"]


def test_a_failed_test_records_nothing(suite):
    suite(DIRECT + ASK + "    assert False\n", mode="once").assert_outcomes(failed=1)
    assert not suite.file.exists()


def test_a_recording_mode_needs_an_engine(suite):
    result = suite(DIRECT + ASK, "--rollout-log-mode", "all")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*mode all records, so it needs an engine*"])


ASYNC = MODULE + (
    "\nasync def test_async(rollout_log):\n"
    "    async with rollout_log.client as client:\n"
    "        assert (await client.post(PATH, json=body(7))).status_code == 200\n"
    "    async with httpx.AsyncClient(transport=rollout_log.transport) as client:\n"
    "        assert (await client.post('http://engine:9' + PATH, json=body(8))).status_code == 200\n"
    "    async with httpx.AsyncClient() as client:\n"
    "        url = f'http://{rollout_log.host}:{rollout_log.port}{PATH}'\n"
    "        assert (await client.post(url, json=body(9))).status_code == 200\n"
    "        assert (await client.get(rollout_log.url + '/health')).status_code in (200, 400)\n"
)


def test_asynchronous_tests(suite, engine):
    source = ASYNC.replace(
        "        assert (await client.get(rollout_log.url + '/health')).status_code in (200, 400)\n", ""
    )
    suite(source, "-W", "error", mode="once").assert_outcomes(passed=1)
    suite(None, "-W", "error").assert_outcomes(passed=1)
    assert engine.asked == [[7], [8], [9]]
    assert [tokens for _, _, tokens in suite.samples()] == [[10, 11], [20, 21], [30, 31]]


def test_unused_recordings_are_reported(suite):
    two = DIRECT + ASK + "        client.post(PATH, json=body(3))\n"
    suite(two, mode="once")
    result = suite(DIRECT + ASK)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*rollout-log*", "*fixtures/test_it.jsonl: 1 of 2 recordings were not asked for: test_direct-2"]
    )
    assert "not asked for" not in suite(two).stdout.str()


def test_files_with_unused_recordings_are_in_one_section(suite):
    suite(DIRECT + ASK, mode="once")
    other = suite.file.with_name("other.jsonl")
    other.write_text(suite.file.read_text().replace(',"metadata":{"test":"test_direct"}', ""))
    source = MODULE + "def test_direct(rollout_log): ...\n"
    given = f"../{suite.file.parent.parent.name}/fixtures/other.jsonl"
    result = suite(source + f"@pytest.mark.rollout_log('{given}')\ndef test_other(rollout_log): ...\n")
    result.stdout.fnmatch_lines([f"{other}: 1 of 1 *", f"{suite.file}: 1 of 1 *"])
    assert result.stdout.str().count(" rollout-log ") == 1


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("pase=1", "the marker rollout_log takes no 'pase': there are file, mode, upstream, pace, at_cut, *"),
        ("mode='nun'", "'nun' is no mode of recording: there are none, once, new_episodes, all"),
        ("at_cut='halt'", "at_cut is one of hold, go, end, not 'halt'"),
        ("hold_s=0", "hold_s is a number of seconds above 0, not 0"),
        ("pace='fast'", "a pace is 0 or more, or 'recorded', not 'fast'"),
        ("faults='drop=3'", "these are no faults: *"),
    ],
)
def test_a_mistake_in_the_marker_is_named_without_a_traceback(suite, mark, said):
    suite(DIRECT + ASK, mode="once")
    source = MODULE + f"\n@pytest.mark.rollout_log({mark})\ndef test_direct(rollout_log): ...\n"
    result = suite(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([said])
    assert "pytest_plugin.py" not in result.stdout.str()


@pytest.fixture
def held(suite):
    """A suite whose recording of `test_direct` was cut after its first token by its client."""
    suite(DIRECT + ASK, mode="once")
    written = suite.file.read_text().splitlines()
    lines = [line for line in written if '"finish_reason":"length"' not in line and "[DONE]" not in line]
    lines[-1] = lines[-1].replace('"how":"eof"', '"how":"cancelled"')
    suite.file.write_text("\n".join(lines) + "\n")
    return suite


ASK_SERVER = "httpx.post(rollout_log.url + PATH, json=body(1, 2), timeout=None)\n"


@pytest.mark.parametrize(
    ("way", "workers"),
    [
        ("client.post(PATH, json=body(1, 2))\n", 0),
        (ASK_SERVER, 0),
        (f"with pytest.raises(httpx.RemoteProtocolError):\n            {ASK_SERVER}", 0),
        (ASK_SERVER, 2),
    ],
    ids=["transport", "server", "swallowed", "xdist"],
)
def test_a_test_that_is_held_at_a_recorded_cut_fails(held, way, workers):
    marked = DIRECT.replace("\ndef", "@pytest.mark.rollout_log(hold_s=0.1)\ndef")
    result = held(f"{marked}        {way}", "-n", str(workers), "-p", "no:hypothesispytest")
    result.assert_outcomes(failed=1)
    said, *_ = [
        line for line in result.outlines if line.startswith("'test_direct-1' request 0 was held at token 1")
    ]
    assert "in 0.1 s the client has neither aborted it nor left" in said
    assert "@pytest.mark.rollout_log(at_cut='end')" in said


def test_a_test_that_leaves_in_time_passes(held):
    source = DIRECT + "        with pytest.raises(httpx.ReadTimeout):\n"
    source += "            httpx.post(rollout_log.url + PATH, json=body(1, 2), timeout=0.5)\n"
    held(source).assert_outcomes(passed=1)


def test_how_long_a_test_may_be_held_is_said_in_its_marker(held):
    source = DIRECT.replace("\ndef", "\n@pytest.mark.rollout_log(hold_s=60)\ndef")
    held(source + "        assert rollout_log.transport.desk.hold_s == 60\n").assert_outcomes(passed=1)
    held(DIRECT + "        assert rollout_log.transport.desk.hold_s == 10\n").assert_outcomes(passed=1)


def test_a_file_exported_from_a_log_is_every_tests(suite, pytester):
    suite(DIRECT + ASK, mode="once")
    text = suite.file.read_text().replace(',"metadata":{"test":"test_direct"}', "")
    (pytester.path / "exported.jsonl").write_text(text)
    marked = (
        "\n@pytest.mark.rollout_log('exported.jsonl')\ndef test_{}(rollout_log):\n"
        "    with rollout_log.sync_client as client:\n"
    )
    source = MODULE + "".join(marked.format(name) + ASK for name in ("one", "two"))
    suite(source).assert_outcomes(passed=2)


def test_the_command_line_goes_before_the_fixture_and_the_fixture_before_the_marker(suite, pytester):
    suite(DIRECT + ASK, mode="once")
    source = MODULE + "\npytestmark = pytest.mark.rollout_log('fixtures/test_it.jsonl', mode='all')\n"
    fixture = "@pytest.fixture\ndef rollout_log_mode():\n    return 'none'\n"
    test = "def test_direct(rollout_log):\n    print('mode is', rollout_log.mode)\n"
    for text, args, mode in (
        (source + fixture + test, ["--rollout-log-mode", "once"], "once"),
        (source + fixture + test, [], "none"),
        (source + test, ["--rollout-log-upstream", "http://127.0.0.1:1"], "all"),
        (source.replace(", mode='all'", "") + test, [], "none"),
        (source + "@pytest.mark.rollout_log(mode='once')\n" + test, [], "once"),
    ):
        suite(text, "-s", *args).stdout.fnmatch_lines([f"*mode is {mode}*"])
    assert suite(source.replace("'all'", "'some'") + test).ret != 0


def test_the_network_is_blocked_on_request(suite):
    suite(DIRECT + ASK, mode="once")
    source = MODULE + (
        "\nimport asyncio, socket\n"
        "from rollout_log.testing.network import NetworkBlocked\n"
        "@pytest.mark.rollout_log(block_network=True)\n"
        "def test_direct(rollout_log):\n"
        "    with rollout_log.sync_client as client:\n"
        + ASK
        + "    with pytest.raises(NetworkBlocked, match='198.51.100.1:80'):\n"
        "        httpx.get('http://198.51.100.1')\n"
        "    with pytest.raises(NetworkBlocked, match='looks up example.com'):\n"
        "        socket.create_connection(('example.com', 80))\n"
        "    with pytest.raises(NetworkBlocked):\n"
        "        asyncio.run(asyncio.open_connection('198.51.100.1', 80))\n"
        "    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, pytest.raises(NetworkBlocked):\n"
        "        udp.sendto(b'x', ('198.51.100.1', 53))\n"
        "    assert httpx.get(rollout_log.url + '/health').status_code == 200\n"
        "def test_after():\n"
        "    assert 'guarded' not in socket.socket.connect.__name__ + socket.getaddrinfo.__name__\n"
    )
    suite(source).assert_outcomes(passed=2)
    inner = source.replace("@pytest.mark.rollout_log(block_network=True)\n", "")
    suite(inner, "--rollout-log-block-network").assert_outcomes(passed=2)


def test_workers_of_xdist_share_the_file_and_the_report(suite):
    source = MODULE + (
        "\n@pytest.mark.parametrize('n', range(4))\n"
        "def test_many(rollout_log, n):\n"
        "    with rollout_log.sync_client as client:\n"
        "        client.post(PATH, json=body(n))\n"
    )
    suite(source, mode="once").assert_outcomes(passed=4)
    other = source.replace("json=body(n)", "json=body(n, n) if n else body(n)")
    result = suite(other, "-n", "2", "-p", "no:hypothesispytest", mode="new_episodes")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*3 of 4 recordings were not asked for: test_many?1?-1, test_many?2?-1, *"])
    assert [key for _, key, _ in suite.samples()] == [
        *("test_many[0]-1", "test_many[1]-1", "test_many[1]-2", "test_many[2]-1", "test_many[2]-2"),
        *("test_many[3]-1", "test_many[3]-2"),
    ]


VIME = {
    "vime/__init__": "",
    "vime/utils/__init__": "",
    "vime/rollout/__init__": "",
    "vime/utils/misc": """
        class SingletonMeta(type):
            _instances = {}
            def __call__(cls, *args, **kwargs):
                if cls not in cls._instances:
                    cls._instances[cls] = super().__call__(*args, **kwargs)
                return cls._instances[cls]
    """,
    "vime/utils/http_utils": """
        _http_client = None
        async def post(url, payload):
            response = await _http_client.post(url, json=payload)
            return response.text
    """,
    "vime/rollout/vllm_rollout": """
        from vime.utils.misc import SingletonMeta
        class GenerateState(metaclass=SingletonMeta):
            def __init__(self, args):
                self.args = args
        class Other(metaclass=SingletonMeta):
            pass
    """,
}


def test_vime_is_pointed_at_the_stand_in_and_put_back(suite, pytester):
    for name, text in VIME.items():
        path = pytester.path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[8:] for line in text.splitlines()))
    source = MODULE + (
        "\nimport sys; sys.path.insert(0, '.')\n"
        "from vime.utils import http_utils\n"
        "from vime.rollout.vllm_rollout import GenerateState, Other\n"
        "async def test_one(rollout_log_vime):\n"
        "    args = rollout_log_vime.args\n"
        "    assert http_utils._http_client is rollout_log_vime.client\n"
        "    assert GenerateState(args).args is args and Other()\n"
        "    url = f'http://{args.vllm_router_ip}:{args.vllm_router_port}{PATH}'\n"
        "    assert 'data: [DONE]' in await http_utils.post(url, body(5))\n"
        "    assert rollout_log_vime.engine.port == args.vllm_router_port\n"
        "async def test_two(rollout_log_vime):\n"
        "    assert GenerateState(rollout_log_vime.args).args is rollout_log_vime.args\n"
        "    await http_utils.post('http://router' + PATH, body(6))\n"
        "def test_three():\n"
        "    assert http_utils._http_client is None\n"
        "    assert [kind.__name__ for kind in type(Other)._instances] == ['Other']\n"
    )
    suite(source, mode="once").assert_outcomes(passed=3)
    suite(None).assert_outcomes(passed=3)


def test_the_plugin_costs_a_suite_nothing_that_does_not_use_it(pytester):
    pytester.makepyfile("import sys\ndef test_it():\n    print('LOADED', *sys.modules)\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:hypothesispytest", str(pytester.path)],
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if "LOADED" in line]
    loaded = set(line.split())
    assert "rollout_log.pytest_plugin" in loaded
    assert not loaded & {"lmdb", "httpx", "msgspec", "zstandard", "vime", "rollout_log.testing"}


def test_the_marker_is_known(suite):
    source = "import pytest\n@pytest.mark.rollout_log\ndef test_it(): pass\n"
    suite(source, "--strict-markers").assert_outcomes(passed=1)


def test_keys_that_the_client_names_stay(suite):
    source = MODULE + (
        "\n@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_named(rollout_log, n):\n"
        "    with rollout_log.sync_client as client:\n"
        "        client.post(PATH, json=body(n), headers={'x-rollout-log-key': 'mine'})\n"
    )
    suite(source, mode="once").assert_outcomes(passed=2)
    assert [(run, key) for run, key, _ in suite.samples()] == [
        ("test_named[1]", "mine"),
        ("test_named[2]", "mine"),
    ]
    result = suite(source.replace("client.post", "n == 1 and client.post"))
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*1 of 2 recordings were not asked for: test_named?2?: mine"])
