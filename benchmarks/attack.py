"""A balancer under attack, with an honest job of 64 ranks beside it: does the job miss rounds or wait longer?

python -m benchmarks.attack --json benchmarks/results/attack.json          # some ten minutes
python -m benchmarks.attack --quick                                        # some attacks, 10 s

Attackers have a token of their own, as the job has, and the lowest priority: the question is what the service does, not
whose cores it runs on. A round of the job counts as missed unless all 64 ranks get a plan. Before and after each attack
the same rounds run without one. The loop's longest turn is in time of its own thread: on a machine that others use too,
time on the clock says how busy they are. After the last attack the memory is read again as soon as the attackers' jobs
have expired. At the end a balancer is stopped while all that can be held open is held open.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks import attack_calls, attack_messages, attack_wires
from benchmarks.attack_client import TOKEN as HOSTILE
from benchmarks.attack_job import RANKS
from benchmarks.attack_job import TOKEN as HONEST
from benchmarks.attack_server import PROBE, Probe
from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import fork
from services.operations.launch import ServiceProcess
from services.security.tokens import hash_token

_QUICK = ("distinct_rounds", "wide_joins", "undecided_rounds", "closed_watches")
_HELD = ("closed_watches", "half_handshakes", "trickling_scrapers")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_GRACE_SECONDS = 5.0
_MAX_MEMORY = 512 << 20
_REMEMBERED_ROUNDS = 80  # from then on the job itself takes no more memory
_EXPIRY_SECONDS = 120.0  # of a job whose ranks have gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the service takes.

    Attributes:
        resident_mb: By it and its workers.
        counted_mb: By submissions, plans and streams, as it counts.
        jobs: That it knows.
    """

    resident_mb: float
    counted_mb: float
    jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One attack.

    Attributes:
        attack: Its name.
        rounds: Of the job meanwhile.
        missed: Those in which not all ranks got a plan.
        p99_ms: Of the job's rounds meanwhile.
        calm_p99_ms: Of its rounds just before and after.
        median_ms: Of the job's rounds meanwhile.
        calm_median_ms: Of its rounds just before and after.
        longest_turn_ms: The longest turn of the service's loop, in time of its thread.
        memory_mb: The most that the service and its workers had resident.
        memory_after_mb: The same afterwards.
        service_cores: What the service used.
        attacker_cores: What the attacker used.
        outcomes: What the attacker counted.
    """

    attack: str
    rounds: int
    missed: int
    p99_ms: float
    calm_p99_ms: float
    median_ms: float
    calm_median_ms: float
    longest_turn_ms: float
    memory_mb: float
    memory_after_mb: float
    service_cores: float
    attacker_cores: float
    outcomes: dict[str, object]


class Site:
    """A balancer, a job and an attacker, each a process.

    Attributes:
        folder: Of their files.
        service: The balancer.
    """

    def __init__(
        self, folder: Path, *, seconds: float, pace: float, rounds_before: int = 20, certificates: Path | None = None
    ) -> None:
        self.folder = folder
        tokens = {"tokens": [
            {"name": "honest", "sha256": hash_token(HONEST), "jobs": ["honest"]},
            {"name": "hostile", "sha256": hash_token(HOSTILE), "jobs": ["hostile-*"]},
        ]}  # fmt: skip
        (folder / "tokens.yml").write_text(yaml.safe_dump(tokens))
        self._probe = Probe(folder / "probe")
        flags = [
            "--metrics-port", "0", "--metrics-port-file", str(folder / "metrics"),
            "--token-file", str(folder / "tokens.yml"), "--grace-seconds", str(_GRACE_SECONDS),
            "--handshake-seconds", "3", "--max-memory", str(_MAX_MEMORY),
        ]  # fmt: skip
        if certificates is not None:
            server = [str(certificates / name) for name in ("server.pem", "server-key.pem", "server-ca.pem")]
            flags += ["--tls-certificate", server[0], "--tls-key", server[1], "--tls-client-ca", server[2]]
        self._log = (folder / "log").open("ab")
        balancer = ServiceProcess(
            module="benchmarks.attack_server",
            flags=tuple(flags),
            log_file=folder / "log",
            environment={**_ONE_THREAD, PROBE: str(folder / "probe")},
            spawn=fork,
        )
        balancer.start()
        self.service, self.port = balancer.running, balancer.port
        self.metrics_port = int((folder / "metrics").read_text())
        extra = [] if certificates is None else [str(certificates)]
        self._rounds = folder / "rounds"
        self._rounds.touch()
        self._job = self._fork("benchmarks.attack_job", str(self.port), str(self._rounds), str(pace), *extra)
        self._attacker = self._start(
            "benchmarks.attack_process", str(self.port), str(self.metrics_port), str(seconds), *extra
        )
        self._seconds = seconds
        deadline = time.monotonic() + 60
        while len(self.rounds_since(0.0)) < rounds_before:
            if time.monotonic() > deadline or self._job.poll() is not None:
                raise RuntimeError(f"the job does not run: {self.log[-2000:]}")
            time.sleep(0.1)

    @property
    def log(self) -> str:
        """What all processes wrote."""
        return (self.folder / "log").read_text(errors="replace")

    def rounds_since(self, since: float, until: float = float("inf")) -> list[tuple[float, bool]]:
        """Seconds of the job's rounds that began in between, and whether all ranks got a plan."""
        rows = [line.split() for line in self._rounds.read_text().splitlines()]
        return [(float(r[1]), int(r[2]) == RANKS) for r in rows if len(r) == 3 and since <= float(r[0]) < until]

    def attack(self, name: str, calm_seconds: float) -> Result:
        """Lets the job run alone, under attack, and alone again."""
        begin = time.monotonic()
        time.sleep(calm_seconds)
        self._probe.take()
        attacked, cpu = time.monotonic(), (_cpu(self.service.pid), _cpu(self._attacker.pid))
        self.begin(name)
        most = _resident(self.service.pid)
        assert self._attacker.stdout is not None
        while not select.select([self._attacker.stdout], [], [], 0.1)[0]:
            most = max(most, _resident(self.service.pid))
        outcomes = json.loads(self._attacker.stdout.readline().removeprefix("done"))
        ended = time.monotonic()
        used = _cpu(self.service.pid) - cpu[0], _cpu(self._attacker.pid) - cpu[1]
        turn = self._probe.take()
        time.sleep(calm_seconds)
        if self.service.poll() is not None:
            raise RuntimeError(f"the balancer ended ({self.service.poll()}) under {name}: {self.log[-3000:]}")
        if self._job.poll() is not None:
            raise RuntimeError(f"the job ended under {name}: {self.log[-3000:]}")
        during = self.rounds_since(attacked, ended)
        calm = self.rounds_since(begin, attacked) + self.rounds_since(ended)
        return Result(
            attack=name, rounds=len(during), missed=sum(not good for _, good in during),
            p99_ms=_percentile(during, 99), calm_p99_ms=_percentile(calm, 99), median_ms=_percentile(during, 50),
            calm_median_ms=_percentile(calm, 50), longest_turn_ms=1e3 * turn, memory_mb=most / 1e6,
            memory_after_mb=_resident(self.service.pid) / 1e6, service_cores=used[0] / (ended - attacked),
            attacker_cores=used[1] / (ended - attacked), outcomes=outcomes,
        )  # fmt: skip

    def memory(self) -> Memory:
        """What the service takes now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            rows = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[:1] != "#")
        return Memory(
            resident_mb=_resident(self.service.pid) / 1e6,
            counted_mb=float(rows["evenkeel_balancer_memory_used_bytes"]) / 1e6,
            jobs=int(float(rows["evenkeel_balancer_sessions"])),
        )

    def settle(self) -> tuple[float, Memory]:
        """Waits until no job is left but the honest one: for how long, and what the service takes then."""
        began = time.monotonic()
        while (memory := self.memory()).jobs > 1 and time.monotonic() - began < 1.5 * _EXPIRY_SECONDS:
            time.sleep(1)
        return time.monotonic() - began, memory

    def begin(self, name: str) -> None:
        """Starts an attack."""
        assert self._attacker.stdin is not None
        self._attacker.stdin.write(f"{name}\n")
        self._attacker.stdin.flush()

    def stop_service(self) -> tuple[float, int]:
        """Asks the balancer to stop; seconds until it has, and its exit code."""
        began = time.monotonic()
        self.service.send_signal(signal.SIGTERM)
        code = self.service.wait(60)
        return time.monotonic() - began, code

    def close(self) -> None:
        """Ends all processes."""
        for process in (self._attacker, self._job, self.service):
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            for pipe in (process.stdin, process.stdout) if isinstance(process, subprocess.Popen) else ():
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._log.close()

    def _fork(self, module: str, *arguments: str) -> subprocess.Popen[str] | zygote.Program:
        """A process that takes no input; in tests, without the start of an interpreter."""
        if zygote.is_warm():
            return zygote.Program(module, *arguments, output=self.folder / "log", errors=None, **_ONE_THREAD)
        return self._start(module, *arguments)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env={**os.environ, **_ONE_THREAD},
        )  # fmt: skip


@contextlib.contextmanager
def site(*, seconds: float, pace: float, rounds_before: int = 20, secure: bool = False) -> Iterator[Site]:
    """All processes, for the time of the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificates = _certificates(folder) if secure else None
        opened = Site(folder, seconds=seconds, pace=pace, rounds_before=rounds_before, certificates=certificates)
        try:
            yield opened
        finally:
            opened.close()


