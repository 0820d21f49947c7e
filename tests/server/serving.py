"""The servers that the tests of this folder talk to: which there are, how they are started, what must hold after every
test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from deepinfer_plugin.local_server import LocalServer

ANSWER_S = 240  # a request that takes longer than this on a loaded machine hangs
IDLE_S = 60
GRACE_S = 1  # SGLang takes longer to say goodbye than anybody here wants to wait

# SGLang checks at every idle moment that free, evictable and protected pages add up and that every request row came
# back, and dies if not. Here it does so after every step as well, and looks for pages with two owners; our own debug
# mode checks on every forward that each window row holds the position it is read as. And no machine needs a compiler.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "DEEPINFER_DEBUG": "1",
    "CXX": "/nonexistent",
    "OMP_NUM_THREADS": "1",
}
TRAINED = Path(__file__).parents[2] / "examples" / "train_tiny" / "checkpoint"


@dataclass(frozen=True)
class Variant:
    """One way to serve. ``chunk``: rows of a prefill step, None for the whole prompt at once; ``checkpoint``: None for
    the tiny one."""

    page_size: int
    chunk: int | None
    replay: bool
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    retracts: bool = False
    slots: int = 32
    checkpoint: Path | None = None


def _retract(interval: int) -> dict[str, str]:
    """A running request is retracted every so many forwards. More often than every 17th, and long answers on servers
    that recompute prefixes are mostly prefills."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(interval)}


def _small(*flags: str) -> tuple[str, ...]:
    return ("--max-running-requests", "8", *flags)


def _speculating(mode: str, *flags: str) -> tuple[str, ...]:
    return ("--deepinfer-speculation", mode, *flags)


SEEDED = "--enable-deterministic-inference"
SHORT = 1024  # tokens of context where the longest request is to end soon


# Tests run in this order, so that each server starts once and is stopped before the next but one starts. "default" and
# "trained" have the flags that users start with, none: they speculate, as many drafts as pay.
VARIANTS = {
    "default": Variant(128, 512, replay=True),
    "retracting": Variant(
        64,
        256,
        replay=True,
        # Room for one long request, or a handful of short ones: pages are evicted, and run out.
        flags=(
            *_small("--page-size", "64", "--chunked-prefill-size", "256", "--disable-overlap-schedule"),
            *_speculating("off", "--max-total-tokens", "4096"),
        ),
        env=_retract(5),
        retracts=True,
        slots=8,
    ),
    "exact": Variant(
        128,
        128,
        replay=False,
        flags=_small(*_speculating("off", "--deepinfer-exact-prefix", "--chunked-prefill-size", "128")),
        env=_retract(5),
        retracts=True,
        slots=8,
    ),
    "whole": Variant(
        64,
        None,
        replay=False,
        flags=(
            *_small("--deepinfer-exact-prefix", "--page-size", "64", "--chunked-prefill-size", "-1", SEEDED),
            *_speculating("off", "--log-requests", "--log-requests-level", "3"),
        ),
        slots=8,
    ),
    "speculating": Variant(128, 512, replay=True, flags=_speculating("fixed", "--context-length", str(SHORT))),
    "speculating exact": Variant(
        64,
        128,
        replay=False,
        flags=(
            *_small("--deepinfer-exact-prefix", "--chunked-prefill-size", "128", SEEDED),
            *_speculating("fixed", "--page-size", "64", "--disable-overlap-schedule"),
        ),
        env=_retract(17),
        retracts=True,
        slots=8,
    ),
    "scheduled": Variant(
        128,
        128,
        replay=False,
        flags=(
            *_small("--deepinfer-exact-prefix", "--chunked-prefill-size", "128", SEEDED),
            *_speculating("scheduled", "--enable-metrics"),
        ),
        env=_retract(17),
        retracts=True,
        slots=8,
    ),
    "trained": Variant(128, 512, replay=True, checkpoint=TRAINED),
}


