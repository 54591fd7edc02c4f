"""Which weights the engines have, as far as they say it: known in one step, asked for at most once."""

from __future__ import annotations

import asyncio
import weakref

import httpx

from rollout_log.trainer.host import Host
from rollout_log.versions import number_of

__all__ = ["Weights"]

_PATIENCE_S = 2.0
"""How long an engine may take to say which weights it has."""


class Weights:
    """What one process knows of the weights that are loaded."""

    def __init__(self) -> None:
        self._version: tuple[int | None, str] | None = None
        """The step, and what an engine said in it."""
        self._silent: tuple[int | None] | None = None
        """The step in which no engine answered when it was asked."""
        self._tells = True
        """Whether an engine is not known to answer with something else."""
        self._asking: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )

    def known(self, step: int | None) -> str | None:
        """Return the version that is known to be loaded: what an engine last said in this step."""
        if self._version is None or self._version[0] != step:
            return None
        return self._version[1]

    def tell(self, step: int | None, version: str) -> None:
        """An engine said which weights it has; one that is behind the others does not count."""
        known, told = number_of(self.known(step) or ""), number_of(version)
        if known is None or told is None or told > known:
            self._version = (step, version)

    async def ask(self, host: Host, client: httpx.AsyncClient, url: str, step: int | None) -> None:
        """Ask the engine once a step: where only a last frame has the version, a cancel loses it."""
        if host.version_path is None or not self._is_wanted(step):
            return
        async with self._asking.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if not self._is_wanted(step):  # somebody else asked meanwhile
                return
            version = None
            try:
                answer = await client.get(httpx.URL(url).join(host.version_path), timeout=_PATIENCE_S)
                said = answer.json() if answer.status_code < 400 else None
                version = said.get("weight_version") if isinstance(said, dict) else None
            except httpx.HTTPError:
                self._silent = (step,)
                return
            except ValueError:
                pass  # not JSON, so not what is asked for
            if isinstance(version, (str, int)):
                self.tell(step, str(version))
            else:
                self._tells = False

    def _is_wanted(self, step: int | None) -> bool:
        return self._tells and self._silent != (step,) and self.known(step) is None
