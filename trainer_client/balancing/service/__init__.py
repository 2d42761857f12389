"""The rank's way to the balancer service: a stream of its own, or one for all ranks of its node."""

import trainer_client.balancing.service.forks  # noqa: F401 - before anything else imports gRPC

# isort: split
from evenkeel.credentials import Credentials
from trainer_client.balancing.service.connection import Connection
from trainer_client.balancing.service.messages import ServiceDecision, join_request
from trainer_client.balancing.service.node import NodeSeat

__all__ = ["Connection", "Credentials", "NodeSeat", "ServiceDecision", "join_request"]
