"""Print the JSON Schema of what a verb prints with --json.

`ls`, `steps`, `tail`, `replay`, `seal`, `archive`, `prune` and `export --to jsonl` print one such object a
line, the others one. `replay-check` is of `replay --check` and `--through`; with --at-… it prints what
`show` does.

Example:

    rollout-log schema > sample.schema.json
    rollout-log schema steps
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import msgspec
import typer

from rollout_log.cli._output import print_json

# Verb -> where the type of its objects is.
TYPES = {
    "show": "rollout_log.view:SampleView",
    "ls": "rollout_log.listing:SampleLine",
    "steps": "rollout_log.steps:StepView",
    "diff": "rollout_log.comparison:Comparison",
    "replay": "rollout_log.cli.replay:Told",
    "replay-check": "rollout_log.cli.replay:Compared",
    "stats": "rollout_log.statistics:Statistics",
    "tail": "rollout_log.watching:Happening",
    "verify": "rollout_log.cli.verify:Verdict",
    "seal": "rollout_log.log.keeper:Done",
    "archive": "rollout_log.log.keeper:Done",
    "prune": "rollout_log.log.retention:Pruned",
    "recover": "rollout_log.recovery:Recovery",
}


def run(
    verb: Annotated[str, typer.Argument(metavar="VERB", help=f"One of {', '.join(TYPES)}.")] = "show",
) -> None:
    if verb not in TYPES:
        raise typer.BadParameter(f"{verb!r} has no schema: there are {', '.join(TYPES)}")
    module, _, name = TYPES[verb].partition(":")
    kind = getattr(import_module(module), name)
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)})
