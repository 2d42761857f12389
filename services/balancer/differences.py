"""What ranks of one session see differently."""

from __future__ import annotations

from services.balancer.submissions import Terms


def difference(ours: Terms, theirs: Terms) -> tuple[str, str, str] | None:
    """The first thing that two ranks see differently: field, our value, their value."""
    if ours == theirs:
        return None
    for name in ("world_size", "window"):
        if getattr(ours, name) != getattr(theirs, name):
            return name, str(getattr(ours, name)), str(getattr(theirs, name))
    for name in ("strategy", "counts", "tolerance", "move_price", "speeds", "memory_caps", "min_samples"):
        mine, other = getattr(ours.options, name), getattr(theirs.options, name)
        if mine != other:
            if isinstance(mine, tuple) and len(mine) == len(other):
                at = next(i for i in range(len(mine)) if mine[i] != other[i])
                return f"options.{name}[{at}]", str(mine[at]), str(other[at])
            return f"options.{name}", str(mine), str(other)
    for at in range(max(len(ours.schema), len(theirs.schema))):
        mine_line = ours.schema[at] if at < len(ours.schema) else "absent"
        other_line = theirs.schema[at] if at < len(theirs.schema) else "absent"
        if mine_line != other_line:
            return f"schema.fields[{at}]", mine_line, other_line
    return "schema.hash", ours.schema_hash.hex(), theirs.schema_hash.hex()
