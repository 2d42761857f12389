"""Plans for TorchEasyRec's planner, with a stand-in of its enumerator and planner, on TorchRec's own."""

import copy
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from evenkeel.placement import InvalidInputError, Mode, Plan, PlanRequest, Runtime, Table
from evenkeel.placement import Topology as Machines
from evenkeel.placement.plan_file import PlanFile, dumps
from evenkeel.placement.planner import plan as make_plan
from examples.plan_torcheasyrec import apply_plan, plan_training

ROOT = Path(__file__).parents[3]
RANKS, SIZES = 4, {"user": 40_000_000, "item": 4_000_000, "category": 1_000}
PLACES = {f"model.group.ebc.{name}" for name in SIZES}


class StandInEnumerator(EmbeddingEnumerator):
    """Takes constraints by the whole name of a table, and makes two options of one that DynamicEmb holds, as theirs."""

    def __init__(self, topology: Topology, fqn_constraints: dict[str, Any]) -> None:
        super().__init__(topology, batch_size=512)
        self._fqn_constraints = fqn_constraints

    def enumerate(self, module: nn.Module, sharders: Any) -> list[Any]:
        self._constraints = {name.rpartition(".")[2]: each for name, each in self._fqn_constraints.items()}
        found = []
        for option in super().enumerate(module, sharders):
            held = getattr(self._fqn_constraints.get(f"{option.path}.{option.name}"), "use_dynamicemb", False)
            for caching in (False, True) if held else (None,):
                each = copy.copy(option)
                each.dynamicemb_options = SimpleNamespace(caching=caching)
                found.append(each)
        return found


def make_model() -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=64, num_embeddings=rows, feature_names=[name])
        for name, rows in SIZES.items()
    ]
    model = nn.ModuleDict(
        {"group": nn.ModuleDict({"ebc": EmbeddingBagCollection(tables, device=torch.device("meta"))})}
    )
    return nn.ModuleDict({"model": model})


def make_planner(constraints: dict[str, Any] | None = None, device: str = "cuda") -> EmbeddingShardingPlanner:
    topology = Topology(world_size=RANKS, compute_device=device, hbm_cap=16 << 30, ddr_cap=1 << 40)
    return EmbeddingShardingPlanner(topology=topology, enumerator=StandInEnumerator(topology, constraints or {}))


def planned(runtime: Runtime, hbm: int = 24 << 30) -> tuple[PlanRequest, Plan]:
    modes = {"user": (Mode.CACHING,), "item": (Mode.HBM_ONLY,), "category": (Mode.HBM_ONLY, Mode.CACHING)}
    request = PlanRequest(
        tables=tuple(
            Table(name=name, rows=rows, dim=64, pooled=True, modes=modes[name], ratio=0.3 if name == "user" else None)
            for name, rows in SIZES.items()
        ),
        topology=Machines(ranks=RANKS, hbm_bytes=hbm, host_bytes=1 << 40),
        hardware="h200",
        runtime=runtime,
    )
    return request, make_plan(request)


def dynamicemb(**more: Any) -> Any:
    constraint = ParameterConstraints(**more)
    vars(constraint).update(use_dynamicemb=True, dynamicemb_options=SimpleNamespace(caching=False))
    return constraint


def test_its_planner_chooses_what_the_plan_says() -> None:
    request, plan = planned(Runtime.TORCHREC)
    modes = {placed.table: placed for placed in plan.placements}
    assert (modes["user"].mode, modes["item"].mode) == (Mode.CACHING, Mode.HBM_ONLY)
    planner, model = make_planner(), make_model()
    sharders: Any = [EmbeddingBagCollectionSharder()]
    free = planner.plan(model, sharders).plan["model.group.ebc"]
    planner = make_planner()
    apply_plan(planner, model, request, plan)
    chosen = planner.plan(model, sharders).plan["model.group.ebc"]
    assert chosen["user"].compute_kernel == "fused_uvm_caching"
    assert chosen["user"].cache_params.load_factor == modes["user"].ratio
    assert chosen["item"].compute_kernel == "fused"
    assert {each.sharding_type for each in chosen.values()} == {"row_wise"}
    assert free["user"].cache_params is None


