"""Every kind of fault, to be injected at a random instant of a running job."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.crew import Run
from benchmarks.harness.forged_nodes import ANSWERS, CONTRADICTED, SUBMITS, UNTOLD, Change, held
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Relay
from evenkeel.protocol import balancer_pb2 as pb

MAX_STEPS = 40  # of waiting for a fault to meet a message


class Harm:
    """Harms a job between its ranks and the balancer: ranks, TCP proxy, relay, balancer.

    Each kind is a method that returns whether the fault has happened; `heal` undoes what lasts.
    """

    def __init__(
        self, rng: random.Random, world_size: int, balancer: ServiceProcess, relay: Relay, proxy: TcpProxy
    ) -> None:
        self._rng = rng
        self._world_size = world_size
        self._balancer = balancer
        self._relay = relay
        self._proxy = proxy
        self._kinds: dict[str, tuple[float, Callable[[Run], bool]]] = {
            "killed, restarted at once": (1.0, lambda run: self._restart(run, late=False, drain=False)),
            "killed, restarted late": (1.0, lambda run: self._restart(run, late=True, drain=False)),
            "drained and restarted": (1.0, lambda run: self._restart(run, late=False, drain=True)),
            "paused shortly": (3.0, lambda run: self._pause(run, 0.3 * run.steps.timeout)),
            "paused for long": (3.0, lambda run: self._pause(run, 3.0 * run.steps.timeout)),
            "connections reset": (6.0, lambda run: self._proxy.reset() > 0),
            "connections half closed": (5.0, lambda run: self._proxy.half_close() > 0),
            "network slow": (3.0, lambda run: self._network(run, "delay", 0.6 * run.steps.timeout, "delayed")),
            "network throttled": (3.0, lambda run: self._network(run, "rate", 3000.0, "throttled")),
            "network loses all": (3.0, lambda run: self._network(run, "swallow", True, "swallowed")),
            "connections refused": (3.0, self._refuse),
            "cut in mid-message": (6.0, self._cut),
            "answer lost": (6.0, lambda run: self._answer(run, lambda answer: [])),
            "answer doubled": (5.0, lambda run: self._answer(run, lambda answer: [answer, answer])),
            "answer late": (5.0, lambda run: self._answer(run, self._late(run.steps.timeout))),
            "answers reordered": (5.0, self._reorder),
            "stale answer": (5.0, self._stale),
            "other incarnation": (5.0, lambda run: self._answer(run, _forge_instance)),
            "digest differs": (5.0, lambda run: self._answer(run, _forge_digest)),
            "transfers differ": (5.0, lambda run: self._answer(run, _forge_totals)),
            "answer unreadable": (5.0, lambda run: self._answer(run, _forge_nonsense)),
            "submission lost": (6.0, lambda run: self._submit(run, lambda submit: [])),
            "submission doubled": (5.0, lambda run: self._submit(run, lambda submit: [submit, submit])),
            "submission late": (5.0, lambda run: self._submit(run, self._late(run.steps.timeout))),
        }
        doubled: dict[str, Change] = {"doubled": lambda message: [message, message]}
        answers, submits = ANSWERS | UNTOLD | doubled, SUBMITS | doubled | {"contradicted": CONTRADICTED}
        submits["lost"] = lambda message: []
        self._of_nodes: dict[str, tuple[float, Callable[[Run], bool]]] = {
            "node's answers reordered": (5.0, lambda run: self._reorder(run, "answer_groups", 0)),
        }
        for what, side, found in (("answer", "answer_groups", answers), ("submission", "submit_groups", submits)):
            for name, change in found.items():
                self._of_nodes[f"node's {what}: {name}"] = 2.0, partial(self._once, side=side, change=change, victim=0)
            self._of_nodes[f"node's {what} late"] = 5.0, partial(self._hold_node, side=side)

    def pick(self, run: Run) -> str:
        """A kind by weight: restarts take seconds, so they are rarer."""
        kinds = self._all(run)
        return self._rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]

    def inject(self, kind: str, run: Run) -> bool:
        """Injects a fault; returns whether it met anything."""
        return self._all(run)[kind][1](run)

    def _all(self, run: Run) -> dict[str, tuple[float, Callable[[Run], bool]]]:
        return self._kinds | self._of_nodes if run.steps.node_size else self._kinds

    def heal(self) -> None:
        """Undoes every fault that lasts."""
        self._proxy.heal()
        self._relay.heal()

    # ------------------------------------------------------------------ kinds

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
            run.until(seconds=20.0, times=self._rng.randint(1, 30))
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

    def _late(self, timeout: float) -> Change:
        seconds = self._rng.uniform(0.2, 2.0) * timeout
        return lambda message: held(message, seconds)

    def _answer(self, run: Run, change: Change) -> bool:
        return self._once(run, "answers", change)

    def _submit(self, run: Run, change: Change) -> bool:
        return self._once(run, "submits", change)

    def _hold_node(self, run: Run, side: str) -> bool:
        return self._once(run, side, self._late(run.steps.timeout), 0)

    def _alone(self, run: Run) -> int:
        """A rank that has a stream of its own."""
        return self._rng.randrange(run.steps.node_size, self._world_size)

    def _once(self, run: Run, side: str, change: Change, victim: int | None = None) -> bool:
        """Changes one message of the stream of a rank, by default of one that has a stream of its own."""
        victim, done = self._alone(run) if victim is None else victim, threading.Event()

        def pass_on(rank: int, message: Any) -> Iterable[Any]:
            with self._relay.lock:
                if rank != victim or done.is_set() or (others := change(message)) is None:
                    return [message]
                done.set()
            return others

        setattr(self._relay, side, pass_on)
        return self._wait(run, done.is_set)

    def _reorder(self, run: Run, side: str = "answers", victim: int | None = None) -> bool:
        victim, kept, done = self._alone(run) if victim is None else victim, list[Any](), threading.Event()

        def answers(rank: int, answer: Any) -> list[Any]:
            with self._relay.lock:
                if rank != victim or done.is_set():
                    return [answer]
                if not kept:
                    kept.append(answer)
                    return []
                done.set()
                return [answer, kept[0]]

        setattr(self._relay, side, answers)
        return self._wait(run, done.is_set)

    def _stale(self, run: Run) -> bool:
        earlier: dict[int, pb.Answer] = {}
        done = threading.Event()

        def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
            with self._relay.lock:
                old = earlier.setdefault(rank, answer)
                if old.round < answer.round:
                    done.set()
                    return [old, answer, old]
                return [answer]

        self._relay.answers = answers
        return self._wait(run, done.is_set)


def _changed(answer: pb.Answer) -> pb.Answer:
    other = pb.Answer()
    other.CopyFrom(answer)
    return other


def _forge_instance(answer: pb.Answer) -> list[pb.Answer]:
    forged = _changed(answer)
    forged.decision.instance ^= 1
    return [forged]


def _forge_digest(answer: pb.Answer) -> list[pb.Answer]:
    forged = _changed(answer)
    forged.decision.digest = bytes(16)
    return [forged]


def _forge_totals(answer: pb.Answer) -> list[pb.Answer]:
    forged = _changed(answer)
    totals = bytearray(forged.decision.source_totals)
    if totals:
        totals[0] ^= 1
    forged.decision.source_totals = bytes(totals)
    return [forged]


def _forge_nonsense(answer: pb.Answer) -> list[pb.Answer]:
    forged = _changed(answer)
    forged.decision.outcome = 77  # type: ignore[assignment]
    forged.decision.sources = b"\1\2\3"
    return [forged]
