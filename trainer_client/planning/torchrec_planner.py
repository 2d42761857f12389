"""Our planner where a job has TorchRec's: one line changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from evenkeel.placement import InvalidInputError
from trainer_client.planning.model import PlannedModel, plan_model
from trainer_client.planning.statistics import KeyStatistics

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan


class TorchRecPlanner:
    """`plan_model` with the methods of TorchRec's planners and, for TorchRec 1.9, of its `PlannerExecutor`.

        plan = TorchRecPlanner(batches).collective_plan(model, sharders, group)
        results = ProductionPlannerOrchestrator(TorchRecPlanner(batches), sku="H100").plan(request, context)

    Attributes:
        planned: All about the latest plan; None before there is one.
    """

    def __init__(self, batches: Iterable[Any] | KeyStatistics | None = None, **options: Any) -> None:
        """Nothing is planned yet.

        Args:
            batches: As for `plan_model`.
            options: Its others, such as `clock` and `sharding`.
        """
        self._batches, self._options = batches, options
        self.planned: PlannedModel | None = None

    def plan(self, module: nn.Module, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """The plan of a model's tables. Where there is a process group, all ranks call it together.

        Args:
            module: The model before it is sharded.
            sharders: Not looked at: what they do not shard, they leave as it is.

        Raises:
            InvalidInputError: As `plan_model`.
        """
        return self.collective_plan(module, sharders)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Any] | None = None,  # noqa: ARG002  (of TorchRec's protocol)
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The same, of the ranks of a group, by default of all."""
        self.planned = plan_model(module, self._batches, **{"group": pg} | self._options)
        plan = self.planned.sharding_plan
        if plan is None:
            runtime = self.planned.request.runtime.value
            raise InvalidInputError("runtime", runtime, "has no sharding plan", "leave it out: TorchRec asks")
        return plan

    def run(self, sku: str, ctx: Any, pg: dist.ProcessGroup | None = None) -> Any:
        """TorchRec's `ShardingPlanResult` for a `PlannerSessionContext`, whether there is a plan or not.

        Args:
            sku: The GPUs; a profile's name where no process group has any, such as `H100`.
            ctx: Its request names the model, ranks, and samples of a batch on a rank.
            pg: The ranks that plan together; without, the plan is for the ranks of the request.
        """
        from torchrec.distributed.planner.types import ShardingPlanResult

        request, (hbm_bytes, host_bytes), why = ctx.request, (0, 0), None
        model = request.model if isinstance(request.model, nn.Module) else request.model()
        ahead = {"topology": f"{sku.lower()}x{request.world_size}"} if pg is None else {}
        planner = TorchRecPlanner(self._batches, **{"samples_per_rank": request.batch_size} | ahead | self._options)
        plan = None
        try:
            plan = planner.collective_plan(model, request.sharders, pg)
        except InvalidInputError as error:
            why = str(error)
        self.planned = planner.planned
        if plan is not None and self.planned is not None:
            report = self.planned.report
            hbm_bytes = max(part.hbm_bytes for part in report.ranks)
            host_bytes = max((part.host_bytes // max(1, part.ranks) for part in report.hosts), default=0)
        return ShardingPlanResult(
            sku=sku,
            success=why is None,
            sharding_plan=plan,
            planner_failure_reason=why,
            estimated_max_hbm_bytes=hbm_bytes,
            estimated_max_ddr_bytes=host_bytes,
            request_hash=request.request_hash,
            request_id=request.request_id,
        )
