"""The report in a real browser: it opens, filters, takes clicks and keys, and runs nothing hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from browser import browser, resize
from recorded import SSE, Writer, frame
from rollout_log import events
from rollout_log.events import Marked
from rollout_log.export.report import Report, by_interest
from rollout_log.log import LogReader
from rollout_log.sources import open_source

pytestmark = [
    pytest.mark.usefixtures("needs_browser"),
    # Selenium leaves sockets of its own to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOSTILE = [
    "<script>window.hit=1</script>",
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1>",
    '"><iframe srcdoc="<script>top.hit=1</script>">',
    "javascript:window.hit=1",
    "{{overview}}<!--",
    "\u202egnp.exe\u2066",
    "nul\0 bell\a esc\x1b]0;title\a",
    "line\u2028separator\u2029",
    "lone \ud800 surrogate",
]
KEYS = [text for text in HOSTILE if "\ud800" not in text]
WORDS = {1000 + i: text for i, text in enumerate(HOSTILE)} | {i: f" word{i}" for i in range(100)}


def decode(token_ids) -> str:
    return "".join(WORDS.get(i, "") for i in token_ids)


def write(log: Path, page: Path, step: int | None = None, **options: Any) -> Path:
    with LogReader.open(log) as reader:
        report = Report(reader, step, **options)
        for entry in by_interest(reader.samples(step=step)):
            report.add(entry)
        report.write(page)
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Forty samples that finished, a resumed one, one that was lost and retried, one that failed."""
    path = tmp_path_factory.mktemp("page")
    with Writer(path / "log", run="today") as writer:
        for i in range(40):
            writer.request(f"plain-{i}", [frame(i, i + 1, finish="stop", version="7")], step=1)
        aborted = [frame(21, 22, version="7"), frame(finish="abort", version="7")]
        writer.request("went-on", aborted, step=1, weight_version="7")
        writer.request("retried", [frame(31, 32)], step=1, how="reset", detail="peer went away")
        writer.request("retried", [frame(34, finish="length", logprob=None)], step=1, base=0)
        writer.request("failed", step=1, status=503, body=b'{"error":{"message":"overloaded"}}')
        writer.request("went-on", [frame(23, finish="stop", version="8")], step=2)
        writer.log.flush_sync()
    return write(path / "log", path / "report.html", 1, decode=decode)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    """Keys, tokens, versions, errors, details, marks and metadata that would like to run."""
    path = tmp_path_factory.mktemp("hostile")
    with Writer(path / "log", run=HOSTILE[1]) as writer:
        for i, key in enumerate(KEYS):
            known = {"index": i, "metadata": {text: text for text in KEYS}}
            error = '{"error":{"message":"</script><img src=x onerror=window.hit=1>"}}'
            tokens = frame(*range(1000, 1000 + len(HOSTILE)), version=HOSTILE[i])
            writer.request(key, status=500, body=error.encode(), step=1, opened=known)
            last = writer.request(key, [tokens], step=1, how="reset", detail=HOSTILE[1], base=0)
            last.sample.rollout.apply(mark := Marked(HOSTILE[2], {"x": HOSTILE[1]}, 1))
            last.sample.write([mark])
        writer.log.flush_sync()
    return write(path / "log", path / "report.html", 1, decode=decode)


def chat(writer: Writer, key: str, messages: list[Any], answer: str) -> None:
    """A sample whose client and engine sent text alone."""
    asked = {"model": "m", "messages": messages, "stream": True}
    exchange = writer.samples.request(
        key, path="/v1/chat/completions", body=json.dumps(asked).encode(), opened=events.Opened(key, step=1)
    )
    exchange.respond(200, SSE)
    choice = {"index": 0, "delta": {"content": answer}, "finish_reason": "stop"}
    exchange.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
    exchange.end("eof")


CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 100}}
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant.\nBe brief."},
    {"role": "user", "content": [{"type": "text", "text": "How warm is it here?"}, IMAGE]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "31 °C"},
]


@pytest.fixture(scope="module")
def chat_page(tmp_path_factory):
    """A chat with a tool and an image, and one whose every field would like to run."""
    path = tmp_path_factory.mktemp("chat")
    hostile = [
        {
            "role": text,
            "name": text,
            "content": [text, {"type": text, text: text}],
            "tool_calls": [text],
            text: 1,
        }
        for text in HOSTILE
    ]
    with Writer(path / "log") as writer:
        chat(writer, "chat", MESSAGES, "Warm.")
        chat(writer, "hostile", [*hostile, *HOSTILE], HOSTILE[1])
    return write(path / "log", path / "report.html", 1)