def measure(
    names: Sequence[str], *, secure: bool, seconds: float, calm: float, pace: float, settle: bool, out: Console
) -> Iterator[Result | dict[str, object]]:
    """One attack after another on one balancer; with `settle`, what its memory comes to afterwards."""
    if not names:
        return
    rounds = _REMEMBERED_ROUNDS if settle else 20
    with site(seconds=seconds, pace=pace, rounds_before=rounds, secure=secure) as opened:
        first = opened.memory()
        for name in names:
            result = opened.attack(name, calm)
            out.print(
                f"{name:26} rounds {result.rounds:4} missed {result.missed:3}  p99 {result.p99_ms:6.1f} ms (calm "
                f"{result.calm_p99_ms:6.1f})  turn {result.longest_turn_ms:6.1f} ms  {result.memory_mb:5.0f} MB then "
                f"{result.memory_after_mb:5.0f}  cores {result.service_cores:.2f}/{result.attacker_cores:.2f} "
                f"{result.outcomes or ''}"
            )
            yield result
        if settle:
            at_once = opened.memory()
            waited, last = opened.settle()
            told = {"before": asdict(first), "at_once": asdict(at_once), "seconds": waited, "after": asdict(last)}
            for when, memory in (("before", first), ("at once", at_once), (f"after {waited:.0f} s", last)):
                out.print(f"memory {when}: {memory.resident_mb:.0f} MB, {memory.counted_mb:.0f} of them counted, "
                          f"{memory.jobs} jobs")  # fmt: skip
            yield {"memory": told}


