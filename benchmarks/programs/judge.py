"""Whether a program went right: the ledger of its samples, its losses and gradients, its errors."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.programs.crew import Outcome
from benchmarks.programs.data import counts_of, sample_id, split_id
from benchmarks.programs.language import Loop, Manual, Program, Resume, Statement, leaves_unevenly
from benchmarks.programs.rank import MANUAL, Step
from benchmarks.programs.training import Reference

TOLERANCE = 1e-7  # everything is computed in float64, in another order


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What became of a program.

    Attributes:
        findings: What must not be; empty if all is right.
        refused: Ended on all ranks by the same documented error.
        samples, compared: Samples followed, and training steps compared with the dense model.
        parts: Of samples that lay on several ranks, each with its own rank.
        rounds: By mode and reason.
    """

    findings: list[str] = field(default_factory=list)
    refused: bool = False
    samples: int = 0
    parts: int = 0
    compared: int = 0
    rounds: Counter[str] = field(default_factory=Counter)


def judge(program: Program, outcome: Outcome) -> Verdict:
    """Holds what the ranks tell against what is promised."""
    verdict = Verdict()
    verdict.findings += outcome.troubles
    errors = [answer for answer in outcome.answers if answer is not None and "error" in answer]
    if errors:
        if not outcome.troubles:
            _judge_errors(program, outcome, verdict)
        return verdict
    if any(answer is None for answer in outcome.answers):
        assert verdict.findings
        return verdict
    answers = [answer for answer in outcome.answers if answer is not None]
    for rank, answer in enumerate(answers):
        if answer["leaked"]:
            verdict.findings.append(f"leak: rank {rank} keeps threads {', '.join(sorted(set(answer['leaked'])))}")
    if program.peers > 1:
        answers = _leaders(program, answers, verdict)
    by_path: dict[tuple[int, ...], list[list[Step]]] = defaultdict(lambda: [[] for _ in answers])
    for rank, answer in enumerate(answers):
        for step in answer["steps"]:
            by_path[step.path][rank].append(step)
            verdict.rounds[f"{step.mode}/{step.reason}"] += rank == 0
            verdict.parts += len(step.parts)
            verdict.samples += len(step.ids)
    for path, loader, stops, total in _visits(program):
        verdict.findings += _Ledger(program, path, loader, stops, total).check(by_path.pop(path, [[] for _ in answers]))
    assert not by_path, f"steps of unknown statements: {sorted(by_path)}"
    if program.model is not None and not verdict.findings:
        _compare(program, answers, verdict)
    return verdict


def _leaders(program: Program, answers: list[dict[str, Any]], verdict: Verdict) -> list[dict[str, Any]]:
    """Of ranks that train the same batches the first, which the others must be like."""
    for rank, answer in enumerate(answers):
        leader = rank // program.peers * program.peers
        if answer["steps"] != answers[leader]["steps"]:
            verdict.findings.append(f"peers: rank {rank} did not get the batches of rank {leader}, its peer")
    return answers[:: program.peers]


# ---------------------------------------------------------------------- errors


def refusals(program: Program) -> set[str]:
    """Documented errors that a program may end with, on all ranks alike."""
    allowed: set[str] = set()
    statements = [statement for _, statement in program.walk()]
    if any(leaves_unevenly(statement) for statement in statements):
        allowed.add("ProgramOrderError")
    if any(isinstance(statement, Resume) for statement in statements):
        allowed.add("CheckpointError")
    return allowed


def _names_share(program: Program, message: str) -> bool:
    """Whether this is what loaders of different batches under one name are told."""
    streams: dict[tuple[int, str], set[tuple[str, bool]]] = defaultdict(set)
    for plan in program.loaders:
        streams[plan.balancer, plan.name].add((plan.layout, plan.changing))
    told = "SchemaMismatchError" in message or "began with batches of other fields" in message
    return told and any(len(layouts) > 1 for layouts in streams.values())