TOKENS = "return document.querySelectorAll('.t[data-i]').length"


class Opened:
    """A report in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path) -> None:
        self.driver.get(page.as_uri())
        self.wait(lambda: self.text("count"))

    def js(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def text(self, element_id: str) -> str:
        return str(self.js("return document.getElementById(arguments[0])?.textContent ?? ''", element_id))

    def wait(self, what) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20).until(lambda _: what())

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def click_lane(self, row: int) -> None:
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        left, top = self.js("""
            const lanes = document.getElementById("lanes");
            lanes.scrollIntoView();
            const { left, top } = lanes.getBoundingClientRect();
            return [left, top];
        """)
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(int(left) + 40, int(top) + 22 * row + 11).click()
        actions.perform()

    def sample(self) -> str:
        return self.text("sample-name")

    def errors(self) -> list[Any]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def chromium(needs_browser):
    with browser() as driver:
        yield driver


@pytest.fixture
def opened(chromium, page):
    """The report, just opened; at the end the console must be empty."""
    resize(chromium, 1280, 900)
    found = Opened(chromium)
    found.open(page)
    yield found
    assert found.errors() == []


def test_it_opens_without_asking_for_anything(opened):
    assert opened.text("title") == "Step 1"
    assert opened.text("count") == "43 samples"
    assert "run today" in opened.text("subtitle")
    assert "completed 40, went on 1, truncated 1, failed 1" in opened.text("summary").replace("  ", " ")
    assert "retried after reset 1" in opened.text("summary")
    assert opened.js("return performance.getEntriesByType('resource').length") == 0


def test_lanes_are_drawn_as_far_as_they_are_seen(opened):
    drawn = """
      const bars = document.getElementById("bars");
      const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      [pen.canvas.width, pen.canvas.height] = [bars.width, bars.height];
      pen.drawImage(bars, 0, 0);
      const { data } = pen.getImageData(0, 0, bars.width, bars.height);
      const colours = new Set(new Uint32Array(data.buffer)).size;
      return [colours, bars.height, document.getElementById("space").offsetHeight];
    """
    opened.wait(lambda: opened.js(drawn)[0] > 4)
    _, height, whole = opened.js(drawn)
    assert whole == 43 * 22
    assert height == opened.js("return document.getElementById('lanes').clientHeight") < whole


def test_it_filters_by_status_problem_and_key(opened):
    opened.click('[data-status="completed"]')
    assert opened.text("count") == "3 of 43 samples"
    opened.click('[data-status="completed"]')
    opened.js("""
      const select = document.getElementById("problem");
      select.value = "null_logprob";
      select.dispatchEvent(new Event("change"));
    """)
    assert opened.text("count") == "1 of 43 samples"
    assert "retried: truncated, 2 requests, 1 token, 1 problem" in opened.text("current")
    opened.js("""
      const select = document.getElementById("problem");
      select.value = "";
      select.dispatchEvent(new Event("change"));
    """)
    opened.press("/", "PLAIN-1")
    assert opened.text("count") == "11 of 43 samples"
    opened.press("\ue00c")
    assert opened.text("count") == "43 samples"
    opened.press("nothing like it")
    assert opened.text("count") == "0 of 43 samples"


def test_a_click_shows_a_sample_whole(opened):
    opened.press("/", "retried")
    opened.click_lane(0)
    opened.wait(lambda: opened.sample() == "retried")
    shown = opened.text("sample")
    for part in ("reset", "peer went away", "null_logprob", "importance ratios are undefined", "word34"):
        assert part in shown
    assert opened.js("return document.querySelectorAll('#sample .t.none[data-i]').length") == 1
    opened.click('[aria-label="Close"]')
    assert opened.js("return document.getElementById('sample').hidden")


def test_tokens_are_told_and_coloured(opened):
    opened.press("/", "went-on", "\ue007", "\ue007")
    opened.wait(lambda: opened.sample() == "went-on")
    assert "cut at token 2: request 0 ended aborted" in opened.text("sample")
    opened.click(".t[data-i='2']")
    told = opened.js("return document.querySelector('.token-line').textContent")
    assert told.startswith("token 2 · id 23 · log-prob -0.5 (p 0.61) · request 1 · weights 8 · came ")
    opened.js("""
      const select = document.querySelector(".token-tools select");
      select.value = "weights";
      select.dispatchEvent(new Event("change"));
    """)
    classes = "return [...document.querySelectorAll('.t[data-i]')].map((token) => token.className.trim())"
    assert [kind.split()[1] for kind in opened.js(classes)] == ["c0", "c0", "c1"]


def test_it_is_driven_by_keys(opened):
    down, up, enter, escape, end = "\ue015", "\ue013", "\ue007", "\ue00c", "\ue010"
    opened.js("document.getElementById('lanes').focus()")
    opened.press(down, down, up)
    assert opened.text("current").startswith("plain-1: completed")
    assert opened.js("return document.getElementById('current').getAttribute('aria-posinset')") == "2"
    opened.press(enter)
    opened.wait(lambda: opened.sample() == "plain-1")
    assert opened.js("return document.activeElement.id") == "sample-name"
    opened.press(escape)
    assert opened.js("return document.activeElement.id") == "lanes"
    assert opened.js("return document.getElementById('sample').hidden")
    opened.press(end)
    assert opened.text("current").startswith("failed: failed")
    assert opened.js("return document.getElementById('lanes').scrollTop") > 0


def test_it_zooms_and_pans(opened):
    opened.js("document.getElementById('lanes').focus()")
    picture = "return document.getElementById('ruler').toDataURL()"
    opened.wait(lambda: opened.js("return document.getElementById('ruler').width > 300"))
    seen = [opened.js(picture)]
    for key in ("+", "\ue014", "0"):
        opened.press(key)
        opened.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        seen.append(opened.js(picture))
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[0]


def test_the_theme_changes(opened):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = opened.js(colour)
    opened.click("#theme")
    assert opened.js("return document.documentElement.dataset.theme") == "dark"
    assert opened.js(colour) != light


def test_it_fits_a_phone(opened):
    resize(opened.driver, 375, 812)
    fits = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert opened.js(fits)
    opened.press("/", "retried", "\ue007", "\ue007")
    opened.wait(lambda: opened.sample() == "retried")
    assert opened.js(fits)
    assert opened.js("return document.getElementById('sample').getBoundingClientRect().width") == 375


def test_the_requests_of_a_sample_fit_its_panel(chromium, root, tmp_path):
    log = root / "fixtures" / "partial-rollout.jsonl.zst"
    with open_source(log) as reader:
        report = Report(reader)
        for entry in reader.samples():
            report.add(entry)
        report.write(tmp_path / "report.html")
    resize(chromium, 1300, 900)
    opened = Opened(chromium)
    opened.open(tmp_path / "report.html")
    assert opened.text("subtitle").endswith("0.6 ms into the fixture, for 14.9 s")
    opened.press("/", "t4", "\ue007", "\ue007")
    opened.wait(lambda: opened.sample() == "t4")
    wide, there = opened.js(
        "const { scrollWidth, clientWidth } = document.querySelector('.wide');"
        "return [scrollWidth, clientWidth];"
    )
    assert wide <= there
    assert opened.errors() == []


@pytest.mark.parametrize(("steps", "found"), [([0, 0], []), ([1, 0, 1], [[1, 5], [0, 10]]), ([None], [])])
def test_all_steps_are_told_apart_by_when_they_began(opened, steps, found):
    lanes = [{"bars": [{"step": step, "sent": 5 * (i + 1)}]} for i, step in enumerate(steps)]
    assert opened.js("return stepsOf(arguments[0])", lanes) == found


@pytest.mark.parametrize(
    ("values", "found"), [([], 0), ([0, 0, 7], 7), ([0] * 90 + [10] * 19 + [20000], 10), ([5, 0, 6], 5)]
)
def test_a_burst_does_not_say_what_is_usual(opened, values, found):
    assert opened.js("return usual(arguments[0])", values) == found


def test_nothing_in_a_log_can_run(chromium, hostile_page):
    resize(chromium, 1280, 900)
    opened = Opened(chromium)
    opened.open(hostile_page)
    own = opened.js("return document.scripts.length")
    for row, _ in enumerate(KEYS):
        opened.click_lane(row)
        opened.wait(lambda: opened.js(TOKENS) == len(HOSTILE))
        opened.js("document.querySelectorAll('#sample details').forEach((one) => { one.open = true; })")
        opened.click('[aria-label="Close"]')
    assert opened.js("return window.hit ?? null") is None
    assert opened.js("return document.querySelectorAll('img, svg, iframe, #sample script').length") == 0
    assert opened.js("return document.scripts.length") == own
    assert opened.errors() == []


def test_what_would_hide_or_reorder_text_is_shown(chromium, hostile_page):
    opened = Opened(chromium)
    opened.open(hostile_page)
    opened.click_lane(0)
    opened.wait(opened.sample)
    tokens = opened.js(
        "return [...document.querySelectorAll('.t[data-i]')].map((token) => token.textContent)"
    )
    assert tokens[:3] == HOSTILE[:3]
    assert tokens[7:] == [
        "\\u{202e}gnp.exe\\u{2066}",
        "nul\\u{0} bell\\u{7} esc\\u{1b}]0;title\\u{7}",
        "line\\u{2028}separator\\u{2029}",
        "lone \\u{d800} surrogate",
    ]


SAID = """
  return [...document.querySelectorAll(".said")].map((said) =>
    [said.querySelector(".by")?.textContent ?? null, said.lastChild.textContent]);
