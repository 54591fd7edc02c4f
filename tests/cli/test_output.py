"""What comes from a log is shown without being obeyed."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.cli import _output as output
from rollout_log.cli._output import safe
from rollout_log.cli._table import print_table

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("abc\u202edcba\u2066", r"abc\u202edcba\u2066"),
        ("a\u2028b\u0085c", r"a\u2028b\x85c"),
        ("\ufeff\U000e0041", r"\ufeff\U000e0041"),
        ("\ud83d", r"\ud83d"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        ("naïve 日本 👩\u200d🚀", "naïve 日本 👩\u200d🚀"),
    ],
)
def test_controls_become_escapes_and_letters_stay(hostile, shown):
    assert safe(hostile) == shown


def test_lines_may_be_kept():
    assert safe("a\n\tb\x1b", keep="\n") == "a\n\\tb\\x1b"


@given(ANY_TEXT)
def test_nothing_a_terminal_obeys_is_left(text):
    left = [c for c in safe(text) if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]
    assert set(left) <= {"\u200c", "\u200d"}
    safe(text).encode()


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | ANY_TEXT, st.lists)
    | st.dictionaries(ANY_TEXT, ANY_TEXT)
)
def test_json_is_one_ascii_line_and_exact(value):
    line = output.to_json(value)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == value


def test_json_has_no_nan_and_takes_structs_paths_and_bytes():
    class Point(msgspec.Struct):
        x: float
        y: float

    value = {"p": Point(math.nan, 1.5), "inf": [-math.inf], "path": Path("/a"), "bytes": b"\xff", 1: ()}
    assert output.to_json(value) == '{"p":{"x":null,"y":1.5},"inf":[null],"path":"/a","bytes":"/w==","1":[]}'


def test_json_lines(capsys):
    output.print_json({"a": 1}, {"a": 2})
    assert capsys.readouterr().out == '{"a":1}\n{"a":2}\n'


def test_a_table_reads_no_markup_and_is_not_folded_off_a_terminal(capsys):
    print_table(["key", "tokens"], [["[red]a[/red] :smile: \x1b[1m", 7], ["x" * 300, None]], right=["tokens"])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["key", "tokens"]
    assert first.split("  ")[0] == r"[red]a[/red] :smile: \x1b[1m"
    assert first.endswith("     7")
    assert second.rstrip() == "x" * 300


@pytest.mark.parametrize(
    "case",
    [
        ("ls", 200, ""),
        ("ls", 80, ""),
        ("ls", 60, "began, weights"),
        ("steps", 80, "began, took, weights, requests, resumed from"),
    ],
)
def test_on_a_narrow_terminal_columns_are_left_out(case, run_log, call, terminal):
    verb, columns, left_out = case
    terminal(columns)
    result = call(verb, run_log)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in result.lines]
    assert max(map(len, lines)) <= columns
    said = f"rollout-log: left out, for a terminal this narrow: {left_out} (--json has all)\n"
    assert result.err == (said if left_out else "")
    assert not set(left_out.split(", ")) & set(" ".join(lines[:3]).split())


def test_a_column_without_anything_is_left_out(capsys):
    print_table(["key", "step", "tokens"], [["a", "", 7], ["b", None, 0]], right=["step", "tokens"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["key", "tokens"],
        ["a", "7"],
        ["b", "0"],
    ]
    print_table(["key", "step"], [])
    assert capsys.readouterr().out == "key  step\n"


def test_a_word_is_not_cut_unless_it_is_very_long(capsys, terminal):
    terminal(56)
    rows = [["a-key-of-20-letters-0", "version_assumed 1, no_terminal 3", "x" * 40]]
    print_table(["key", "problems", "detail"], rows)
    words = capsys.readouterr().out.split()
    assert {"a-key-of-20-letters-0", "version_assumed", "no_terminal"} <= set(words)
    print_table(["key", "problems"], [["k" * 60, "version_assumed 1, no_terminal 3"]])
    out = capsys.readouterr().out
    assert "version_assumed" in out
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", out).splitlines())) <= 56


def test_a_long_line_goes_on_under_its_text(capsys, terminal):
    output.print_hanging("  at 1 s  ", "said [red]a[/red] \x1b[1m word " + "after word " * 5)
    assert len(capsys.readouterr().out.splitlines()) == 1
    terminal(40)
    output.print_hanging("  at 1 s  ", "said [red]a[/red] \x1b[1m word " + "after word " * 5)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(r"  at 1 s  said [red]a[/red] \x1b[1m")
    assert others
    assert {line[:10] for line in others} == {" " * 10}
    assert max(map(len, [first, *others])) <= 40


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_folding_loses_nothing_and_keeps_to_the_terminal(columns, capsys, terminal):
    terminal(columns)
    texts = [
        "the engine sent null for these; ratios are undefined",
        "request 0, token 12",
        "b" * 70,
        "warning",
    ]
    print_table(["what", "where", "name", "severity"], [texts])
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    for letter in set("".join(texts)) - {" "}:
        assert out.count(letter) >= "".join(texts).count(letter)
    if columns > 40:  # too narrow for four columns: lines are whole
        assert max(map(len, out.splitlines())) <= columns
