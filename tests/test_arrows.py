"""Imports point one way: what stands further down in the table may import what stands above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_log

ROOT = Path(rollout_log.__file__).parent

LAYERS = (
    {
        "ascii_json",
        "child",
        "counting",
        "errors",
        "events",
        "extras",
        "http_message",
        "problems",
        "sse",
        "undated",
        "versions",
    },
    {"columns", "http_server", "settings"},
    {"engines"},
    {"response", "stretch", "words"},
    {"request"},
    {"history"},
    {"state"},
    {"fold"},
    {"times", "view"},
    {"comparison", "log"},
    {"listing", "statistics", "steps", "watching", "record"},
    {"fixture", "recovery"},
    {"sources"},
    {"replay"},
    {"trainer", "testing"},
    {"slime", "vime", "export", "pytest_plugin"},
    {"cli"},
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
# Which parts may know a library at all.
KNOWN_TO = {
    "lmdb": {"log"},
    "httpx": {"record", "replay", "trainer", "testing"},
    "h11": {"http_server"},
    "zstandard": {"columns", "fixture", "log"},
    "typer": {"cli"},
    "rich": {"cli"},
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


FILES = [*ROOT.rglob("*.py"), *(ROOT / "cli").glob("*.py")]  # which is a link in a checkout
PARTS = {part_of(path) for path in FILES} - {"__init__"}


def imports() -> Iterator[tuple[str, str]]:
    """Yield which part imports what."""
    for path in FILES:
        part = part_of(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((part, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                if node.module == "rollout_log":
                    yield from ((part, f"rollout_log.{alias.name}") for alias in node.names)
                else:
                    yield part, node.module


ALL = {each for each in imports() if each[0] in PARTS}  # the package itself loads what is asked for


def test_every_part_has_its_layer():
    assert set(LAYER) == PARTS


@pytest.mark.parametrize("part", sorted(LAYER))
def test_a_part_imports_what_is_below_it(part):
    imported = {name.split(".")[1] for of, name in ALL if of == part and name.startswith("rollout_log.")}
    imported -= {part, "__version__"}
    assert {name for name in imported if LAYER[name] >= LAYER[part]} == set()


def test_what_is_imported_is_asked_for():
    """Not left to what the libraries themselves happen to bring."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    asked = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    assert asked is not None
    ours = set(re.findall(r'"([\w-]+)', asked[1]))
    assert set(KNOWN_TO) | {"msgspec"} == ours


@pytest.mark.parametrize("library", sorted(KNOWN_TO))
def test_a_library_is_known_to_few(library):
    assert {part for part, name in ALL if name.partition(".")[0] == library} == KNOWN_TO[library]