"""


def test_a_chat_is_shown_as_its_request_had_it(chromium, chat_page):
    resize(chromium, 1280, 900)
    opened = Opened(chromium)
    opened.open(chat_page)
    opened.click_lane(0)
    opened.wait(lambda: opened.sample() == "chat")
    said = opened.js(SAID)
    assert [by for by, _ in said] == ["system", "user", "assistant", "tool (call-1)"]
    assert said[0][1] == "You are a helpful assistant.\nBe brief."
    assert said[1][1].startswith(
        'How warm is it here?\n[image_url {"image_url":{"url":"data:image/png;base64,iVBOR'
    )
    assert len(said[1][1]) < 200
    assert [text for _, text in said[2:]] == ['→ call-1: weather({"city": "Rom"})', "31 °C"]
    assert opened.js("return document.querySelector('.said').checkVisibility()")
    assert "Prompt, 4 messages" in opened.text("sample")
    assert "Warm." in opened.text("sample")
    resize(chromium, 375, 812)
    assert opened.js("return document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.errors() == []


def test_nothing_in_a_chat_can_run(chromium, chat_page):
    resize(chromium, 1280, 900)
    opened = Opened(chromium)
    opened.open(chat_page)
    own = opened.js("return document.scripts.length")
    opened.click_lane(1)
    opened.wait(lambda: opened.sample() == "hostile")
    said = opened.js(SAID)
    assert len(said) == 2 * len(HOSTILE)
    text = HOSTILE[0]
    assert said[0] == [
        f"{text} ({text})",
        f'{text}\n[{text} {{"{text}":"{text}"}}]\n→ "{text}"\n{{"{text}":1}}',
    ]
    shown = "nul\\u{0} bell\\u{7} esc\\u{1b}]0;title\\u{7}"
    assert said[8][0] == f"{shown} ({shown})"
    assert opened.js("return window.hit ?? null") is None
    assert opened.js("return document.querySelectorAll('img, svg, iframe, #sample script').length") == 0
    assert opened.js("return document.scripts.length") == own
    assert opened.errors() == []


@pytest.mark.parametrize(("samples", "height"), [(2, 2 * 22), (4096, 0.62 * 900)])
def test_the_box_is_as_tall_as_its_lanes_up_to_a_limit(chromium, tmp_path, samples, height):
    with Writer(tmp_path / "log") as writer:
        for i in range(samples):
            writer.request(f"plain-{i}", [frame(i, finish="stop")], step=1)
    resize(chromium, 1280, 900)
    opened = Opened(chromium)
    opened.open(write(tmp_path / "log", tmp_path / "report.html", 1))
    box = "return document.getElementById('lanes').clientHeight"
    assert opened.js(box) == pytest.approx(height, abs=2)
    assert opened.js("return document.getElementById('space').offsetHeight") == 22 * samples
    opened.press("/", "nothing like it")
    assert opened.js(box) == pytest.approx(height, abs=2)
    assert opened.errors() == []


def test_a_page_that_left_tokens_out_says_so(chromium, page, tmp_path):
    short = write(page.parent / "log", tmp_path / "short.html", 1, limit=0)
    opened = Opened(chromium)
    opened.open(short)
    assert "43 of 43 samples are drawn without their tokens" in opened.text("left-out")
    opened.click_lane(0)
    opened.wait(lambda: opened.sample() == "plain-0")
    assert "The tokens of this sample are not in this page" in opened.text("sample")
    assert opened.errors() == []
