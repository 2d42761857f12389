"""Prometheus metrics of each rank: an optional exporter, `pip install 'evenkeel[metrics]'`.

exporter = RankExporter.start(rank=rank, job="train-42", port=9200 + local_rank)
for batch in exporter.watch(loader): ...
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from prometheus_client import start_http_server

from trainer_client.balancing import BalancedLoader, Counters, RoundReport
from trainer_client.balancing.adapters.launchers import local_rank
from trainer_client.embedding.routing.ownership import RoutingLike
from trainer_client.embedding.routing.skew import feature_skew
from trainer_client.observing.measurement import Mark
from trainer_client.observing.measures import RankMeasures

__all__ = ["RankExporter", "RankMeasures"]

B = TypeVar("B")

_ENVIRONMENT = "EVENKEEL_METRICS_PORT"
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_exporters: set[RankExporter] = set()  # those that serve


class RankExporter:
    """The metrics of one rank on an HTTP port of their own.

    Attributes:
        measures: What it counts; use it directly in loops that `watch` does not fit.
        port: The bound port.
    """

    def __init__(self, measures: RankMeasures, port: int, closing: contextlib.ExitStack) -> None:
        self.measures = measures
        self.port = port
        self._closing = closing
        self._key_calls = 0
        self._steps: deque[tuple[str, RoundReport, Mark, Mark, Mark]] = deque()  # not yet known to be over
        _exporters.add(self)

    @classmethod
    def start(
        cls,
        *,
        job: str,
        rank: int,
        host: str = "127.0.0.1",
        port: int = 0,
        targets: str | os.PathLike[str] | None = None,
        advertise: str | None = None,
    ) -> RankExporter:
        """Starts serving.

        Args:
            job: The training job, as the balancer knows it.
            rank: This rank within the group that balances together.
            host: Address to listen on; the metrics are readable for everybody who reaches it.
            port: Port to listen on; 0 picks a free one.
            targets: Folder that Prometheus watches (`file_sd_configs`): the exporter writes its address there and takes
                it away when it stops.
            advertise: The host that Prometheus reaches this one by; default: `host`, or this machine's name where that
                stands for all addresses (`0.0.0.0`, `::`).

        Raises:
            ValueError: If the port is out of range.
            OSError: If the port is taken, or the folder of targets cannot be written to.
        """
        if not 0 <= port < 65536:
            raise ValueError(f"port is {port}; use 0 for a free one, or 1 to 65535")
        measures = RankMeasures(job=job, rank=rank)
        try:
            server, thread = start_http_server(port, addr=host, registry=measures.registry)
        except OSError as error:
            text = f"metrics cannot be served on {host}:{port}: {error.strerror}; choose another host or port"
            raise OSError(error.errno, text) from None

        closing = contextlib.ExitStack()
        for step in (thread.join, server.server_close, server.shutdown):  # the last is called first
            closing.callback(step)
        if targets is not None:
            try:
                address = _reached_at(advertise, host, server.server_port)
                target_file = _write_target(Path(targets), job, rank, address)
            except OSError as error:
                closing.close()
                text = f"targets is {str(targets)!r}, where no file can be written: {error.strerror}"
                raise OSError(error.errno, text) from None
            closing.callback(target_file.unlink, missing_ok=True)
        return cls(measures, int(server.server_port), closing)

    @classmethod
    def from_env(cls, *, job: str, rank: int) -> RankExporter | None:
        """What the environment says: `EVENKEEL_METRICS_PORT` is the port of local rank 0 (0: any free one; unset: no
        exporter), `EVENKEEL_METRICS_HOST` the address, `EVENKEEL_METRICS_TARGETS` the folder of the target files and
        `EVENKEEL_METRICS_ADVERTISE` the host in them.

        Raises:
            ValueError: If the port is no number.
        """  # noqa: D205
        value = os.environ.get(_ENVIRONMENT, "").strip()
        if not value:
            return None
        if not value.isdecimal():
            raise ValueError(f"{_ENVIRONMENT} is {value!r}; give a port number, or 0 for any free one")
        first = int(value)
        return cls.start(
            job=job,
            rank=rank,
            host=os.environ.get("EVENKEEL_METRICS_HOST") or "127.0.0.1",
            port=first + local_rank() if first else 0,
            targets=os.environ.get("EVENKEEL_METRICS_TARGETS") or None,
            advertise=os.environ.get("EVENKEEL_METRICS_ADVERTISE") or None,
        )

    def watch(
        self, loader: BalancedLoader[B], *, name: str = "train", device: torch.device | str | None = None
    ) -> Iterator[B]:
        """The loader's batches, measured: what balancing did, how long each step took, how long training waited.

        On a GPU both times are those of the device's current stream, read some steps later without waiting for it.

        Args:
            loader: The loader; its own attributes (`report`, `loss_scale`, …) stay in use.
            name: Value of the label `loader`.
            device: Where the model trains; default: the current GPU if the program uses one, else the CPU.
        """
        if device is None:
            on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        device = torch.device(device)
        batches = iter(loader)
        before = Counters()
        while True:
            asked = Mark(device)
            try:
                batch = next(batches)
            except StopIteration:
                return
            got = Mark(device)
            report, counters = loader.report, loader.counters
            self.measures.parts(
                name,
                agreement=counters.exposed_seconds - before.exposed_seconds,
                redistribution=counters.redistribution_seconds - before.redistribution_seconds,
                loading=counters.loading_seconds - before.loading_seconds,
            )
            changes = counters.breaker_changes - before.breaker_changes
            self.measures.breaker(name, open_=loader.breaker_open, changes=changes)
            self.measures.batch(name, report)
            before = replace(counters)
            yield batch
            self._steps.append((name, report, asked, got, Mark(device)))
            self._read_steps()

    def _read_steps(self) -> None:
        """Counts the steps that their device has finished."""
        while self._steps and self._steps[0][-1].ready():
            name, report, asked, got, done = self._steps.popleft()
            self.measures.waited(name, got.since(asked) / 1e3)
            self.measures.step(name, report, done.since(got) / 1e3)

    def keys(
        self,
        kjt: Any,
        *,
        world_size: int,
        routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
        block_sizes: Sequence[int] | None = None,
        every: int = 100,
    ) -> None:
        """Measures how unevenly the keys of every so-many-th batch fall on the ranks that own them, by feature.

        Args:
            kjt: A batch's KeyedJaggedTensor, best on the host: the one that is measured is copied there.
            world_size: Ranks that own the keys.
            routing: One for all features, or one per feature.
            block_sizes: Rows a rank of each feature's table, for `continuous`.
            every: Calls from one that measures to the next; the others cost nothing.

        Raises:
            ValueError: If the numbers of routings, block sizes and features differ.
        """
        self._key_calls += 1
        if (self._key_calls - 1) % every:
            return
        skew = feature_skew(kjt, world_size=world_size, routing=routing, block_sizes=block_sizes)
        for name, ratio in skew.items():
            self.measures.key_skew(name, ratio)

    def close(self) -> None:
        """Stops serving and takes the target file away; what still serves at the program's end is closed then."""
        if self not in _exporters:
            return
        _exporters.discard(self)
        self._read_steps()
        self._closing.close()

    def __enter__(self) -> RankExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_target(folder: Path, job: str, rank: int, address: str) -> Path:
    """Prometheus picks up whole files only; a rank that restarts replaces its own file."""
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in job)
    path = folder / f"{safe}-{rank}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps([{"targets": [address]}]) + "\n")
    part.replace(path)
    return path


def _reached_at(advertise: str | None, host: str, port: int) -> str:
    """`host:port` as Prometheus writes it."""
    name = advertise or (socket.gethostname() if host in _ALL_ADDRESSES else host)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


@atexit.register
def _close_all() -> None:
    for exporter in list(_exporters):
        exporter.close()


os.register_at_fork(after_in_child=_exporters.clear)  # the servers and their files are the parent's
