"""The engine and the router as processes of a test.

    with Engine(log=tmp_path / "engine.log") as engine, Router([engine.url], log=...) as router:
        httpx.post(f"{router.url}/inference/v1/generate", json=...)
        engine.kill9()
        engine.start()      # on the same port

Starting and stopping block, also in asynchronous tests (`await asyncio.to_thread(engine.restart)`).
Everything ends with the test run, however that ends: see `guard`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from engine.environment import engine_python, router_program

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MODEL", "SPECULATION", "Engine", "Router", "Server"]

MODEL = Path(__file__).with_name("model")
SPECULATION = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
    "--per-request-spec-decode-metrics",
    "summary",
)
"""For `Engine`: drafts out of the tokens so far, and figures about them on the usage frame."""
READY_S = 300.0
"""The longest a server may take until `/health` answers; an engine usually takes 20 to 35 s."""

_GUARD = Path(__file__).with_name("guard.py")
_PACE = Path(__file__).with_name("pace")
_TAIL_LINES = 40


class Server:
    """A process that serves HTTP on one loopback port, started and ended at will; output goes to `log`."""

    name = "server"

    def __init__(self, command: Sequence[str], *, port: int, log: Path, environ: dict[str, str]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = list(command)
        self._environ = environ
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start, and return when `/health` says yes. Raises RuntimeError with the end of the log."""
        assert self._guard is None, f"the {self.name} runs already"
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environ,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.kill9()
            raise

    def stop(self) -> None:
        """Ask the server to end (SIGTERM), and return when it and all its children are gone."""
        self._end(b"")

    def kill9(self) -> None:
        """Kill the server, then all its children, as `kill -9` and a tidy operator would."""
        self._end(b"k")

    def restart(self) -> None:
        """Stop and start again, on the same port."""
        self.stop()
        self.start()

    @property
    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-_TAIL_LINES:])

    def _end(self, order: bytes) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(order)

    def _wait_until_healthy(self) -> None:
        assert self._guard is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if (status := self._guard.poll()) is not None:
                raise RuntimeError(f"the {self.name} ended with status {status}:\n{self.tail}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.25)
        raise RuntimeError(f"the {self.name} was not healthy after {READY_S:g} s:\n{self.tail}")


class Engine(Server):
    """vLLM with the tiny model, served as `tiny`. `arguments` are added to its command line."""

    name = "engine"

    def __init__(self, *arguments: str, log: Path) -> None:
        port = free_port()
        command = [
            *(str(engine_python()), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(MODEL), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port)),
            "--enable-scale-out",  # /inference/v1/generate answers 403 without
            "--enforce-eager",
            # In bfloat16 the engine uses AMX where the processor has it: without asking Linux to allow that,
            # which ends it by SIGILL, and with results that depend on what else is in the batch.
            *("--dtype", "float32", "--max-model-len", "8192"),
            # A seed together with a prefill in chunks ends the CPU engine.
            *("--max-num-batched-tokens", "32768"),
            # An engine that drafts takes no processors of logits.
            *(() if "--speculative-config" in arguments else ("--logits-processors", "steady:Steady")),
            *arguments,
        ]
        environ = {
            **_environ(),
            "PYTHONPATH": str(_PACE),
            "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /abort_requests, /sleep, /update_weight_version
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first request waits half a minute for a C++ compiler
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(command, port=port, log=log, environ=environ)

    def kill_core(self) -> None:
        """Kill the process that computes (`kill -9`), and leave the one that serves HTTP alone."""
        os.kill(self._core(), signal.SIGKILL)

    def _core(self) -> int:
        assert self._guard is not None
        (core,) = (pid for pid in _descendants(self._guard.pid) if _name(pid).startswith("VLLM::EngineCor"))
        return core


class Router(Server):
    """vllm-router in front of the engines at `urls`."""

    name = "router"

    def __init__(self, urls: Sequence[str], *arguments: str, log: Path) -> None:
        port = free_port()
        command = [
            str(router_program()),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            *("--worker-urls", *urls),
            *arguments,
        ]
        super().__init__(command, port=port, log=log, environ=_environ())


def free_port() -> int:
    """Return a loopback port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes below a process."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def _environ() -> dict[str, str]:
    """Of this process's environment, what a program of another environment may see."""
    ours = ("PYTHON", "VIRTUAL_ENV", "PYTEST_", "COV_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
