"""Parts that are chosen by name: strategies, costs, pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Plugins(Generic[T]):
    """The parts of one kind: ours, and those of installed packages.

    Attributes:
        own: Ours. A name of ours stays ours, whatever packages there are.
    """

    def __init__(self, kind: str, own: Mapping[str, T], *, group: str) -> None:
        """Parts of one kind.

        Args:
            kind: What they are, for messages.
            own: Ours.
            group: The group of entry points by which an installed package adds its own.
        """
        self.own = dict(own)
        self._kind, self._group = kind, group

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """Those of installed packages, looked up once."""
        return {entry.name: entry for entry in entry_points(group=self._group)}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted({*self.own, *self.installed}))

    def find(self, name: str) -> T:
        """The part of that name, imported now if a package brings it.

        Raises:
            ValueError: If there is none.
        """
        if name in self.own:
            return self.own[name]
        self.check(name)
        result: Any = self.installed[name].load()
        return result  # type: ignore[no-any-return]

    def check(self, name: str) -> None:
        """Whether there is such a part.

        Raises:
            ValueError: If there is none.
        """
        if name not in self.names:
            raise ValueError(f"{self._kind} is {name!r}; choose one of {', '.join(self.names)}")
