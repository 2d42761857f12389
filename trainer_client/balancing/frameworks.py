"""What training frameworks would do wrong with a loader or a sampler that is given to them, told from who calls it.

Each of these would train, and lose or double samples, or save what cannot be loaded. It is refused where the framework
does it, with what to do instead.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

_LIGHTNING = ("lightning.", "pytorch_lightning.")
_GUIDE = "docs/frameworks.md has a program for each framework"


class FrameworkError(ValueError):
    """A framework does with a loader or a sampler what would train the wrong samples, or save what cannot be loaded."""


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def check_trainer() -> None:
    """Called where a loop over a balanced loader begins, by its method.

    Raises:
        FrameworkError: If Lightning trains with the loader itself.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (name := _name(frame)).startswith(_LIGHTNING):
        if name.endswith(".loops.fit_loop"):
            raise FrameworkError(
                "Lightning trains with a BalancedLoader itself: it would give every epoch the same order, and save one "
                "rank's state for all; give it trainer_client.balancing.trainers.LightningLoader(loader, trainer) in "
                f"`train_dataloader`; {_GUIDE}"
            )
        if ".loops." in name:  # it validates, tests or predicts
            return
        frame = frame.f_back


def check_saver(name: str, world_size: int) -> None:
    """Called where the state of one rank's loader is asked for.

    Args:
        name: Of the module that asks.
        world_size: Ranks that balance together.

    Raises:
        FrameworkError: If it is asked for by what keeps one rank's state for all.
    """
    if name.startswith("torch.distributed.checkpoint."):
        what = "torch.distributed.checkpoint keeps one value for all ranks, and looks for the same fields when it loads"
    elif world_size > 1 and name.startswith(("accelerate.", *_LIGHTNING)):
        what = f"{name.partition('.')[0]} keeps the state of one rank for all"
    else:
        return
    raise FrameworkError(
        f"{what}, and the state of a BalancedLoader is that of its rank; give it, in the loader's place, "
        f"trainer_client.balancing.trainers.JobState(loader); {_GUIDE}"
    )


def check_copier(field: str) -> NoReturn:
    """Called where a part of a loader is asked for that only those want who make another loader of it.

    Args:
        field: What is asked for.

    Raises:
        FrameworkError: If Accelerate asks.
        AttributeError: If somebody else does.
    """
    if _name(sys._getframe(2)).startswith("accelerate."):
        raise FrameworkError(
            "Accelerate would make a plain DataLoader of a BalancedLoader's data, which is not balanced and begins at "
            "another sample; use the loader as it is: instead of `skip_first_batches` load a state with JobState, and "
            f"give `prepare`, not `prepare_data_loader`, the loader or nothing; {_GUIDE}"
        )
    raise AttributeError(f"'BalancedLoader' object has no attribute {field!r}; its wrapped loader is `loader`")


def check_divider(sampler: str) -> None:
    """Called where an iteration over a sampler of global batches begins, by its method.

    Args:
        sampler: Its class.

    Raises:
        FrameworkError: If Accelerate divides over the ranks what is divided already.
    """
    frame = sys._getframe(2)
    if _name(frame).startswith("accelerate.") and frame.f_code.co_qualname.startswith("BatchSamplerShard."):
        raise FrameworkError(
            f"Accelerate would divide over the ranks what {sampler} has divided already, and each rank would train a "
            "part of its part; do not `prepare` the DataLoader of this sampler: BalancedLoader(…, "
            f"device=accelerator.device) moves its batches; {_GUIDE}"
        )


class WrappedLoader:
    """What training frameworks look for in a loader, of one that wraps another.

    Attributes:
        loader: The wrapped one.
    """

    loader: Any

    @property
    def dataset(self) -> Any:
        """The wrapped loader's, as the next two are: training frameworks look for them."""
        return self._of_loader("dataset")

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return self._of_loader("sampler")

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return self._of_loader("batch_sampler")

    @property
    def collate_fn(self) -> NoReturn:
        """Not the wrapped loader's: a loader that is made of this one's parts is not balanced.

        Raises:
            AttributeError: If it is asked for.
        """
        check_copier("collate_fn")

    def _of_loader(self, name: str) -> Any:
        if not hasattr(self.loader, name):
            raise AttributeError(f"the wrapped {type(self.loader).__name__} has no {name}", name=name, obj=self)
        return getattr(self.loader, name)