def measure_exit(names: Sequence[str], *, out: Console) -> Iterator[dict[str, object]]:
    """For each attack: SIGTERM while it goes on."""
    for name in names:
        with site(seconds=30.0, pace=10.0) as opened:
            opened.begin(name)
            time.sleep(4.0)
            seconds, code = opened.stop_service()
            out.print(f"SIGTERM under {name}: {seconds:.2f} s, exit code {code}")
            yield {"attack": name, "seconds": seconds, "exit_code": code, "grace_seconds": _GRACE_SECONDS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the attacks and prints what came of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some of the attacks, one second each")
    parser.add_argument("--only", nargs="+", help="names of attacks")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--pace", type=float, default=20.0, help="rounds of the job a second")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the processes end too
    out = Console(width=200, highlight=False)
    plain = [one.__name__ for one in (*attack_messages.attacks(), *attack_calls.attacks(), *attack_wires.attacks())]
    secure = [one.__name__ for one in attack_wires.attacks_on_tls()]
    seconds, calm, held = options.seconds, options.seconds / 2, list(_HELD)
    if options.quick:
        plain, secure, seconds, calm, held = list(_QUICK), [], 1.0, 0.5, ["closed_watches"]
    if options.only:
        plain = [name for name in plain if name in options.only]
        secure = [name for name in secure if name in options.only and name not in plain]
        held = [name for name in held if name in options.only]
    said: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "platform": platform.machine()},
        "seconds": seconds, "rounds_per_second": options.pace, "ranks": RANKS, "max_memory_bytes": _MAX_MEMORY,
        "plaintext": [], "mtls": [], "exits": [],
    }  # fmt: skip
    settle = not options.quick and not options.only
    parts: dict[str, Iterator[Any]] = {
        "plaintext": measure(plain, secure=False, seconds=seconds, calm=calm, pace=options.pace, settle=settle,
                             out=out),
        "mtls": measure(secure, secure=True, seconds=seconds, calm=calm, pace=options.pace, settle=False,
                        out=out),
        "exits": measure_exit(held, out=out),
    }  # fmt: skip
    table = Table("attack", "missed", "p99 over calm", "longest turn, ms", "memory, MB", title="64 ranks beside")
    for part, results in parts.items():
        for result in results:
            if isinstance(result, dict) and "memory" in result:
                said.update(result)
            else:
                said[part].append(asdict(result) if isinstance(result, Result) else result)
            if options.json is not None:
                options.json.write_text(json.dumps(said, indent=1) + "\n")
            if isinstance(result, Result):
                ratio = result.p99_ms / result.calm_p99_ms if result.calm_p99_ms else float("nan")
                table.add_row(result.attack, str(result.missed), f"{ratio:.2f}", f"{result.longest_turn_ms:.1f}",
                              f"{result.memory_mb:.0f}")  # fmt: skip
    out.print(table)


def _percentile(rounds: list[tuple[float, bool]], percent: float) -> float:
    return float(np.percentile([seconds for seconds, _ in rounds], percent)) * 1e3 if rounds else float("inf")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    """Memory of a process and its children that no other process has."""
    total = 0
    for one in (pid, *_children(pid)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        own = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [*own, *(two for one in own for two in _children(one))]
    return []


def _certificates(folder: Path) -> Path:
    import trustme

    from benchmarks.harness.authorities import write_certificate

    authority = trustme.CA()
    for name, issuer in (("server", authority), ("client", authority), ("stranger", trustme.CA())):
        write_certificate(issuer, folder / "tls", name)
    return folder / "tls"


if __name__ == "__main__":
    main()
