"""Taps: what turns generation requests into events of a log.

`Recorder` generates for a sample with retry, resume and abort; `RecordingTransport` records what any httpx
client does; `record.proxy` sits between any client and the engine. All three write the same events through
`Samples`, which knows which sample a request belongs to, and `Exchange`, which takes in one response.
"""

from rollout_log.record.call import Call
from rollout_log.record.errors import GenerationFailed, GenerationRefused
from rollout_log.record.recorder import Recorder
from rollout_log.record.transport import RecordingTransport, recording

__all__ = ["Call", "GenerationFailed", "GenerationRefused", "Recorder", "RecordingTransport", "recording"]
