"""What a program exercises, to be counted."""

from __future__ import annotations

from benchmarks.programs.language import Loop, Manual, Program, Resume, leaves_unevenly


def features(program: Program) -> set[str]:
    """Names of what is in a program."""
    found = {f"{program.ranks} ranks"} | ({"mesh of data and tensor parallel ranks"} if program.peers > 1 else set())
    for plan in program.balancers:
        found |= {f"balancer {plan.kind}", f"counts {plan.counts}", f"depth {plan.depth}"}
        found |= {f"strategy {plan.strategy}", f"caps {plan.caps}"}
        found.add("window" if plan.window > 1 else "no window")
        if plan.min_samples:
            found.add("min_samples")
        if plan.split:
            found.add(f"split, tags with {plan.split}")
        if plan.speeds:
            found.add("speeds")
    streams = set()
    for loader in program.loaders:
        found |= {f"layout {loader.layout}", f"source {loader.source}", f"cost {loader.cost}"}
        lengths = set(map(len, loader.sizes))
        if len(lengths) > 1:
            found.add("uneven data")
        if 0 in lengths:
            found.add("rank without data")
        if any(0 in row for row in loader.sizes):
            found.add("empty batches")
        if loader.drop_last:
            found.add("drop_last")
        if loader.fails:
            found.add(f"errors in the {loader.fails_in}")
        if loader.changing:
            found.add("changing shapes")
        if (loader.balancer, loader.name) in streams:
            found.add("two loaders under one name")
        streams.add((loader.balancer, loader.name))
    if len(program.balancers) > 1:
        found.add("several balancers")
    if len(program.loaders) > 1:
        found.add("several loaders")
    if program.model is not None:
        found |= {f"model {program.model.wrap}", f"optimizer {program.model.optimizer}"}
        found |= {f"routing {mode}" for mode in program.model.routings}
    found.add("closes" if program.closes else "ends without close")
    return found | _of_statements(program)


def _of_statements(program: Program) -> set[str]:
    found = set()
    visited: set[int] = set()
    for path, statement in program.walk():
        if not isinstance(statement, Loop):
            found.add("submit and redistribute" if isinstance(statement, Manual) else type(statement).__name__.lower())
            if isinstance(statement, Resume):
                found.add(f"resume by {statement.how}")
            continue
        found.add(f"loop that {statement.use}s")
        if len(path) > 1:
            found.add("nested loop")
        if len(statement.loaders) > 1:
            found.add("zipped loaders")
        if any(stop is not None for stop in statement.stops):
            found.add(f"left by {statement.leave}")
        if leaves_unevenly(statement):
            found.add("left unevenly")
        if visited & set(statement.loaders):
            found.add("several epochs")
        visited |= set(statement.loaders)
    return found
