"""The log: a directory of segments that any number of processes append to and anyone can read.

    log = Log.open("runs/today")                    # this process's own folder in it
    sample = log.create(Opened(key="t1-abc"))       # an ordinal, unique within the writer
    log.append(sample, 0, [opened, requested, …])   # never blocks, never raises unless strict
    await log.flush(sample)                         # on disk now

    with LogReader.open("runs/today") as reader:
        for entry in reader.samples(): ...
        rollout = reader.rollout("t1-abc")

Inwards: `writer` (`queue`, `thread`, `waiting`) and `reader` use `segment` (tables and keys of one LMDB
file), which uses `environment` (LMDB's rules in one process) and `batch` (how `block`s of events lie on
disk). What is rotated the writer's `keeper` has a child process (`keeping`) seal, archive and delete:
`sealing` makes the one file that `sealed` reads, of `chunk`s, whose events `group` packs as columns;
`retention` decides what goes. `directory` knows the names; `verify` trusts nothing, `salvage` not even the
tables. `docs/format.md` and `docs/format-sealed.md` give the bytes, `docs/durability.md` what is promised.
"""

from rollout_log.log.block import Block
from rollout_log.log.reader import Entry, LogReader, Ref
from rollout_log.log.summary import Summary
from rollout_log.log.writer import Counters, Durability, Log

__all__ = ["Block", "Counters", "Durability", "Entry", "Log", "LogReader", "Ref", "Summary"]
