"""A plan and its report as tables for people."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from evenkeel.placement.plan import Plan
from evenkeel.placement.report import Report
from evenkeel.placement.request import Sharding

_GIB = 2**30
_SHORT = {
    "row_wise": "RW",
    "table_wise": "TW",
    "column_wise": "CW",
    "data_parallel": "DP",
    "table_row_wise": "TWRW",
    "table_column_wise": "TWCW",
    "grid_shard": "GS",
}
"""Sharding types as TorchRec's planner abbreviates them."""
_WIDTH = 80


class PlanText:
    """A plan and its report, for `rich.print` and for `str`."""

    def __init__(self, plan: Plan, report: Report | None) -> None:
        self._plan, self._report = plan, report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich prints."""
        yield from _plan_parts(self._plan)
        if self._report is not None:
            yield from _report_parts(self._report)

    def __str__(self) -> str:
        """The same without colours."""
        console = Console(file=io.StringIO(), width=_WIDTH, no_color=True)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def _plan_parts(plan: Plan) -> Iterable[RenderableType]:
    if plan.shortage is not None:
        yield Text.assemble(("Nothing fits.", "bold red"), f" {plan.shortage.explanation}")
        return
    if plan.seconds is None:
        yield Text.assemble(("No answer in time.", "bold red"), " Raise solver.time_limit_s.")
        return
    out = RichTable(
        box=box.SIMPLE_HEAD,
        title=f"{plan.seconds * 1e3:.3g} ms of kernels a step on {plan.hardware} with {plan.runtime.value}",
    )
    out.add_column("table", overflow="fold")
    apart = any(p.sharding is not Sharding.ROW_WISE for p in plan.placements)
    out.add_column("mode, ratio" if apart else "mode", no_wrap=True)
    out.add_column("ranks" if apart else "ratio", no_wrap=True, justify="left" if apart else "right")
    for heading in ("HBM\nGiB", "host\nGiB", "ms", "misses", "µs a\nGiB"):
        out.add_column(heading, justify="right", no_wrap=True)
    for p in plan.placements:
        out.add_row(
            escape(p.table),
            p.mode.value + (f" {p.ratio:.3f}" if apart and 0 < p.ratio < 1 else ""),
            f"{_SHORT[p.sharding.value]} {spans(tuple(sorted(p.ranks)))}".rstrip() if apart else f"{p.ratio:.3f}",
            f"{p.hbm_bytes / _GIB:.2f}",
            f"{p.host_bytes / _GIB:.2f}",
            f"{p.seconds * 1e3:.3g}",
            f"{p.miss_rate:.0%}",
            f"{p.seconds_per_gib * 1e6:.3g}" if p.seconds_per_gib else "",
        )
    yield out
    gap = "proved optimal" if plan.gap == 0 else "not proved"  # a simple plan that the clock has chosen
    if plan.gap:
        gap = f"within {100 * plan.gap:.2g} % of the best possible"
    yield Text(f"{plan.status.value}: {gap}; {len(plan.modules)} fused module{'s' * (len(plan.modules) != 1)}")
    room = f" beside {plan.workspace_bytes / _GIB:.2f} GiB of workspace" if plan.workspace_bytes else ""
    for name, budget, beside in (("HBM of the fullest rank", plan.hbm, room), ("memory of a host", plan.host, "")):
        limit = "no limit" if budget.limit_bytes is None else f"{budget.limit_bytes / _GIB:.2f} GiB"
        price = f", priced at {budget.seconds_per_gib * 1e3:.3g} ms a GiB" if budget.seconds_per_gib else ""
        yield Text(f"{name}: {budget.used_bytes / _GIB:.2f} GiB of {limit}{beside}{price}")
    if plan.host_seconds is not None:
        yield Text(f"launches and waiting of the host: {plan.host_seconds * 1e3:.3g} ms, beside the kernels")
    if plan.step_seconds is not None:
        binds = "host" if plan.step_seconds <= (plan.host_seconds or 0.0) else "GPU"
        yield Text(f"a step with its dense part: {plan.step_seconds * 1e3:.3g} ms; the {binds} binds")
    others = [f"{known.name} {known.seconds * 1e3:.3g} ms" for known in plan.trivial if known.seconds is not None]
    if others:
        yield Text(f"without a search: {', '.join(others)}")


def _report_parts(report: Report) -> Iterable[RenderableType]:
    out = RichTable(box=box.SIMPLE_HEAD, title="by rank, ms a step")
    out.add_column("ranks", overflow="fold")
    out.add_column("shards", overflow="fold")
    for heading in ("HBM\nGiB", "all", "forward", "back-\nward", "ex-\nchange", "pre-\nfetch", "host"):
        out.add_column(heading, justify="right", no_wrap=True)
    for entry in report.ranks:
        parts = (entry.forward_seconds, entry.backward_seconds, entry.communication_seconds, entry.prefetch_seconds)
        out.add_row(
            spans(entry.ranks),
            " ".join(f"{number} {_SHORT.get(kind, kind)}" for kind, number in entry.shards.items()),
            f"{entry.hbm_bytes / _GIB:.2f}",
            *(f"{seconds * 1e3:.3g}" for seconds in (entry.seconds, *parts, entry.fixed_seconds)),
        )
    yield out
    for host in report.hosts:
        if host.host_bytes:
            tables = f"{host.tables} table{'s' * (host.tables != 1)}"
            name = f"host{'s' * (len(host.hosts) != 1)} {spans(host.hosts)}"
            yield Text(f"{name}: {host.host_bytes / _GIB:.2f} GiB of {tables} in memory")
    for spread in report.imbalance:
        if spread.max_over_mean > 1.0005:
            what = {"seconds": "time of ranks", "hbm_bytes": "HBM of ranks"}.get(spread.of, "memory of hosts")
            yield Text(f"imbalance, {what}: max/mean {spread.max_over_mean:.3f}")


def spans(numbers: tuple[int, ...]) -> str:
    """Ascending numbers in short: `0-3,6`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
