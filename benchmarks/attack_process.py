"""The process that attacks, at the lowest priority: each line of its input names an attack.

`python -m benchmarks.attack_process PORT METRICS_PORT SECONDS [CERTIFICATES]` answers each with `done` and what came
of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from benchmarks import attack_calls, attack_messages, attack_wires
from benchmarks.attack_client import Attacker

_PATIENCE_SECONDS = 30.0


async def attack(name: str, port: int, metrics_port: int, seconds: float, folder: Path | None) -> dict[str, int]:
    """Carries one attack out; returns what it counted."""
    calls = {one.__name__: one for one in (*attack_calls.attacks(), *attack_messages.attacks())}
    wires = {one.__name__: one for one in (*attack_wires.attacks(), *attack_wires.attacks_on_tls())}
    outcomes: dict[str, int] = {}
    if name in calls:
        attacker = Attacker(port, seconds)
        try:
            await asyncio.wait_for(calls[name](attacker), seconds + _PATIENCE_SECONDS)
        except TimeoutError:
            outcomes["unfinished"] = 1
        outcomes |= attacker.outcomes
        await attacker.close()
    else:
        target = attack_wires.Target(port, metrics_port, seconds, folder)
        try:
            await asyncio.wait_for(wires[name](target), seconds + _PATIENCE_SECONDS)
        except TimeoutError:
            outcomes["unfinished"] = 1
        outcomes |= target.outcomes
        await target.close()
    return outcomes


def main(arguments: list[str]) -> None:
    """Reads the names of attacks to the end of its input."""
    os.nice(15)
    port, metrics_port, seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    folder = Path(arguments[3]) if len(arguments) > 3 else None
    for line in sys.stdin:
        said: dict[str, object] = {}
        try:
            said.update(asyncio.run(attack(line.strip(), port, metrics_port, seconds, folder)))
        except (OSError, RuntimeError) as error:
            said["error"] = f"{type(error).__name__}: {error}"
        print("done", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
