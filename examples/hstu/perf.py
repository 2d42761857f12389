"""Time and work of modules during training, measured without disturbing it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from examples.hstu.flops import Work, peak_tflops
from trainer_client.observing.measurement import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePerf:
    """One module in one step, all its calls together.

    Attributes:
        step: Number of the step.
        module: Name of the module in the model.
        forward_ms: Device time of the forward pass.
        backward_ms: Device time of the backward pass; 0 where there was none.
        flops: FLOPs of both.
        peak_tflops: Peak of the device, None if not known.
    """

    step: int
    module: str
    forward_ms: float
    backward_ms: float
    flops: float
    peak_tflops: float | None

    @property
    def tflops(self) -> float:
        """TFLOP/s over forward and backward time."""
        milliseconds = self.forward_ms + self.backward_ms
        return self.flops / milliseconds / 1e9 if milliseconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of the device's peak."""
        return None if self.peak_tflops is None else self.tflops / self.peak_tflops


@dataclass(slots=True)
class _Call:
    module: str
    flops: int
    marks: list[Mark] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    number: int
    calls: list[_Call]
    flops: list[torch.Tensor]
    last: Mark


class PerfTracker:
    """Measures chosen modules of a model in every step.

    Hooks record events on the stream and FLOPs as tensors on the device; both are read when the device has long been
    there, some steps later, so that the host never waits.

        tracker = PerfTracker(model, {"layers.*.attention": AttentionWork(num_heads=4, head_dim=256)}, device=device)
        for batch in loader:
            ...                  # forward, backward, optimizer
            tracker.step()
        for perf in tracker.finished(): ...
    """

    def __init__(
        self,
        model: nn.Module,
        works: Mapping[str, Work],
        *,
        device: torch.device | str,
        peak: float | None = None,
    ) -> None:
        """Hooks into the model.

        Args:
            model: The model; modules below wrappers such as DDP have the wrapper's prefix in their name.
            works: What to measure: patterns over the names of modules (`fnmatch`, whose * takes dots too: `layers.*`
                names what is inside the layers as well, `layers.[0-9]` ten of them), and how much each computes.
            device: Where the model runs.
            peak: TFLOP/s at MFU 1; default: by the device's name.

        Raises:
            ValueError: If a pattern names no module, or one around which torch.compile runs no hooks.
        """
        self._device = torch.device(device)
        self._peak = peak if peak is not None else peak_tflops(self._device)
        self._number = 0
        self._calls: list[_Call] = []
        self._open: dict[str, list[_Call]] = {}  # by module: calls whose backward pass has not begun
        self._backward: dict[str, list[_Call]] = {}  # whose backward pass runs
        self._flops: list[torch.Tensor] = []
        self._known: dict[tuple[Any, ...], tuple[int, list[Any]]] = {}
        self._pending: deque[_Step] = deque()
        self._handles: list[RemovableHandle] = []
        names = dict(model.named_modules())
        for pattern, work in works.items():
            chosen = [name for name in names if fnmatchcase(name, pattern)]
            if not chosen:
                raise ValueError(f"no module is named {pattern!r}; the model has {', '.join(filter(None, names))}")
            for name in chosen:
                if hasattr(names[name], "_orig_mod"):
                    raise ValueError(f"module {name!r} is a result of torch.compile, which runs no backward hooks; "
                                     "compile it in place by its method compile()")  # fmt: skip
                self._hook(name, names[name], work)

    def step(self) -> None:
        """Ends a step."""
        flops = [_to_host(value) for value in self._flops]
        self._pending.append(_Step(number=self._number, calls=self._calls, flops=flops, last=Mark(self._device)))
        self._flops, self._known = [], {}
        self._calls, self._open, self._backward = [], {}, {}
        self._number += 1

    def finished(self) -> list[ModulePerf]:
        """What has been measured since the last call, of the steps that the device has finished."""
        done: list[ModulePerf] = []
        while self._pending and self._pending[0].last.ready():
            done.extend(self._read(self._pending.popleft()))
        return done

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str, module: nn.Module, work: Work) -> None:
        signature = inspect.signature(module.forward)
        catch_all = [each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._backward.get(name):
                return  # activation checkpointing computes it again: part of the backward pass
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            for wrapped in catch_all:
                arguments |= arguments.pop(wrapped, {})
            try:
                call = _Call(name, self._count(work, arguments))
            except ValueError as error:
                raise ValueError(f"module {name!r}: {error}") from error
            call.marks.append(Mark(self._device))
            self._calls.append(call)
            self._open.setdefault(name, []).append(call)

        def after(*_: Any) -> None:
            if not self._backward.get(name):
                self._open[name][-1].marks.append(Mark(self._device))

        def before_backward(*_: Any) -> None:
            if self._open.get(name):
                call = self._open[name].pop()
                call.marks.append(Mark(self._device))
                self._backward.setdefault(name, []).append(call)

        def after_backward(*_: Any) -> None:
            if self._backward.get(name):
                self._backward[name].pop().marks.append(Mark(self._device))

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
            module.register_full_backward_pre_hook(before_backward),
            module.register_full_backward_hook(after_backward),
        ]

    def _count(self, work: Work, arguments: dict[str, Any]) -> int:
        """Index of the FLOPs of a call; those of the same tensors are computed once a step."""
        read = [arguments.get(name) for name in work.reads]
        key = (id(work), *map(id, read))
        if key not in self._known:
            self._flops.append(work.flops(arguments))
            self._known[key] = len(self._flops) - 1, read  # kept, so that no other tensor gets their ids
        return self._known[key][0]

    def _read(self, step: _Step) -> list[ModulePerf]:
        flops_of = [value.tolist() for value in step.flops]
        totals: dict[str, tuple[float, float, float]] = {}
        for call in step.calls:
            forward, backward, flops = totals.get(call.module, (0.0, 0.0, 0.0))
            if len(call.marks) >= 2:
                forward += call.marks[1].since(call.marks[0])
                flops += flops_of[call.flops][0]
            if len(call.marks) == 4:
                backward += call.marks[3].since(call.marks[2])
                flops += flops_of[call.flops][1]
            totals[call.module] = forward, backward, flops
        return [
            ModulePerf(
                step=step.number, module=name, forward_ms=forward, backward_ms=backward, flops=flops,
                peak_tflops=self._peak,
            )
            for name, (forward, backward, flops) in totals.items()
        ]  # fmt: skip


def _to_host(value: torch.Tensor) -> torch.Tensor:
    """A copy that is on the host once the device has got there."""
    if not value.is_cuda:
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
