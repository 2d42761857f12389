"""Every kind of fault, to be injected at a random instant of a running job."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import grpc

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.crew import Run
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Ask, Hook, Refused, Relay
from evenkeel.protocol import balancer_pb2 as pb

MAX_STEPS = 200  # of waiting for a fault to meet a message
RARE = 0.3  # weight of a restart, which takes seconds

Change = Callable[[pb.PlanRoundResponse], None]


class Harm:
    """Harms a job between its lead and the balancer: TCP proxy, relay, balancer.

    Each kind is a function that returns whether the fault has happened; `heal` undoes what lasts.
    """

    def __init__(self, rng: random.Random, balancer: ServiceProcess, relay: Relay, proxy: TcpProxy) -> None:
        self._rng = rng
        self._balancer = balancer
        self._relay = relay
        self._proxy = proxy
        statuses = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "PERMISSION_DENIED", "INVALID_ARGUMENT", "UNKNOWN")
        self._kinds: dict[str, Callable[[Run], bool]] = {
            "killed, restarted at once": lambda run: self._restart(run, late=False, drain=False),
            "killed, restarted late": lambda run: self._restart(run, late=True, drain=False),
            "drained and restarted": lambda run: self._restart(run, late=False, drain=True),
            "paused shortly": lambda run: self._pause(run, 0.05),
            "paused for long": lambda run: self._pause(run, 1.5 * run.steps.timeout),
            "connections reset": lambda run: self._proxy.reset() > 0,
            "connections half closed": lambda run: self._proxy.half_close() > 0,
            "network slow": lambda run: self._network(run, "delay", 0.2, "delayed"),
            "network throttled": lambda run: self._network(run, "rate", 3000.0, "throttled"),
            "network loses all": lambda run: self._network(run, "swallow", True, "swallowed"),
            "connections refused": self._refuse,
            "cut in mid-message": self._cut,
            "answer lost": lambda run: self._once(run, _held(after=1.2 * run.steps.timeout, lost=True)),
            "answer late": lambda run: self._once(run, _held(after=rng.uniform(0.01, 2.0) * run.steps.timeout)),
            "request late": lambda run: self._once(run, _held(before=rng.uniform(0.01, 2.0) * run.steps.timeout)),
            "request doubled": lambda run: self._once(run, lambda request, ask: (ask(request), ask(request))[1]),
            "request garbled": lambda run: self._once(run, lambda request, ask: ask(_garbled(request, rng))),
            "answers in another order": self._reorder,
            "answer of an earlier round": self._stale,
            **{f"answer: {status}": self._status(grpc.StatusCode[status]) for status in statuses},
            **{f"answer: {name}": self._garbled(change) for name, change in _CHANGES.items()},
        }
        self._kinds["answer garbled"] = lambda run: self._once(run, lambda request, ask: _garbled(ask(request), rng))
        self._kinds["answer empty"] = lambda run: self._once(run, lambda request, ask: b"")
        self._kinds["answer cut"] = lambda run: self._once(run, lambda request, ask: _cut_short(ask(request), rng))

    def pick(self) -> str:
        """A kind by weight."""
        weights = [RARE if "restarted" in kind else 1.0 for kind in self._kinds]
        return self._rng.choices(list(self._kinds), weights)[0]

    def inject(self, kind: str, run: Run) -> bool:
        """Injects a fault; returns whether it met anything."""
        return self._kinds[kind](run)

    def heal(self) -> None:
        """Undoes every fault that lasts."""
        self._proxy.heal()
        self._relay.heal()

    # ------------------------------------------------------------------ of the balancer and the network

    def _wait(self, run: Run, happened: Callable[[], bool]) -> bool:
        for _ in range(MAX_STEPS):
            if happened():
                return True
            run.until()
        return happened()

    def _restart(self, run: Run, *, late: bool, drain: bool) -> bool:
        if drain:
            assert self._balancer.stop() == 0, self._balancer.log[-2000:]
        else:
            self._balancer.kill()
        if late:
            run.until(times=self._rng.randint(1, 30))
        self._balancer.start()
        return True

    def _pause(self, run: Run, seconds: float) -> bool:
        self._balancer.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._balancer.signal(signal.SIGCONT)
        return True

    def _network(self, run: Run, harm: str, value: object, name: str) -> bool:
        before = self._proxy.seen[name]
        setattr(self._proxy, harm, value)
        happened = self._wait(run, lambda: self._proxy.seen[name] > before)
        run.until(times=self._rng.randint(1, 5))
        self._proxy.heal()
        return happened

    def _refuse(self, run: Run) -> bool:
        before = self._proxy.seen["refused"]
        self._proxy.refuse = True
        self._proxy.reset()
        happened = self._wait(run, lambda: self._proxy.seen["refused"] > before)
        self._proxy.heal()
        return happened

    def _cut(self, run: Run) -> bool:
        self._proxy.cut_after = self._rng.randint(1, 600)
        return self._wait(run, lambda: self._proxy.cut_after is None)

    # ------------------------------------------------------------------ of single calls

    def _once(self, run: Run, hook: Hook) -> bool:
        """Harms the next call."""
        lock, met = threading.Lock(), threading.Event()

        def harm(request: bytes, ask: Ask) -> bytes:
            with lock:
                first = not met.is_set()
                met.set()
            return hook(request, ask) if first else ask(request)

        self._relay.hook = harm
        return self._wait(run, met.is_set)

    def _status(self, status: grpc.StatusCode) -> Callable[[Run], bool]:
        def refuse(request: bytes, ask: Ask) -> bytes:
            raise Refused(status)

        return lambda run: self._once(run, refuse)

    def _garbled(self, change: Change) -> Callable[[Run], bool]:
        def forge(request: bytes, ask: Ask) -> bytes:
            answer = pb.PlanRoundResponse.FromString(ask(request))
            change(answer)
            return answer.SerializeToString()

        return lambda run: self._once(run, forge)

    def _reorder(self, run: Run) -> bool:
        """Gives each of two calls the other's answer; a call without another under way waits for the next."""
        lock, turned, met = threading.Lock(), threading.Event(), threading.Event()
        kept: list[bytes] = []

        def swap(request: bytes, ask: Ask) -> bytes:
            answer = ask(request)
            with lock:
                kept.append(answer)
                mine = len(kept)
                if mine == 2:
                    turned.set()
            if mine > 2:
                return answer
            turned.wait(run.steps.timeout)
            if len(kept) < 2:
                return answer
            met.set()
            return kept[2 - mine]

        self._relay.hook = swap
        return self._wait(run, met.is_set)

    def _stale(self, run: Run) -> bool:
        earlier: list[bytes] = []
        met = threading.Event()

        def repeat(request: bytes, ask: Ask) -> bytes:
            answer = ask(request)
            earlier.append(answer)
            if len(earlier) > 3 and not met.is_set():
                met.set()
                return earlier[0]
            return answer

        self._relay.hook = repeat
        return self._wait(run, met.is_set)


