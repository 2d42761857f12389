"""Values that follow from the samples, computed from the batch that is trained."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer_client.balancing.batches.nodes import Node, Parts, Taken
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations, Derive, MaxLength


@dataclass(frozen=True, slots=True)
class DerivedNode:
    """A value that follows from the samples; `settle` puts it in place when the rest is built.

    Attributes:
        path: Where it is.
        function: What gives it.
        column: The column of a `MaxLength`.
    """

    path: str
    function: Derive
    column: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that cannot be pickled, such as a lambda, is replaced by what says so."""
        function = self.function
        try:
            pickle.dumps(function)
        except Exception as error:
            function = _Missing(self.path, str(error))
        return DerivedNode, (self.path, function, self.column)

    def build(self, _parts: Parts) -> None:
        """See `Node`."""

    def take(self, _value: Any, _taken: Taken) -> bool:
        """See `Node`; the value does not matter."""
        return True


def derived_nodes(node: Node) -> Iterator[DerivedNode]:
    """All derived values below a node."""
    if isinstance(node, DerivedNode):
        yield node
    for _, child in getattr(node, "items", ()):
        yield from derived_nodes(child)
    if (members := getattr(node, "members", None)) is not None:
        yield from derived_nodes(members)


def settle(root: Node, batch: Any, parts: Parts, spec: BatchSpec | None = None) -> Any:
    """The batch with its derived values, which were None in it until now."""
    own = None if spec is None else Declarations(spec)
    return _place(root, batch, {node.path: _compute(node, batch, parts, own) for node in derived_nodes(root)})


def _compute(node: DerivedNode, batch: Any, parts: Parts, own: Declarations | None) -> Any:
    function = node.function
    if isinstance(function, MaxLength):
        return max(parts.lengths_on_host(node.column), default=0)
    if isinstance(function, _Missing) and own is not None:
        declared = own.derive(node.path)
        function = declared if callable(declared) else function
    return function(batch)


def _place(node: Any, value: Any, found: dict[str, Any]) -> Any:
    if isinstance(node, DerivedNode):
        return found[node.path]
    changes = {}
    for key, child in getattr(node, "items", ()):
        if next(derived_nodes(child), None) is not None:
            changes[key] = _place(child, node.read(value, key), found)
    if (members := getattr(node, "members", None)) is not None:
        _place(members, value, found)
    return node.replace(value, changes) if changes else value


@dataclass(frozen=True, slots=True)
class _Missing:
    path: str
    why: str

    def __call__(self, _batch: Any) -> Any:
        raise BatchError(
            f"the function that gives {self.path!r} did not reach this rank, which has had no batch of its own: "
            f"{self.why}; declare a function of a module, or a MaxLength, in derived"
        )
