"""`docs/format.md` says what the code does."""

from __future__ import annotations

import re

import msgspec

from rollout_log import events
from rollout_log.log import Summary, chunk, group, retention, sealed
from rollout_log.log.batch import _CHECKSUM, _HEADER, _PLACE, Place


def test_the_events_and_their_fields_are_those_of_the_document(root):
    rows = re.findall(
        r"^\| (\d+) \| ([A-Z]\w+) \| (.+) \|$", (root / "docs/format.md").read_text(), re.MULTILINE
    )
    documented = {int(tag): (name, re.sub(r" \[.*?\]", "", fields).split(", ")) for tag, name, fields in rows}
    known = [
        kind
        for kind in vars(events).values()
        if isinstance(kind, type)
        and issubclass(kind, events.Event)
        and kind not in {events.Event, events.Unknown}
    ]
    assert documented == {
        kind.__struct_config__.tag: (kind.__name__, list(kind.__struct_fields__)) for kind in known
    }


def test_the_summary_is_that_of_the_document(root):
    text = (root / "docs/format.md").read_text().split("## Summary")[1]
    cells = re.findall(r"\| (\d+) \| (\w+)", text)
    assert [name for _, name in sorted(cells, key=lambda cell: int(cell[0]))] == list(
        Summary.__struct_fields__
    )


def test_the_header_of_a_batch_is_that_of_the_document(root):
    text = (root / "docs/format.md").read_text().split("## Batch")[1].split("A line of the directory")[0]
    sizes = [int(size) for size in re.findall(r"^\| \d+ \| (\d+) \|", text, re.MULTILINE)]
    offsets = [int(offset) for offset in re.findall(r"^\| (\d+) \| \d* ?\|", text, re.MULTILINE)]
    assert offsets == [sum(sizes[:at]) for at in range(len(offsets))]
    assert sum(sizes) == _HEADER.size + _CHECKSUM.size == offsets[-1]


def test_a_line_of_the_directory_is_that_of_the_document(root):
    text = (root / "docs/format.md").read_text().split("A line of the directory")[1].split("## Events")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \|", text, re.MULTILINE)
    sizes = [int(size) for _, size in rows]
    assert [int(offset) for offset, _ in rows] == [sum(sizes[:at]) for at in range(len(rows))]
    assert (sum(sizes), len(rows)) == (_PLACE.size, len(Place._fields))


def test_the_header_of_a_chunk_is_that_of_the_document(root):
    text = (root / "docs/format-sealed.md").read_text().split("## Chunk")[1].split("**Meta**")[0]
    rows = re.findall(r"^\| (\d+) \| (\d*) ?\|", text, re.MULTILINE)
    offsets, sizes = [int(offset) for offset, _ in rows], [int(size or 0) for _, size in rows]
    assert offsets == [sum(sizes[:at]) for at in range(len(offsets))]
    assert sum(sizes) == chunk.HEADER_SIZE


def test_a_group_and_the_tables_are_those_of_the_document(root):
    text = (root / "docs/format-sealed.md").read_text()
    fields = re.findall(r"^\| (\d+) \| (\w+) \|", text.split("## Events")[1], re.MULTILINE)
    assert [name for _, name in fields] == list(group.Group.__struct_fields__)
    assert [int(place) for place, _ in fields] == list(range(len(fields)))
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(sealed.WIDTHS)
    (meta,) = re.findall(r"\*\*Meta\*\*: JSON, `\{(.+?)\}`", text)
    assert meta.split(", ") == list(sealed.Meta.__struct_fields__)


def test_what_is_remembered_of_a_pruned_segment_is_in_the_document(root):
    (fields,) = re.findall(r"array of `\{([^}]+)\}`", (root / "docs/format.md").read_text())
    assert re.split(r",\s+", fields) == list(retention.Pruned.__struct_fields__)


def test_a_summary_of_an_older_or_newer_minor_version_is_read():
    encoded = msgspec.msgpack.encode(["key", "run", 3])
    assert msgspec.msgpack.decode(encoded, type=Summary) == Summary("key", "run", 3)
    fields = [*msgspec.structs.astuple(Summary("key", tokens=5)), "a field of the future"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Summary) == Summary("key", tokens=5)
