"""The Python of README and docs for trainers runs as written, around a small model and a running balancer."""

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.embedding.checkpoint.test_live import stand_in

ROOT = Path(__file__).parents[2]
TEXTS = (
    "README.md", "docs/start/gain.md", "docs/train/loop.md", "docs/train/batches.md", "docs/train/windows.md",
    "docs/train/resume.md", "docs/operate/deployment.md",
)  # fmt: skip
ELSEWHERE = {
    "docs/start/tutorial.md", "docs/train/frameworks.md", "docs/train/meshes.md", "docs/train/giants.md",
    "docs/train/recsys_examples.md", "docs/train/torcheasyrec.md", "docs/place/planning.md", "docs/place/planner.md",
    "docs/place/routing.md",
}  # fmt: skip
"""Pages whose code runs in other tests."""
RATINGS = "userId,movieId,rating,timestamp\n" + "".join(f"{user},{user % 7},3.5,{user}\n" for user in range(40))


class Model(nn.Module):
    """A sum over the history's values; of a `BalancedBatch` the loss, as a pipeline's model returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1, 1)

    def forward(self, batch: Any) -> Any:
        inner = getattr(batch, "batch", batch)
        found = self.dense(inner["history"].values().float()[:, None])
        return found if inner is batch else (found.sum() * batch.loss_scale, found.detach())


def _collate(samples: list[int]) -> dict[str, Any]:
    from torchrec import JaggedTensor

    return {"history": JaggedTensor(values=torch.tensor(samples), lengths=torch.ones(len(samples), dtype=torch.int64))}


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / text).read_text(encoding="utf-8"), re.S)


def _run_all(_: int, folder: str, address: str) -> list[str]:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    from trainer_client import BalancedLoader, BalanceOptions, Balancer
    from trainer_client.balancing.batches import BatchSpec, MaxLength
    from trainer_client.balancing.costs import TokenCost
    from trainer_client.balancing.pipelines import balanced_batches, make_pipeline
    from trainer_client.observing.measurement import StepTimer

    os.chdir(folder)
    Path("ml-20m").mkdir()
    Path("ml-20m/ratings.csv").write_text(RATINGS)
    Path("balance.yaml").write_text(_blocks("docs/train/loop.md", "yaml")[0])
    model = Model()
    history = JaggedTensor(values=torch.ones(6), lengths=torch.tensor([1, 2, 3]))
    data = [{"history": history, "user": torch.tensor([1, 1, 2])} for _ in range(12)]
    run = []
    for text in TEXTS:
        names: dict[str, Any] = {
            "dataloader": data, "data_loader": data, "batch": data[0], "device": torch.device("cpu"), "model": model,
            "dense_parameters": list(model.parameters()), "optimizer": torch.optim.SGD(model.parameters(), 1e-3),
            "loss_sum": lambda output, _: output.sum(), "cost": TokenCost(tokens="history"), "torch": torch,
            "rank": 0, "world_size": 1, "time": time, "timer": StepTimer("cpu"), "balancer": Balancer.embedded(),
            "kjt": KeyedJaggedTensor(keys=["a"], values=torch.arange(4), lengths=torch.tensor([4])),
            "block_sizes": torch.tensor([100]), "BatchSpec": BatchSpec, "MaxLength": MaxLength, "Balancer": Balancer,
            "BalancedLoader": BalancedLoader, "BalanceOptions": BalanceOptions, "dataset": range(9000),
            "collate": _collate, "lengths": torch.arange(9000), "cost_of_sample": float,
            "loader": BalancedLoader(data, Balancer.embedded(), cost=TokenCost(tokens="history")),
        }  # fmt: skip
        for number, block in enumerate(_blocks(text, "python")):
            # The balancer listens elsewhere, each block is a job, and the model has no sharded tables.
            code = block.replace("balancer:50051", address).replace("train-42", f"{Path(text).stem}-{number}")
            code = code.replace('make_pipeline("sparse_dist"', 'make_pipeline("base"')
            code = code.replace("num_workers=4", "num_workers=0")  # each loop would start them anew
            code = code.replace("0.0.0.0", "127.0.0.1").replace("/shared/evenkeel-targets", folder)
            if "pipeline.progress" in code and "make_pipeline" not in code:  # a new one: the last has ended
                loader = BalancedLoader(data, Balancer.embedded(), cost=names["cost"])
                names["batches"] = balanced_batches(loader)
                names["pipeline"] = make_pipeline("base", model, names["optimizer"], names["device"])
            exec(compile(code, f"{text}, block {number}", "exec"), names)
            run.append(text)
    return run


def _run_on_a_mesh(rank: int, address: str) -> list[int]:
    from trainer_client.balancing.costs import TokenCost

    trained: list[int] = []

    def dataset_of(shard: int, num_shards: int) -> list[dict[str, torch.Tensor]]:
        return [{"id": torch.arange(4) * num_shards + shard + 100 * step} for step in range(3)]

    names: dict[str, Any] = {
        "device": torch.device("cpu"), "world_size": 4, "dataset_of": dataset_of, "cost": TokenCost(tokens="id"),
        "train": lambda batch: trained.extend(batch["id"].tolist()),
    }  # fmt: skip
    (block,) = _blocks("docs/train/meshes.md", "python")
    exec(compile(block.replace("balancer:50051", address), "docs/train/meshes.md", "exec"), names)
    names["balancer"].close()
    return trained


def _run_on_tables(_: int, folder: str) -> tuple[int, bool]:
    from torchrec import KeyedJaggedTensor

    from trainer_client.embedding.tables import RoutedTable
    from trainer_client.planning import KeyStatistics

    device = torch.device("cpu")

    def keys(*features: str) -> KeyedJaggedTensor:
        count = len(features)
        lengths = torch.ones(4 * count, dtype=torch.int64)
        return KeyedJaggedTensor(keys=list(features), values=torch.arange(4).repeat(count), lengths=lengths)

    class Ranker(nn.Module):
        def __init__(self, collection: nn.Module) -> None:
            super().__init__()
            self.collection, self.score = collection, nn.Linear(64, 1)

        def forward(self, batch: Any) -> Any:
            return self.score(self.collection(batch)["item"])

    seen = KeyStatistics({"items": ["item"]})
    seen.observe(keys("item"))
    names: dict[str, Any] = {
        "kjt": keys("a", "b"), "block_sizes": torch.tensor([100, 100]), "world_size": 2, "device": device,
        "torch": torch, "table": RoutedTable(name="items", embedding_dim=64, features=("item",), num_embeddings=1000),
        "statistics": seen,
        "DistributedDataParallel": lambda module, device_ids: nn.parallel.DistributedDataParallel(module),
        "Ranker": Ranker, "batch": keys("item"), "loader": SimpleNamespace(loss_scale=0.25),
    }  # fmt: skip
    sys.modules.update(stand_in())  # for DynamicEmb, whose tables need a GPU
    load = {"dumps": 0}
    names["DynamicEmbLoad"] = lambda path, model, optim: load.update(dumps=load["dumps"] + 1)
    names["model"] = nn.Identity()
    blocks = _blocks("docs/place/routing.md", "python")
    for number, block in enumerate(blocks):
        code = block.replace("/shared/", f"{folder}/").replace("10_000_000", "1_000")
        exec(compile(code, f"docs/place/routing.md, block {number}", "exec"), names)
        names["kjt"] = keys("item")
    assert load == {"dumps": 1}
    return len(blocks), (Path(folder) / "step-9000").is_dir()


def test_the_tables_are_trained_and_saved(tmp_path: Path) -> None:
    assert run_ranks(1, _run_on_tables, str(tmp_path)) == [(6, True)]


def test_every_page_with_python_is_run() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} | {"README.md"}
    assert {page for page in pages if _blocks(page, "python")} == {*TEXTS, *ELSEWHERE}


def test_the_mesh_gives_peers_the_same_samples() -> None:
    with running_balancer() as balancer:
        trained = run_ranks(4, _run_on_a_mesh, balancer.address)
    assert trained[0] == trained[1] != trained[2] == trained[3]
    assert sorted(trained[0] + trained[2]) == [100 * step + sample for step in range(3) for sample in range(8)]


def test_the_blocks_run(tmp_path: Path) -> None:
    with running_balancer() as balancer:
        (run,) = run_ranks(1, _run_all, str(tmp_path), balancer.address)
    assert set(run) == set(TEXTS)
