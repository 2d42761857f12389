"""One rank of TorchEasyRec's training, started by torchrun: `CHECKOUT FOLDER plain|balanced|planned`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.checkouts import load_torcheasyrec_training
from evenkeel.placement import Sharding
from examples.plan_torcheasyrec import plan_training
from trainer_client.balancing.torcheasyrec import balance_training


def keep_plan(theirs: Any, folder: Path) -> None:
    """Its planner's choice is written down, table by table."""
    make_planner = theirs.create_planner

    def create_planner(*args: Any, **kwargs: Any) -> Any:
        planner = make_planner(*args, **kwargs)
        plan = planner.collective_plan

        def collective_plan(*args: Any, **kwargs: Any) -> Any:
            chosen = plan(*args, **kwargs)
            tables = {
                name: [sharding.sharding_type, sharding.compute_kernel]
                for module in chosen.plan.values()
                for name, sharding in module.items()
            }
            (folder / "tables.json").write_text(json.dumps(tables))
            return chosen

        planner.collective_plan = collective_plan
        return planner

    theirs.create_planner = create_planner


def main(checkout: Path, folder: Path, how: str) -> None:
    """Trains, and writes down per step the samples, their keys, and the loss."""
    peer = load_torcheasyrec_training(checkout)
    theirs, steps = peer.planner, list[dict[str, Any]]()
    make_pipeline = theirs.create_train_pipeline

    class Recording:
        """Its pipeline, with every batch written down that it has trained."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.pipeline = make_pipeline(*args, **kwargs)

        def progress(self, batches: Any) -> Any:
            result = self.pipeline.progress(batches)
            losses, _, batch = result
            sparse = [one for group in batch.sparse_features.values() for one in group.to_dict().items()]
            users = next(value.values() for name, value in sparse if name == "user")
            keys = sum(int(value.values().numel()) for _, value in sparse)
            loss = sum(float(value) for value in losses.values())
            steps.append({"users": users.tolist(), "keys": keys, "loss": loss})
            return result

    theirs.create_train_pipeline = Recording
    if how != "plain":
        balance_training()
    if how == "planned":
        plan_training(sharding=Sharding.DATA_PARALLEL)
        keep_plan(theirs, folder)
    theirs.train_and_evaluate(str(folder / "job.config"))
    assert list((folder / "model").glob("model.ckpt-*")), "it has saved no checkpoint"
    result = {"peer": peer.checkout.describe(), "steps": steps}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
