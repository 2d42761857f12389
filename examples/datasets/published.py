"""Any of the published data sets, by what its files look like."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from examples.datasets.amazon import HEADERS as AMAZON_HEADERS
from examples.datasets.amazon import read_amazon
from examples.datasets.gowalla import read_gowalla
from examples.datasets.histories import Histories
from examples.datasets.kuairand import read_kuairand
from examples.datasets.movielens import HEADER as MOVIELENS_HEADER
from examples.datasets.movielens import read_movielens
from examples.datasets.tables import Watch, open_lines
from examples.datasets.yambda import read_yambda

KNOWN = (
    "a MovieLens folder (ratings.dat or ratings.csv), a KuaiRand folder (log_standard_*.csv), "
    "loc-gowalla_totalCheckins.txt, an Amazon category (ratings as .csv, reviews as .jsonl or .json), "
    "or a Yambda .parquet; text files may be packed as .gz"
)
_READERS: dict[str, Callable[..., Histories]] = {
    "MovieLens": read_movielens, "KuaiRand": read_kuairand, "Gowalla": read_gowalla, "Amazon": read_amazon,
    "Yambda": read_yambda,
}  # fmt: skip


def identify(path: str | Path) -> str:
    """Which data set it is: `MovieLens`, `KuaiRand`, `Gowalla`, `Amazon` or `Yambda`.

    Raises:
        FileNotFoundError: If there is nothing, or a folder lacks the files.
        ValueError: If a file is none of them.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give {KNOWN}")
    if path.is_dir():
        return _folder(path)
    name = _file(path)
    if name is None:
        raise ValueError(f"{path} is none of the known data sets; give {KNOWN}")
    return name


def _folder(path: Path) -> str:
    if (path / "ratings.dat").exists() or (path / "ratings.csv").exists():
        return "MovieLens"
    if any(path.glob("log_standard_*.csv")) or any(path.glob("data/log_standard_*.csv")):
        return "KuaiRand"
    raise FileNotFoundError(f"{path} has neither ratings.dat nor ratings.csv (MovieLens) nor log_standard_*.csv "
                            f"(KuaiRand); give {KNOWN}")  # fmt: skip


def _file(path: Path) -> str | None:
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "Yambda"
    if path.name in ("ratings.dat", "ratings.csv") and (
        MOVIELENS_HEADER in _first_line(path) or "::" in _first_line(path)
    ):
        return "MovieLens"
    line = _first_line(path)
    if line.count("\t") == 4:
        return "Gowalla"
    if line in AMAZON_HEADERS or line.startswith("{") or (line.count(",") == 3 and not line.startswith("userId")):
        return "Amazon"
    return None


def _first_line(path: Path) -> str:
    with open_lines(path) as lines:
        return next(islice(lines, 1), "").strip("\r\n")


def read_histories(path: str | Path, *, watch: Watch | None = None) -> Histories:
    """Reads a data set of users and what they did.

    Args:
        path: Its folder or file.
        watch: Is told how far reading is.

    Raises:
        FileNotFoundError: If there is nothing, or a folder lacks the files.
        ValueError: If it is no such data set, or a file is not in its published format.
    """
    path, name = Path(path), identify(path)
    if name == "MovieLens" and path.is_file():
        path = path.parent
    return _READERS[name](path, watch=watch)
