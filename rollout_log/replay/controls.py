"""What an engine answers beside generations: health, load, versions, aborts, pauses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from rollout_log import __version__
from rollout_log.engines.wire import object_in
from rollout_log.errors import RolloutLogError
from rollout_log.http_message import Request
from rollout_log.replay.desk import Desk
from rollout_log.replay.faults import Faults

__all__ = ["Answer", "Controls", "settle", "settle_sync"]

_HEALTH = {"/", "/health", "/health_generate", "/ping"}
_METRICS = """\
# HELP vllm:num_requests_running Number of requests being served.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{model}"}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{model}"}} 0
"""


class Answer(NamedTuple):
    """One answer; it waits until `when` is true, where that is given."""

    status: int
    body: bytes
    content_type: str = "application/json"
    when: Callable[[], bool] | None = None


async def settle(answer: Answer) -> None:
    """Wait until an answer may be given."""
    while answer.when is not None and not answer.when():  # noqa: ASYNC110 - rare, and it has no event
        await asyncio.sleep(0.01)


def settle_sync(answer: Answer) -> None:
    """As `settle`, blocking."""
    while answer.when is not None and not answer.when():
        time.sleep(0.01)


class Controls:
    """The control endpoints of vLLM and SGLang, over one desk."""

    def __init__(self, desk: Desk, url: str = "", *, loopback: bool = True) -> None:
        self.desk = desk
        self.url = url
        """The server's own address."""
        self.loopback = loopback
        """Only then may a client ask for faults."""

    @property
    def weight_version(self) -> str:
        """What a client last set, else the one that the recording began with."""
        recorded = (each.weight_version for each in self.desk.matcher.recordings)
        return self.desk.weight_version or next(filter(None, recorded), "default")

    def answer(self, request: Request) -> Answer | None:
        """Answer a control request; None for any other."""
        path = request.path.rstrip("/") or "/"
        if request.method == "POST":
            return self._post(path, request)
        if path.startswith("/_rollout_log/"):
            return self._own(path, request)
        if request.method in {"GET", "HEAD"}:
            return self._get(path)
        return None

    def _get(self, path: str) -> Answer | None:
        running = len(self.desk.playing)
        if path in _HEALTH:
            return Answer(200, b"", "text/plain")
        if path == "/metrics":
            text = _METRICS.format(model=self._models()[0], running=running)
            return Answer(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        answers: dict[str, dict[str, Any]] = {
            "/version": {"version": f"rollout-log-{__version__}"},
            "/v1/models": {
                "object": "list",
                "data": [
                    {"id": model, "object": "model", "owned_by": "rollout-log"} for model in self._models()
                ],
            },
            "/workers": {"workers": [{"url": self.url, "is_healthy": True}], "total": 1},
            "/list_workers": {"urls": [self.url]},
            "/load": {"server_load": running},
            "/v1/loads": {
                "loads": [
                    {
                        "num_running_reqs": running,
                        "num_waiting_reqs": 0,
                        "num_total_reqs": running,
                    }
                ]
            },
            "/is_paused": {"is_paused": not self.desk.gate.open},
            "/weight_info": {"weight_version": self.weight_version},
            "/get_weight_version": {"weight_version": self.weight_version},
            "/model_info": {"model_path": self._models()[0], "weight_version": self.weight_version},
            "/get_model_info": {"model_path": self._models()[0], "weight_version": self.weight_version},
        }
        return _json(answers[path]) if path in answers else None

    def _post(self, path: str, request: Request) -> Answer | None:
        body = object_in(request.body)
        desk = self.desk
        if path == "/inference/v1/abort_requests":
            desk.abort(_ids(body.get("request_ids")) or [])
            return Answer(200, b"", "text/plain")
        if path == "/abort_requests":
            return _json({"status": "aborted", "aborted": desk.abort(_ids(body.get("request_ids")))})
        if path == "/abort_request":
            everything = body.get("abort_all") or not body.get("rid")
            desk.abort(None if everything else _ids(body["rid"]))
            return Answer(200, b"", "text/plain")
        if path in {"/pause", "/pause_generation"}:
            query = parse_qs(request.query)
            mode = str(body.get("mode") or query.get("mode", ["abort"])[0])
            if mode not in {"abort", "keep", "wait", "retract", "in_place"}:
                return _json({"error": f"mode is {mode!r}, not abort, keep or wait"}, 400)
            desk.pause("keep" if mode in {"retract", "in_place"} else mode)
            when = (lambda: not desk.running) if mode in {"abort", "wait"} else None
            return _json({"status": "paused"})._replace(when=when)
        if path in {"/resume", "/continue_generation"}:
            desk.resume()
            return _json({"status": "resumed"})
        if path == "/update_weight_version":
            version = body.get("new_version", body.get("weight_version"))
            if version is None:
                return _json({"success": False, "message": "new_version is missing"}, 400)
            desk.weight_version = str(version)
            return _json({"success": True, "message": "", "new_version": self.weight_version})
        return self._own(path, request) if path.startswith("/_rollout_log/") else None

    def _own(self, path: str, request: Request) -> Answer | None:
        if path == "/_rollout_log/report" and request.method == "GET":
            return _json(self.desk.report()._asdict())
        if path != "/_rollout_log/faults":
            return None
        if not self.loopback:
            return _json({"error": "only a server on a loopback address takes faults"}, 403)
        if request.method == "DELETE":
            self.desk.faults = None
        elif request.method == "POST":
            try:
                self.desk.faults = Faults.parse(request.body.decode("utf-8", "replace"))
            except RolloutLogError as error:
                return _json({"error": str(error)}, 400)
        faults = self.desk.faults or Faults(rate=0)
        return _json({name: getattr(faults, name) for name in faults.__struct_fields__})

    def _models(self) -> list[str]:
        models = dict.fromkeys(each.model for each in self.desk.matcher.recordings if each.model)
        return list(models) or ["recorded"]


def _ids(value: Any) -> list[str] | None:
    if value is None:
        return None
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())
