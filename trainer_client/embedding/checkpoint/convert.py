"""Re-routing a checkpoint on disk: any routing and number of ranks to any other, in bounded memory."""

import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer_client.embedding.checkpoint import dcp
from trainer_client.embedding.checkpoint.dynamicemb import COUNTER, DynamicEmbDump, check_seed, is_dump, write_options
from trainer_client.embedding.checkpoint.files import Entry, Journal, Spool, begin, fingerprint, publish, recover
from trainer_client.embedding.checkpoint.record import (
    CheckpointError,
    Rows,
    TableRecord,
    for_dcp,
    for_dump,
    repeated_key,
    reshape,
    split_by_owner,
    to_json,
)
from trainer_client.embedding.routing import Routing, RoutingLike, as_routing
from trainer_client.embedding.routing.ownership import check_world_size

Checkpoint = dcp.DcpCheckpoint | DynamicEmbDump
Format = Literal["dcp", "dynamicemb"]
Progress = Callable[[int, int], None]
"""Called with rows done and rows to do; for a `torch.distributed.checkpoint` target each row counts twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did.

    Attributes:
        tables: The tables as they are now.
        rows: Rows in all.
        moved: Rows that changed their rank's number.
        resumed: Rows taken over from an interrupted attempt.
    """

    tables: tuple[TableRecord, ...]
    rows: int
    moved: int
    resumed: int = 0