def test_of_dynamicembs_tables_it_takes_mode_and_share() -> None:
    request, plan = planned(Runtime.DYNAMICEMB)
    modes = {placed.table: placed for placed in plan.placements}
    planner, model = make_planner({place: dynamicemb() for place in PLACES}), make_model()
    apply_plan(planner, model, request, plan)
    options = planner._enumerator.enumerate(model, [EmbeddingBagCollectionSharder()])
    for option in options:
        placed = modes[option.name]
        assert option.cache_params == CacheParams(load_factor=placed.ratio)
        assert option.dynamicemb_options.caching == (placed.mode is Mode.CACHING)
    assert {option.name for option in options} == set(SIZES)


def test_what_does_not_fit_the_model_is_refused() -> None:
    model = make_model()
    request, plan = planned(Runtime.TORCHREC)
    with pytest.raises(InvalidInputError, match="DynamicEmb holds it"):
        apply_plan(make_planner({"model.group.ebc.user": dynamicemb()}), model, request, plan)
    with pytest.raises(InvalidInputError, match=r"has no dynamicemb \{…\} in its feature"):
        apply_plan(make_planner(), model, *planned(Runtime.DYNAMICEMB))
    with pytest.raises(InvalidInputError, match="are not in the model"):
        apply_plan(make_planner(), nn.Linear(2, 2), request, plan)
    collection: Any = model["model"]["group"]["ebc"]  # type: ignore[index]
    collection.embedding_bag_configs()[0].num_embeddings = 7
    with pytest.raises(InvalidInputError, match="differs from the plan"):
        apply_plan(make_planner(), model, request, plan)


@pytest.fixture
def tzrec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with the functions that are replaced, and the program that its users start."""
    package = tmp_path / "tzrec"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(
        "def create_planner(device, batch_size, ckpt_plan_path=None, global_constraints_cfg=None, model=None):\n"
        "    return make_planner(device=device)\n"
        "def create_dataloader(data_config, features, input_path, reserved_columns=None, mode=None): ...\n"
    )
    (package / "train_eval.py").write_text(
        "from tzrec import main\nmain.started = [main.create_planner.__module__, main.create_dataloader.__module__]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("tzrec.main").main
    for name in ("tzrec", "tzrec.main", "tzrec.train_eval"):
        sys.modules.pop(name, None)


def test_its_planners_are_made_by_a_plan_file_or_plan_themselves(tzrec: Any, tmp_path: Path) -> None:
    request, plan = planned(Runtime.TORCHREC)
    (tmp_path / "plan.json").write_text(dumps(PlanFile(request=request, plan=plan)), "utf-8")
    tzrec.make_planner = make_planner
    plan_training(tmp_path / "plan.json")
    planner = tzrec.create_planner(device="cuda", batch_size=512, model=make_model())
    assert planner._enumerator._fqn_constraints["model.group.ebc.user"].compute_kernels == ["fused_uvm_caching"]
    plan_training(topology=f"h200x{RANKS}")
    planner = tzrec.create_planner("cpu", 512, model=make_model())
    assert set(planner._enumerator._fqn_constraints) == PLACES
    with pytest.raises(ValueError, match="topology given beside a plan file"):
        plan_training(tmp_path / "plan.json", topology="h200x4")


def test_the_page_says_what_works(tzrec: Any) -> None:
    page = (ROOT / "docs/train/torcheasyrec.md").read_text("utf-8")
    start, cost = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(re.sub("^    ", "", start, flags=re.MULTILINE), {})
    wrapped = ["examples.plan_torcheasyrec", "trainer_client.balancing.adapters.torcheasyrec"]
    assert [sys.modules[one].__name__ for one in wrapped] == wrapped
    assert hasattr(tzrec.create_planner, "__wrapped__")
    assert hasattr(tzrec.create_dataloader, "__wrapped__")
    assert len(tzrec.started) == 2
    from trainer_client import HSTUCost
    from trainer_client.balancing.adapters.torcheasyrec import balance_training

    exec(cost, {"HSTUCost": HSTUCost, "balance_training": balance_training})
    assert isinstance(sys.modules["tzrec.main"], ModuleType)


def test_on_cpus_there_is_one_memory() -> None:
    request, plan = planned(Runtime.TORCHREC)
    planner, model = make_planner(device="cpu"), make_model()
    apply_plan(planner, model, request, plan)
    constraints = planner._enumerator._fqn_constraints
    assert set(constraints) == PLACES
    assert all(
        each.compute_kernels is each.sharding_types is each.cache_params is None for each in constraints.values()
    )
    chosen = planner.plan(model, [EmbeddingBagCollectionSharder()]).plan["model.group.ebc"]
    assert {each.compute_kernel for each in chosen.values()} == {"fused"}