def _has_batches(program: Program, rank: int) -> bool:
    """Whether a rank has batches of every loader."""
    return all(plan.sizes[rank // program.peers] for plan in program.loaders)


def _judge_errors(program: Program, outcome: Outcome, verdict: Verdict) -> None:
    told = [
        "went on" if answer is None else f"{answer['error']}: {answer['message']}" if "error" in answer else "ended"
        for answer in outcome.answers
    ]
    names = {answer["error"].rpartition(".")[2] for answer in outcome.answers if answer and "error" in answer}
    if any(_names_share(program, text) for text in told):  # that rank ends, and others that need it with it
        told = [
            text
            for rank, text in enumerate(told)
            if "Connection closed by peer" not in text
            and (text != "ended" or _has_batches(program, rank))  # without one it cannot know: the others have left
        ]
    # each rank names itself where it is the one that was found out
    alike = {re.sub(r"^(\S+: )rank \d+ ", r"\1rank N ", text) for text in told}
    if len(alike) == 1 and (names <= refusals(program) or _names_share(program, told[0])):
        verdict.refused = True
        return
    lines = "\n".join(f"  rank {rank}: {text[:600]}" for rank, text in enumerate(told))
    kind = "undocumented" if len(alike) == 1 else "ranks differ"
    verdict.findings.append(f"error ({kind}): {' | '.join(sorted({text[:100] for text in told}))}\n{lines}")


# ---------------------------------------------------------------------- samples


def _visits(program: Program) -> Iterator[tuple[tuple[int, ...], int, tuple[int | None, ...], int]]:
    """Every loader of every loop that is run: path, loader, stops, and how many batches there are."""

    def totals(statement: Loop | Manual) -> list[int]:
        if isinstance(statement, Manual):
            return [len(program.rounds(statement.loader, manual=True))]
        return [len(program.rounds(number)) for number in statement.loaders]

    def visit(statement: Statement, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, Any, int]]:
        if isinstance(statement, Manual):
            yield (*path, MANUAL), statement.loader, (None,) * program.data_ranks, totals(statement)[0]
        if isinstance(statement, Loop):
            total, stops = min(totals(statement)), statement.stops or (None,) * program.data_ranks
            for index, number in enumerate(statement.loaders):
                yield (*path, -1 - index), number, stops, total
            reached = min([total, *(stop for stop in stops if stop is not None)])
            for inner, (at, nested) in enumerate(statement.inner):
                if at < reached:
                    yield from visit(nested, (*path, inner))

    for number, statement in enumerate(program.statements):
        yield from visit(statement, (number,))


class _Ledger:
    """The samples of one loader in one loop.

    What a rank that leaves early drops is exactly this: its share of the batches that it did not take.
    """

    def __init__(
        self, program: Program, path: tuple[int, ...], loader: int, stops: tuple[int | None, ...], total: int
    ) -> None:
        self.loader, self.stops, self.total = loader, stops, total
        self.plan = program.loaders[loader]
        self.window = program.balancers[self.plan.balancer].window
        manual = path[-1] == MANUAL
        if manual:
            self.window = 1  # each batch is a round of its own
        self.rounds = program.rounds(loader, manual=manual)
        statement = next(statement for place, statement in program.walk() if place == path[:-1])
        together = statement.loaders if isinstance(statement, Loop) else (loader,)
        self.may_fail = any(at is not None for number in together for at in program.loaders[number].fails)
        self.min_samples = program.balancers[self.plan.balancer].min_samples
        self.has_caps = program.balancers[self.plan.balancer].caps != "none"
        self.where = f"statement {'.'.join(map(str, path[:-1]))}, loader{loader}"

    def check(self, ranks: list[list[Step]]) -> list[str]:
        """What is wrong."""
        found: list[str] = []
        taken = [len(steps) for steps in ranks]
        ends = [self.total if stop is None else min(stop, self.total) for stop in self.stops]
        least = 0 if self.may_fail else min(ends)
        if len(set(ends)) == 1 and least and taken != ends:
            return [f"steps: ranks took {taken} batches in place of {ends} ({self.where})"]
        if any(not least <= took <= end for took, end in zip(taken, ends, strict=True)):
            return [f"steps: ranks took {taken} batches, which leave after {ends} at most ({self.where})"]
        epochs = {step.epoch for steps in ranks for step in steps}
        if len(epochs) > 1:
            return [f"epochs: ranks are in iterations {sorted(epochs)} of {self.where}"]
        seen: Counter[int] = Counter()
        for rank, steps in enumerate(ranks):
            for step in steps:
                found += self._check_batch(rank, step)
                seen.update(step.ids)
        doubled = [number for number, count in seen.items() if count > 1]
        if doubled:
            found.append(f"doubled: {len(doubled)} samples, such as {split_id(doubled[0])} ({self.where})")
        if epochs:
            found += self._check_complete(ranks, min(taken), set(seen), epochs.pop())
        for number in range(min(taken)):
            told = {(steps[number].mode, steps[number].reason, steps[number].samples) for steps in ranks}
            if len(told) > 1:
                found.append(f"reports: ranks tell {sorted(told)} of batch {number} ({self.where})")
            found += self._check_parts([steps[number] for steps in ranks])
            samples = sum(len(steps[number].ids) for steps in ranks)
            counts = [_sequences(steps[number]) for steps in ranks]
            if not self.has_caps and samples >= self.min_samples * len(ranks) > min(counts) * len(ranks):
                found.append(f"too few: ranks got {counts} samples of batch {number} ({self.where})")
        return found

    def _check_batch(self, rank: int, step: Step) -> list[str]:
        found = []
        if not step.intact:
            found.append(f"corrupted: rank {rank}, batch {step.number} ({self.where})")
        if step.ids != sorted(step.ids):
            found.append(f"order: rank {rank}, batch {step.number} ({self.where})")
        for number in step.ids:
            loader, epoch, home, at, index = split_id(number)
            if (loader, epoch) != (self.loader, step.epoch):
                found.append(
                    f"strangers: rank {rank} got sample {index} of loader{loader}, epoch {epoch}, rank {home}, batch "
                    f"{at} in epoch {step.epoch} ({self.where})"
                )
                break
            if at // self.window != self.rounds[step.number] // self.window:
                found.append(f"misplaced: rank {rank} got a sample of batch {at} in batch {step.number} ({self.where})")
                break
        return found

    def _check_parts(self, steps: list[Step]) -> list[str]:
        """Of a batch, each position of a sample that lies on several ranks is on one of them."""
        reached: Counter[int] = Counter()
        for number, begin, end in sorted(part for step in steps for part in step.parts):
            if begin != reached[number]:
                return [f"parts: sample {split_id(number)} goes on at {begin}, not {reached[number]} ({self.where})"]
            reached[number] = end
        totals = counts_of(torch.tensor(sorted(reached), dtype=torch.int64)).tolist()
        short = [number for number, total in zip(sorted(reached), totals, strict=True) if reached[number] != total]
        return [f"parts: sample {split_id(short[0])} ends at {reached[short[0]]} ({self.where})"] if short else []

    def _check_complete(self, ranks: list[list[Step]], common: int, seen: set[int], epoch: int) -> list[str]:
        """Of batches, or windows, that all ranks took to the end, nothing is missing."""
        whole = common if common == len(self.rounds) else common // self.window * self.window
        wanted = {
            sample_id(self.loader, epoch, rank, step, index)
            for rank in range(len(ranks))
            for step in self.rounds[:whole]
            if step < len(self.plan.sizes_in(epoch, rank))
            for index in range(self.plan.sizes_in(epoch, rank)[step])
        }
        lost = sorted(wanted - seen)
        if lost:
            return [f"lost: {len(lost)} of {len(wanted)} samples, such as {split_id(lost[0])} ({self.where})"]
        return []


def _sequences(step: Step) -> int:
    """Whole samples and parts in a rank's batch."""
    return len({*step.ids, *(number for number, _, _ in step.parts)})


# ---------------------------------------------------------------------- the model


def _compare(program: Program, answers: list[dict[str, Any]], verdict: Verdict) -> None:
    """Losses, gradients and the values at the end, beside one process that holds each global batch."""
    assert program.model is not None
    reference = Reference(program.model)
    used = [[step for step in answer["steps"] if step.use != "look"] for answer in answers]
    for steps in zip(*used, strict=True):
        first, where = steps[0], f"statement {steps[0].path}, batch {steps[0].number}"
        ids = torch.tensor(sorted(number for step in steps for number in step.ids), dtype=torch.int64)
        verdict.compared += first.use == "train"
        loss = sum(step.loss for step in steps) / program.ranks
        if first.use == "evaluate":
            with torch.no_grad():
                wanted = float(reference.loss(ids))
        else:
            wanted, gradients = reference.step(ids)
        if not _close([loss], [wanted]):
            verdict.findings.append(f"loss: {loss!r} in place of {wanted!r} ({where})")
            return
        if first.use == "train":
            for rank, step in enumerate(steps):
                if not _close(step.gradients, gradients):
                    verdict.findings.append(
                        f"gradients: rank {rank} has {step.gradients} in place of {gradients} ({where})"
                    )
                    return
    _compare_end(reference, answers, verdict)


def _compare_end(reference: Reference, answers: list[dict[str, Any]], verdict: Verdict) -> None:
    dense = [value for parameter in reference.tower.parameters() for value in parameter.detach().reshape(-1).tolist()]
    for rank, answer in enumerate(answers):
        if not _close(answer["end"]["dense"], dense):
            verdict.findings.append(f"dense values at the end: rank {rank}")
    for name, table in reference.tables.items():
        held: Counter[int] = Counter()
        for rank, answer in enumerate(answers):
            for key, row in answer["end"]["rows"][name].items():
                held[key] += 1
                if not _close(row, table[key].tolist()):
                    verdict.findings.append(f"row: {name}, key {key} on rank {rank}: {row}, not {table[key].tolist()}")
                    return
        if any(count > 1 for count in held.values()):
            verdict.findings.append(f"keys: some of {name} are on two ranks")


def _close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and all(
        abs(one - other) <= TOLERANCE * max(1.0, abs(other)) for one, other in zip(found, wanted, strict=True)
    )