def open_checkpoint(
    path: Path | str, *, routing: RoutingLike | None = None, num_embeddings: Mapping[str, int] | None = None
) -> Checkpoint:
    """Opens a checkpoint of either format.

    Args:
        path: Its directory.
        routing: For DynamicEmb dumps that do not name theirs; see `DynamicEmbDump`.
        num_embeddings: Sizes of continuous tables that the dump does not give.

    Raises:
        CheckpointError: If there is no checkpoint of a known format.
    """
    path = Path(path)
    recover(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    if (path / ".metadata").exists():
        return dcp.DcpCheckpoint(path)
    if is_dump(path):
        given = as_routing(routing) if routing is not None else None
        return DynamicEmbDump(path, routing=given, num_embeddings=num_embeddings)
    raise CheckpointError(f"{path}: neither a torch.distributed.checkpoint directory (.metadata) nor a DynamicEmb dump")


def _open_spools(new: Mapping[str, TableRecord], path: Path, *, dump: bool) -> dict[str, Spool]:
    path.mkdir(exist_ok=True)
    return {name: Spool(path, record, dump=dump) for name, record in new.items()}


class _Run:
    """One conversion: all rows into the spool, then into the files of the target's format."""

    def __init__(self, source: Checkpoint, new: Mapping[str, TableRecord], work: Path, journal: Journal) -> None:
        self.source, self.new, self.work, self.journal = source, new, work, journal
        self.moved = self.resumed = self.done = 0

    def spool(self, name: str, spool: Spool, progress: Callable[[int], None]) -> None:
        """Brings a table's rows to the ranks that own them now, from where an interrupted attempt stopped."""
        record, source = self.new[name], self.source
        states = [entry for entry in self.journal.entries if entry.get("spooled") == name]
        held = spool.restore(states)
        state = states[held] if held >= 0 else {"rank": 0, "chunk": 0, "done": 0, "moved": 0}
        done, moved = state["done"], state["moved"]
        self.resumed += done
        progress(done)
        # A state names every file: with many ranks it is written for every so many chunks.
        stride = -(-spool.num_files // 64)
        for rank in range(state["rank"], source.records[name].world_size):
            first = state["chunk"] if rank == state["rank"] else 0
            for chunk, rows in enumerate(source.rows(name, rank, first=first), first + 1):
                for owner, part in split_by_owner(reshape(rows, record), record):
                    spool.append(owner, part)
                    moved += part.keys.numel() if owner != rank else 0
                done += rows.keys.numel()
                if chunk % stride == 0 or done == sum(source.records[name].rows):
                    at = {"spooled": name, "rank": rank, "chunk": chunk, "done": done, "moved": moved}
                    self.journal.append(at | spool.state())
                progress(rows.keys.numel())
        self.moved += moved

    def check_distinct(self, name: str, spool: Spool) -> None:
        """Checks that no key came twice.

        Raises:
            CheckpointError: If one did; names the file and the key.
        """
        for rank in range(self.new[name].world_size):
            key = spool.find_repeated(rank, self.work)
            if key is not None:
                before = self.source.records[name]
                home = before.routing.owner(key, world_size=before.world_size, block_size=before.block)
                raise repeated_key(self.source.where(name, home), name, key)


def convert(
    source: Checkpoint,
    target: Path | str,
    *,
    world_size: int,
    routing: RoutingLike | Mapping[str, RoutingLike] | None = None,
    target_format: Format | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Writes a checkpoint whose rows lie on the ranks that own them under another routing.

    Rows stream through in chunks, and memory does not grow with their number: it holds at most four chunks (65,536 rows
    each with keys, values and optimizer state) or 96 MiB of keys, whichever is more. The target appears under its name
    when it is complete; until then an older one stays. An interrupted conversion leaves its work in `.NAME.writing`
    beside the target; called again with the same arguments on the same files it goes on after the last chunk that it
    had finished, and the result is, byte for byte, that of an uninterrupted one. While it is written, a dump takes the
    space of the result, a `torch.distributed.checkpoint` directory twice that.

    Args:
        source: An open checkpoint.
        target: The new directory.
        world_size: Ranks to lay the rows out for.
        routing: New routing of all tables or by table; it stays as it is where none is given.
        target_format: The source's by default.
        overwrite: Whether an existing checkpoint may be replaced, and nothing else.
        progress: Told after every chunk.

    Raises:
        CheckpointError: If the source is damaged, or cannot be expressed in the target's format.
    """
    check_world_size(world_size)
    target, target_format = Path(target), target_format or source.format  # type: ignore[assignment]
    new: dict[str, TableRecord] = {}
    for name, record in source.records.items():
        chosen = routing.get(name.removesuffix(COUNTER)) if isinstance(routing, Mapping) else routing
        wanted: Routing = as_routing(chosen) if chosen is not None else record.routing
        shaped = for_dump(record) if target_format == "dynamicemb" else for_dcp(record)
        new[name] = shaped.rerouted(wanted, world_size)
        # Refusals come before anything is written.
        _ = new[name].block
        if target_format == "dynamicemb":
            check_seed(new[name])
    passes = 2 if target_format == "dcp" else 1
    total = passes * sum(sum(record.rows) for record in source.records.values())
    work = begin(target, overwrite=overwrite, keep=True)
    journal = Journal(work / "journal", _identity(source, list(new.values()), str(target_format)))
    try:
        if not journal.entries:
            _clear(work)
        run = _Run(source, new, work, journal)

        def advance(rows: int) -> None:
            run.done += rows
            if progress is not None:
                progress(run.done, total)

        result = work / "result"
        result.mkdir(exist_ok=True)
        spools = _open_spools(new, work / "spool" if target_format == "dcp" else result, dump=target_format != "dcp")
        for name, spool in spools.items():
            run.spool(name, spool, advance)
            run.check_distinct(name, spool)
        finished = [spool.counted() for spool in spools.values()]
        if target_format == "dynamicemb":
            for record in finished:
                write_options(result, record)
        else:

            def read(name: str, rank: int, chunk: int) -> Rows:
                rows = spools[name].read(rank, chunk)
                advance(rows.keys.numel())
                return rows

            finished = dcp.write(result, finished, range(world_size), read, alone=True, journal=journal)
        publish(target, result)
    except CheckpointError:
        shutil.rmtree(work, ignore_errors=True)  # what is wrong with the source would be wrong again
        raise
    finally:
        journal.close()
    return Conversion(tables=tuple(finished), rows=total // passes, moved=run.moved, resumed=run.resumed)


def _identity(source: Checkpoint, records: Sequence[TableRecord], target_format: str) -> Entry:
    """What must be the same for a conversion to go on."""
    digest = zlib.crc32(to_json(records).encode())
    return {
        "journal": 1,
        "source": str(source.path.resolve()),
        "files": fingerprint(source.path),
        "target": f"{target_format} {digest:08x}",
    }


def _clear(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "journal":
            path.unlink()
