"""The smallest program that still goes wrong in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from benchmarks.programs.language import Close, Drop, LoaderPlan, Loop, Manual, Program, Resume, Statement

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, *, tries: int) -> Program:
    """Removes and simplifies parts as long as `fails` holds, at most so many tries."""
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in candidates(program):
            if left <= 0:
                break
            left -= 1
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are one step smaller, those that lose most first."""
    statements = program.statements
    for number in range(len(statements)):
        if len(statements) > 1:
            yield _tidy(replace(program, statements=statements[:number] + statements[number + 1 :]))
    if program.model is not None:
        plain = tuple(_without_model(one) for one in statements if not isinstance(one, Resume))
        if plain:
            yield _tidy(replace(program, model=None, statements=plain))
    if program.peers > 1:
        yield replace(program, peers=1, ranks=program.data_ranks)
    if program.ranks > 2 and program.data_ranks > 1:
        yield _fewer_ranks(program)
    for number, statement in enumerate(statements):
        for simpler in _simpler(statement):
            yield _tidy(replace(program, statements=(*statements[:number], simpler, *statements[number + 1 :])))
    for part in ("balancers", "loaders"):
        plans: tuple[Any, ...] = getattr(program, part)
        for number, plan in enumerate(plans):
            for simpler in _plainer(plan):
                changed = (*plans[:number], simpler, *plans[number + 1 :])
                yield replace(program, **{part: changed})  # type: ignore[arg-type]
    if program.model is not None:
        for simpler in _plainer(program.model):
            yield replace(program, model=simpler)
    if not program.closes:
        yield replace(program, closes=True)


def _plainer(plan: Any) -> Iterator[Any]:
    """The plan with one more of its attributes as by default, or less data."""
    for part in fields(plan):
        if part.name in ("balancer", "name", "sizes"):
            continue
        if part.name == "routings":
            if len(plan.routings) > 1:
                yield replace(plan, routings=plan.routings[:1])
        elif getattr(plan, part.name) != part.default:
            yield replace(plan, **{part.name: part.default})
    if isinstance(plan, LoaderPlan):
        most = max(map(len, plan.sizes), default=0)
        if most > 1:
            yield replace(plan, sizes=tuple(row[: most - 1] for row in plan.sizes))
            yield replace(plan, sizes=tuple(row[1:] for row in plan.sizes))
        largest = max((size for row in plan.sizes for size in row), default=0)
        if largest > 1:
            yield replace(plan, sizes=tuple(tuple(min(size, largest - 1) for size in row) for row in plan.sizes))


def _simpler(statement: Statement) -> Iterator[Statement]:
    if isinstance(statement, Manual):
        yield from (
            one for one in (replace(statement, lag=1), replace(statement, until_none=False)) if one != statement
        )
    if not isinstance(statement, Loop):
        return
    for number in range(len(statement.inner)):
        yield replace(statement, inner=statement.inner[:number] + statement.inner[number + 1 :])
    if len(statement.loaders) > 1:
        yield from (replace(statement, loaders=(number,)) for number in statement.loaders)
    if statement.stops:
        yield replace(statement, stops=(), leave="break")
        least = min((stop for stop in statement.stops if stop is not None), default=1)
        if len(set(statement.stops)) > 1:
            yield replace(statement, stops=(least,) * len(statement.stops))
        if least > 1:
            yield replace(statement, stops=tuple(stop if stop is None else stop - 1 for stop in statement.stops))
    if statement.leave != "break":
        yield replace(statement, leave="break")
    if statement.use == "train":
        yield replace(statement, use="evaluate")
    for number, (at, inner) in enumerate(statement.inner):
        for simpler in _simpler(inner):
            yield replace(statement, inner=(*statement.inner[:number], (at, simpler), *statement.inner[number + 1 :]))


def _without_model(statement: Statement) -> Statement:
    if not isinstance(statement, Loop):
        return statement
    return replace(statement, use="look", inner=tuple((at, _without_model(inner)) for at, inner in statement.inner))


def _fewer_ranks(program: Program) -> Program:
    ranks = program.data_ranks - 1

    def cut(statement: Statement) -> Statement:
        if not isinstance(statement, Loop):
            return statement
        inner = tuple((at, cut(nested)) for at, nested in statement.inner)
        return replace(statement, stops=statement.stops[:ranks], inner=inner)

    loaders = tuple(replace(plan, sizes=plan.sizes[:ranks], fails=plan.fails[:ranks]) for plan in program.loaders)
    return replace(
        program, ranks=ranks * program.peers, loaders=loaders, statements=tuple(map(cut, program.statements))
    )


def _tidy(program: Program) -> Program:
    """Without loaders and balancers that nothing uses."""
    used: set[int] = set()
    for _, statement in program.walk():
        if isinstance(statement, Loop):
            used.update(statement.loaders)
        elif isinstance(statement, Manual):
            used.add(statement.loader)
    kept = sorted(used)
    balancers = sorted(
        {program.loaders[number].balancer for number in kept}
        | {statement.balancer for _, statement in program.walk() if isinstance(statement, Close | Drop)}
    )

    def renumber(statement: Statement) -> Statement:
        match statement:
            case Loop():
                return replace(
                    statement,
                    loaders=tuple(kept.index(number) for number in statement.loaders),
                    inner=tuple((at, renumber(inner)) for at, inner in statement.inner),
                )
            case Manual():
                return replace(statement, loader=kept.index(statement.loader))
            case Close() | Drop():
                return replace(statement, balancer=balancers.index(statement.balancer))
        return statement

    return replace(
        program,
        balancers=tuple(program.balancers[number] for number in balancers),
        loaders=tuple(
            replace(program.loaders[number], balancer=balancers.index(program.loaders[number].balancer))
            for number in kept
        ),
        statements=tuple(map(renumber, program.statements)),
    )
