"""`evenkeel gain`: what balancing would gain a job, from the lengths of its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer_client.cli.common import errors_in_a_sentence, progress, show

if TYPE_CHECKING:  # numpy and the kernels are imported when the command runs
    import numpy as np
    from numpy.typing import NDArray

    from evenkeel.gain import Gain

_BARS, _WIDTH = 8, 40
_WORTH = 1.02  # a speed-up below is little beside what else a step's time varies by
_COSTS = {"linear": (1.0, 0.0), "attention": (0.0, 1.0)}
_COST_HELP = (
    "What a sample of n positions costs: linear, attention (n(n+1)/2), or A,B for A·n + B·n(n+1)/2; of a transformer "
    "of width W about 6·W,1."
)
_COLUMN_HELP = "Column of a CSV or Parquet file; lists count their items. The only one by default."


def gain(
    lengths: Annotated[
        Path, typer.Argument(help="Lengths of samples: .npy, .csv or .parquet.", exists=True, dir_okay=False)
    ],
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Ranks that train together.")] = 8,
    batch: Annotated[int, typer.Option(min=1, max=1 << 20, help="Samples of a rank's batch.")] = 128,
    column: Annotated[str | None, typer.Option(help=_COLUMN_HELP)] = None,
    cost: Annotated[str, typer.Option(help=_COST_HELP)] = "linear",
    in_order: Annotated[bool, typer.Option("--in-order", help="Batches as the file has them, not shuffled.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the loads here; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON instead.")] = False,
) -> None:
    """Estimate what balancing would gain, from the lengths of samples alone: one process, no GPU.

    A step is taken to last as long as its heaviest rank computes: of a job that waits for other things it is a bound.
    """
    import numpy as np

    from evenkeel.gain import estimate_gain

    with errors_in_a_sentence():
        linear, pairs = _cost(cost)
        values = _read(lengths, column)
        if not in_order:
            values = np.random.default_rng(0).permutation(values)
        with progress("planning") as bar:
            gains = estimate_gain(
                values, ranks=ranks, batch=batch, linear=linear, pairs=pairs, progress=lambda done: bar(done, 1.0)
            )
        if png is not None:
            _draw(png, gains, ranks)
    if as_json:
        rows = [{name: getattr(one, name) for name in ("way", "speed_up", "imbalance", "moved_share")} for one in gains]
        loads = {one.way: one.loads.round(6).tolist() for one in gains}
        typer.echo(json.dumps({"ranks": ranks, "batch": batch, "cost": cost, "ways": rows, "loads": loads}))
    else:
        _show(gains, ranks, batch)


def _cost(text: str) -> tuple[float, float]:
    try:
        linear, pairs = _COSTS.get(text) or map(float, text.split(","))
    except ValueError:
        linear = pairs = -1.0
    if not (0 <= linear < 1e12 and 0 <= pairs < 1e12 and linear + pairs > 0):
        raise ValueError(f"--cost is {text!r}; use linear, attention, or two numbers such as 6144,1")
    return linear, pairs


def _read(path: Path, column: str | None) -> NDArray[np.int64]:
    import numpy as np

    if path.suffix not in (".npy", ".csv", ".parquet"):
        raise ValueError(f"{path}: the name must end in .npy, .csv or .parquet")
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else None
    except (ValueError, EOFError):
        raise ValueError(f"{path} is no .npy file of numbers; write it with numpy.save") from None
    values = _column(path, column) if values is None else values
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iuf"):
        raise ValueError(f"{path} holds {values.dtype} of shape {values.shape}; give one number for each sample")
    if values.dtype.kind == "f" and not (values == np.rint(values)).all():  # nor are NaN and infinities
        raise ValueError(f"{path} holds {values[values != np.rint(values)][0]}; give whole numbers of positions")
    if values.size and (values.min() < 0 or values.max() > 1 << 32):
        raise ValueError(f"{path} holds {values.min()} to {values.max()}; give lengths of 0 to 2^32")
    if values.size and not values.any():
        raise ValueError(f"{path} holds only zeros: there is nothing to balance; give the positions of each sample")
    return np.array(values, np.int64)  # which may be written to


def _column(path: Path, column: str | None) -> Any:
    import pyarrow.compute
    import pyarrow.dataset

    try:
        data = pyarrow.dataset.dataset(path, format=path.suffix[1:])
        names = data.schema.names
        if column not in names if column is not None else len(names) != 1:
            given = "is not given" if column is None else f"is {column!r}"
            raise ValueError(f"--column {given}; name one of {', '.join(names)}")
        if path.suffix == ".csv" and column is None and names[0].replace(".", "", 1).isdecimal():
            raise ValueError(f"{path} begins with {names[0]} where the name of its column should be; give it one")
        values = data.to_table(columns=[column or names[0]]).column(0)
        if pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type):
            values = pyarrow.compute.list_value_length(values)
        elif pyarrow.types.is_string(values.type):  # some of which may be none: the error shows the first
            values = values.cast("float64")
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; give one number for each sample") from None
    if values.null_count:
        raise ValueError(f"{path} has {values.null_count} samples without a length; fill or drop them")
    return values.to_numpy()


def _show(gains: list[Gain], ranks: int, batch: int) -> None:
    rows = [(one.way, f"{one.imbalance:.3f}", *_against_loaded(one)) for one in gains]
    show(f"{ranks} ranks × {batch} samples", ("", "heaviest / mean rank", "step time", "bytes moved"), rows)
    most = max(one.loads[0] for one in gains)
    for one in gains[:2]:
        typer.echo(f"load of the ranks, {one.way}, heaviest first; 1 is the mean")
        for rank in sorted({round(place * (ranks - 1) / (_BARS - 1)) for place in range(_BARS)}):
            typer.echo(f"{rank + 1:5} {one.loads[rank]:6.3f} {'█' * round(_WIDTH * one.loads[rank] / most)}")
    typer.echo(_next_step(gains))


def _against_loaded(one: Gain) -> tuple[str, str]:
    return ("", "") if one.speed_up == 1 else (f"{1 / one.speed_up - 1:+.1%}", f"{one.moved_share:.1%}")


def _next_step(gains: list[Gain]) -> str:
    best = max(one.speed_up for one in gains)
    if best < _WORTH:
        return "Next: nothing. These batches are even as they are, or as even as samples of this kind can be."
    return f"Next: {next(one.remedy for one in gains[1:] if one.speed_up * _WORTH >= best)}"


def _draw(path: Path, gains: list[Gain], ranks: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for one in gains:
        axes.plot(range(1, ranks + 1), one.loads, label=f"{one.way}: {one.imbalance:.3f}", drawstyle="steps-mid")
    axes.set(xlabel="rank, heaviest first", ylabel="load over the mean", title="load of the ranks")
    axes.legend()
    figure.savefig(path, dpi=120)
