"""Our planner under TorchRec 1.9's own orchestrator.

pip install --no-deps --target out/torchrec torchrec==1.9.2
PYTHONPATH=out/torchrec python -m pytest tests/trainer_client/planning/check_planner_executor.py
"""

from __future__ import annotations

from typing import Any

import pytest
from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
from torchrec.distributed.planner.protocols import PlannerExecutor
from torchrec.distributed.planner.types import PlannerSessionContext, ShardingPlanRequest
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.trainer_client.planning.test_model import SAMPLES, Model, batches
from trainer_client.planning import TorchRecPlanner


def ask(sku: str, **options: Any) -> tuple[ShardingPlanRequest, Any]:
    planner = TorchRecPlanner(list(batches()), **options)
    assert isinstance(planner, PlannerExecutor)
    request = ShardingPlanRequest(
        model=Model, sharders=get_default_sharders(), world_size=2, local_world_size=2, batch_size=SAMPLES
    )
    context = PlannerSessionContext(request=request, results={})
    return request, ProductionPlannerOrchestrator(planner, sku=sku).plan(request, context)[sku]


def test_a_request_gets_its_plan() -> None:
    request, found = ask("H100")
    assert (found.success, found.request_id) == (True, request.request_id)
    assert {table for module in found.sharding_plan.plan.values() for table in module} == {"item", "word"}
    assert found.estimated_max_hbm_bytes > 4 * 8 * 900 // 2


@pytest.mark.parametrize(("sku", "why"), [("H999", "h999"), ("H100", "no placements")])
def test_why_there_is_none_is_the_result(sku: str, why: str) -> None:
    short: dict[str, Any] = {} if sku == "H999" else {"topology": "h100x2", "dense_bytes": 1 << 40}
    _, found = ask(sku, **short)
    assert (found.success, found.sharding_plan) == (False, None)
    assert why in found.planner_failure_reason