def _held(before: float = 0.0, after: float = 0.0, lost: bool = False) -> Hook:
    """A call that is held up, and may lose its answer."""

    def hold(request: bytes, ask: Ask) -> bytes:
        time.sleep(before)
        answer = ask(request)
        time.sleep(after)
        if lost:
            raise Refused(grpc.StatusCode.UNAVAILABLE)
        return answer

    return hold


def _garbled(data: bytes, rng: random.Random) -> bytes:
    """With one to eight bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= rng.randint(1, 255)
    return bytes(changed)


def _cut_short(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _changed(**fields: Callable[[pb.PlanRoundResponse], bytes]) -> Change:
    """An answer some of whose fields are others."""

    def change(answer: pb.PlanRoundResponse) -> None:
        for name, value in {name: make(answer) for name, make in fields.items()}.items():
            setattr(answer, name, value)

    return change


_CHANGES: dict[str, Change] = {
    "all to rank 0": _changed(destinations=lambda answer: bytes(len(answer.destinations))),  # a plan, not the best
    "ranks that are none": _changed(destinations=lambda answer: b"\xff" * len(answer.destinations)),
    "destinations missing": _changed(destinations=lambda answer: answer.destinations[:-2] or b"\0\0"),
    "loads that are NaN": _changed(loads_after=lambda answer: b"\xff" * len(answer.loads_after)),
    "figures missing": lambda answer: answer.ClearField("figures"),
    "parts that are none": _changed(
        part_samples=lambda answer: os.urandom(4 * len(answer.destinations)),
        part_begins=lambda answer: os.urandom(4 * len(answer.destinations)),
        pieces=lambda answer: os.urandom(56),
    ),
}