class ServerFault(AssertionError):
    """The server died, hung or answered 5xx; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Answer:
    """What ``/generate`` said: new token ids and the meta_info beside them."""

    ids: list[int]
    meta: dict[str, Any]

    @property
    def cached(self) -> int:
        return self.meta["cached_tokens"]

    @property
    def replayed(self) -> int:
        return self.meta["replayed_tokens"]


class Served:
    """A client of one running server."""

    def __init__(self, name: str, server: LocalServer):
        self.name, self.server, self.variant = name, server, VARIANTS.get(name)

    # ---- requests ----------------------------------------------------------------------------------------------

    def post(self, path: str, *, stream: bool = False, **body: Any) -> requests.Response:
        """The response, whatever its status below 500."""
        if stream:
            body["stream"] = True
        try:
            response = requests.post(f"{self.server.url}{path}", json=body, timeout=ANSWER_S, stream=stream)
        except requests.RequestException as error:
            raise self.fault(f"{path}: {error}") from None
        if response.status_code >= 500:
            raise self.fault(f"{path}: {response.status_code} {response.text[:500]}")
        return response

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that must be 200."""
        response = self.post(path, **body)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:500]}"
        return response.json()

    def refused(self, path: str, **body: Any) -> str:
        """The text of an answer that must be 400."""
        response = self.post(path, **body)
        assert response.status_code == 400, f"{path}: {response.status_code} {response.text[:500]}"
        return response.text

    def generate(
        self, ids: Sequence[int], count: int, *, sampling: dict[str, Any] | None = None, **body: Any
    ) -> Answer:
        """Exactly ``count`` greedy tokens after ``ids``, unless ``sampling`` says otherwise."""
        found = self.ask("/generate", input_ids=list(ids), sampling_params=_greedy(count, sampling), **body)
        return Answer(found["output_ids"], found["meta_info"])

    def stream(self, ids: Sequence[int], count: int) -> Iterator[Answer]:
        """The answer so far, after every token; closing the iterator drops the connection."""
        body = {"input_ids": list(ids), "sampling_params": _greedy(count, None)}
        with self.post("/generate", stream=True, **body) as response:
            for event in self.events(response):
                if "error" in event:
                    raise self.fault(f"/generate: {event}")
                yield Answer(event["output_ids"], event["meta_info"])

    def events(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        """The JSON of each server-sent event."""
        assert response.status_code == 200, f"{response.status_code} {response.text[:500]}"
        try:
            for line in response.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[6:])
        except requests.RequestException as error:
            raise self.fault(f"stream: {error}") from None

    def together(self, work: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], at_once: int) -> Iterator[Any]:
        """``work(*arguments)`` for each, ``at_once`` of them at any time: as one ends, the next joins the rest.
        Results come in the order of ``arguments``, each as soon as it is there."""
        with ThreadPoolExecutor(at_once) as pool:
            yield from (done.result() for done in [pool.submit(work, *each) for each in arguments])

    # ---- state -------------------------------------------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        try:
            return requests.get(f"{self.server.url}/v1/loads", timeout=30).json()["loads"][0]
        except requests.RequestException as error:
            raise self.fault(f"/v1/loads: {error}") from None

    def wait_idle(self) -> None:
        """Wait until no request is left, then check that nothing is held: all pages are free or evictable.
        (A leaked request row or page makes SGLang's own check at that moment end the server.)"""
        deadline = time.monotonic() + IDLE_S
        load = self.load()
        while load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"]:
            if time.monotonic() > deadline:
                raise self.fault(f"pools did not come back: {load}")
            time.sleep(0.05)
            load = self.load()
        if self.server.process is None or self.server.process.poll() is not None:
            raise self.fault("the server died")

    def flush(self) -> None:
        """Forget all cached prefixes; every page must then be free."""
        self.wait_idle()
        response = self.post("/flush_cache")
        assert response.status_code == 200, response.text
        self.wait_idle()

    def log(self) -> str:
        return self.server.log.read_text(errors="replace")

    def fault(self, what: str) -> ServerFault:
        return ServerFault(f"server {self.name!r}: {what}\n--- log ---\n{self.server.tail(60)}")


def _greedy(count: int, sampling: dict[str, Any] | None) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **(sampling or {})}


class Servers:
    """Starts servers as tests ask for them, on the checkpoint at ``model_path`` unless a variant has its own. While one
    works the next one planned starts up beside it; never more than two are alive."""

    def __init__(
        self, model_path: Path, logs: Path, planned: Sequence[str], variants: Mapping[str, Variant] = VARIANTS
    ):
        self.model_path, self.logs, self.planned, self.variants = model_path, logs, list(planned), variants
        self.alive: dict[str, Served] = {}

    def begin(self) -> None:
        """Start the first one planned, beside whatever runs before it is asked for."""
        if self.planned and not self.alive:
            self._start(self.planned[0])

    def get(self, name: str) -> Served:
        if name in self.alive and self.alive[name].server.process.poll() is not None:  # type: ignore[union-attr]
            self.alive.pop(name).server.stop()  # a fault fails one test, not all that follow
        following = self._following(name)
        for other in [other for other in self.alive if other not in (name, following)]:
            self.alive.pop(other).server.stop(GRACE_S)
        served = self.alive.get(name) or self._start(name)
        if not served.server.ready_s:
            served.server.wait_ready()
        if following is not None and following not in self.alive:
            self._start(following)
        return served

    def _following(self, name: str) -> str | None:
        after = self.planned[self.planned.index(name) + 1 :] if name in self.planned else []
        return after[0] if after else None

    def _start(self, name: str) -> Served:
        variant = self.variants[name]
        server = LocalServer(
            variant.checkpoint or self.model_path,
            *variant.flags,
            log=self.logs / f"{name}.log",
            env={**CHECKS, "XDG_CACHE_HOME": str(self.logs), **variant.env},
        )
        server.start()
        self.alive[name] = Served(name, server)
        return self.alive[name]

    def stop(self) -> None:
        for served in self.alive.values():
            served.server.stop(GRACE_S)
        self.alive.clear()
