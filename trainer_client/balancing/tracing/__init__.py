"""Traces of the steps of each rank: off unless started, `pip install 'evenkeel[tracing]'`.

tracing.start("http://collector:4318", every=100)  # before the first batch; or EVENKEEL_TRACE_ENDPOINT
"""

from trainer_client.balancing.tracing.rounds import RoundTrace, StreamTracer
from trainer_client.balancing.tracing.switch import start, stop, tracer_of

__all__ = ["RoundTrace", "StreamTracer", "start", "stop", "tracer_of"]
