"""Real Gloo ranks that live through many tests."""

import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import zygote
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution import start


def group_of(size: int) -> dist.ProcessGroup | None:
    """In a rank: the group of the first `size` ranks."""
    return _groups[size]


_groups: dict[int, dist.ProcessGroup] = {}


def _serve(rank: int, world_size: int, store: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    for size in range(1, world_size + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            _groups[size] = group
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(request)
            answer = ("result", function(*args))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


def move(flat: FlatBatch, piece: Slice, world_size: int) -> FlatBatch:
    """In a rank: a redistribution of a batch."""
    return start(flat, piece, group=group_of(world_size)).wait()


def compiled_by(flat: FlatBatch, piece: Slice, world_size: int) -> dict[str, tuple[int, int]]:
    """In a rank: machine code versions of each kernel after warm-up, and after a redistribution."""
    from trainer_client.balancing.redistribution import copies, layout, warm_up

    kernels = [copies.write_items, copies.add_samples, copies._copy_on_host, layout._measure, layout._describe]
    warm_up()
    before = [len(each.signatures) for each in kernels]
    start(flat, piece, group=group_of(world_size)).wait()
    return {each.__name__: (count, len(each.signatures)) for each, count in zip(kernels, before, strict=True)}


class GlooRanks:
    """Processes that run what they are sent."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = zygote.context.Pipe()
            self._processes.append(zygote.process(_serve, rank, world_size, store, theirs))
            theirs.close()
            self._pipes.append(ours)

    def call(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Runs `function` on the first ranks, one tuple of arguments each; what any raised is raised here."""
        for pipe, args in zip(self._pipes, arguments, strict=False):
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = []
        for pipe in self._pipes[: len(arguments)]:
            assert pipe.poll(300), "a rank does not answer"
            answers.append(pickle.loads(pipe.recv_bytes()))
        failures = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(answers) if kind == "error"]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()
