"""Keys of public traces, in the order of their requests: where they come from, and what reads them.

python -m benchmarks.key_traces_public --checkouts DIR --out DIR

`DIR/OWNER+NAME` is a clone of each repository; those that are not there are passed over. The files are not part of
Evenkeel.
"""

from __future__ import annotations

import gzip
import lzma
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.key_files import numbered

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Public:
    """A public trace.

    Attributes:
        repository: Owner and name of a repository on GitHub.
        file: Path in it.
        about: What its keys are, and in which order they come.
        read: From the file's content to keys.
    """

    repository: str
    file: str
    about: str
    read: Callable[[bytes], Array]


def integers(kind: str) -> Callable[[bytes], Array]:
    """Integers of one kind, packed by xz, and nothing else."""
    return lambda content: np.frombuffer(lzma.decompress(content), dtype=kind).astype(np.int64)


def blocks(content: bytes) -> Array:
    """Lines of a first block and how many follow each other, packed by zstd."""
    text = subprocess.run(["zstd", "-dc"], input=content, capture_output=True, check=True).stdout
    lines = np.loadtxt(text.decode().splitlines(), dtype=np.int64, usecols=(0, 1))
    begins = np.cumsum(lines[:, 1]) - lines[:, 1]
    found: Array = np.arange(lines[:, 1].sum()) + np.repeat(lines[:, 0] - begins, lines[:, 1])
    return found


def timed(key: int, time: int, *, comma: str | None = None, skip: int = 0) -> Callable[[bytes], Array]:
    """Lines with a key and a time; those of one time stay in their order."""

    def read(content: bytes) -> Array:
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        columns = np.loadtxt(text.decode().splitlines(), delimiter=comma, skiprows=skip, usecols=(key, time))
        found: Array = columns[np.argsort(columns[:, 1], kind="stable"), 0].astype(np.int64)
        return found

    return read


def words(content: bytes) -> Array:
    """A key in each line, packed by gzip; a star separates parts."""
    return numbered(np.array([line for line in gzip.decompress(content).split() if line != b"*"]))


def addresses(content: bytes) -> Array:
    """Lines of an access to memory, packed by gzip: cache lines of 64 bytes."""
    return np.array([int(line.split()[1], 16) >> 6 for line in gzip.decompress(content).splitlines()])


def by_user(content: bytes) -> Array:
    """Lines of a user and all items of hers."""
    return np.concatenate([np.array(line.split()[1:], dtype=np.int64) for line in content.splitlines()])


_CAFFEINE = "simulator/src/main/resources/com/github/benmanes/caffeine/cache/simulator/parser"

PUBLIC = {
    "scarab": Public(
        "ben-manes/caffeine",
        f"{_CAFFEINE}/scarab/scarab-recs.trace.xz",
        "lookups of product recommendations, in time",
        integers(">i8"),
    ),
    "orm-busy": Public(
        "ben-manes/caffeine",
        f"{_CAFFEINE}/cache2k/orm-busy.trace.xz",
        "rows that a web application asked its database for, in time",
        integers(">i4"),
    ),
    "orm-night": Public(
        "ben-manes/caffeine", f"{_CAFFEINE}/cache2k/orm-night.trace.xz", "the same at night", integers(">i4")
    ),
    "web07": Public(
        "ben-manes/caffeine", f"{_CAFFEINE}/cache2k/web07.trace.xz", "pages of a web shop, in time", integers(">i4")
    ),
    "web12": Public(
        "ben-manes/caffeine", f"{_CAFFEINE}/cache2k/web12.trace.xz", "the same in another month", integers(">i4")
    ),
    "w106": Public(
        "ben-manes/caffeine",
        f"{_CAFFEINE}/cloud_physics/w106.trace.xz",
        "blocks of a virtual machine's disk, in time",
        integers(">u4"),
    ),
    "oltp": Public("moka-rs/cache-trace", "arc/OLTP.lis.zst", "blocks of a database's disk, in time", blocks),
    "p3": Public("moka-rs/cache-trace", "arc/P3.lis.zst", "blocks of a workstation's disk, in time", blocks),
    "wikipedia-pages": Public(
        "marwane-alilou/TemporalMotif-CTDG", "Datasets/ml_wikipedia.txt", "pages that were edited, in time", timed(1, 2)
    ),
    "wikipedia-users": Public(
        "marwane-alilou/TemporalMotif-CTDG", "Datasets/ml_wikipedia.txt", "who edited them, in time", timed(0, 2)
    ),
    "ml-100k": Public(
        "rat-nick/recsys",
        "data/ml-100k/u.data",
        "films that were rated, in time",
        timed(1, 3, comma="|", skip=1),
    ),
    "ml-1m": Public(
        "dev-sumanta/dsmlai",
        "ratings.dat.gz",
        "films that 2,950 of 6,040 users rated, in time",
        timed(2, 6, comma=":"),
    ),
    "amazon-video": Public(
        "kang205/SASRec", "data/Video.txt", "games that were rated, user by user", lambda c: _columns(c)[:, 1]
    ),
    "gowalla": Public("gusye1234/LightGCN-PyTorch", "data/gowalla/test.txt", "places visited, user by user", by_user),
    "amazon-book": Public(
        "gusye1234/LightGCN-PyTorch", "data/amazon-book/test.txt", "books that were rated, user by user", by_user
    ),
    "yelp": Public(
        "gusye1234/LightGCN-PyTorch", "data/yelp2018/test.txt", "businesses that were rated, user by user", by_user
    ),
    "sprite": Public("ben-manes/caffeine", f"{_CAFFEINE}/lirs/sprite.trace.gz", "blocks of a file server", words),
    "2-pools": Public("ben-manes/caffeine", f"{_CAFFEINE}/lirs/2_pools.trace.gz", "index and rows, made", words),
    "gcc": Public("ben-manes/caffeine", f"{_CAFFEINE}/address/gcc.trace.gz", "memory of a program", addresses),
    "twolf": Public("ben-manes/caffeine", f"{_CAFFEINE}/address/twolf.trace.gz", "memory of a program", addresses),
    "swim": Public("ben-manes/caffeine", f"{_CAFFEINE}/address/swim.trace.gz", "memory of a program", addresses),
    "enron": Public(
        "marwane-alilou/TemporalMotif-CTDG", "Datasets/ml_enron.txt", "who got electronic mail, in time", timed(1, 2)
    ),
    "messages": Public(
        "marwane-alilou/TemporalMotif-CTDG", "Datasets/CollegeMsg.txt", "who got a message, in time", timed(1, 2)
    ),
}
"""By name. Some hold a part of what was published: what is said in `about`, or what is there to test on."""


def _columns(content: bytes) -> Array:
    return np.loadtxt(content.decode().splitlines(), dtype=np.int64)


def main(
    checkouts: Annotated[Path, typer.Option(help="Folder of the clones.")],
    out: Annotated[Path, typer.Option(help="Folder for the .npy files.")],
) -> None:
    """Write the keys of every trace whose repository is there, numbered in the order of their first lookups."""
    out.mkdir(parents=True, exist_ok=True)
    for name, source in PUBLIC.items():
        path = checkouts / source.repository.replace("/", "+") / source.file
        if not path.exists():
            print(f"{name}: no {path}")
            continue
        keys = numbered(source.read(path.read_bytes()))
        np.save(out / f"{name}.npy", keys)
        print(f"{name}: {len(keys):,} lookups of {keys.max() + 1:,} keys")


if __name__ == "__main__":
    typer.run(main)
