"""What has to be imported before pytester remembers which modules there are.

After each run within the process pytester forgets the modules that came with it. What is imported again then
is another copy, with exceptions of its own, while httpx goes on translating those of the first: httpcore,
which httpx imports with its first client, and the backends that httpcore and anyio pick at the first request.
"""

# ruff: noqa: F401 - they are imported for the effect alone

from __future__ import annotations

import anyio._backends._asyncio
import httpcore._backends.anyio
import httpcore._backends.auto
import httpx
