"""What can go wrong, one class per outcome.

Everything the package raises on purpose is a `RolloutLogError`, so one `except` catches it all.
Each message says what happened, to which sample or file, and what to do. Errors about HTTP live
beside the code that speaks it (`rollout_log.record`, `rollout_log.replay`) and inherit from httpx's
as well, so that handlers a client already has keep working.
"""


class RolloutLogError(Exception):
    """Base of every error this package raises on purpose."""


class LogNotFound(RolloutLogError):
    """There is nothing at the path."""


class NotALog(RolloutLogError):
    """The path holds something, but not a rollout log."""


class LogTooNew(RolloutLogError):
    """The log was written by a later major version of the format."""


class LogDamaged(RolloutLogError):
    """Bytes of the log fail their checksum or do not fit together.

    `rollout-log verify` says what else is damaged, `rollout-log recover` saves what is whole.
    """


class LogInUse(RolloutLogError):
    """Another process holds what this call needs alone."""


class UnsafeFileSystem(RolloutLogError):
    """The active segment would lie on a network file system, where LMDB's locks do not hold."""


class SampleNotFound(RolloutLogError):
    """No sample has this key; the message names the nearest ones."""


class SequenceConflict(RolloutLogError):
    """An append skips events, or gives another body to an event that is already there."""


class RecordingFailed(RolloutLogError):
    """The log could not take events, and `strict` asked for an error instead of a mark."""


class TrainerMissing(RolloutLogError):
    """A plug-in needs its trainer's own code, which cannot be imported."""
