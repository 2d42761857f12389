"""gRPC, imported such that it takes no part in forks of this process.

Its fork handlers do nothing for a process whose calls are under way, as a lead's are while a DataLoader forks workers,
and now and then they end the worker. It reads the variable when it is imported, and never again.
"""

import os

_KEPT = os.environ.get("GRPC_ENABLE_FORK_SUPPORT")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
try:
    import grpc
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; a balancer service needs grpcio: pip install 'evenkeel[trainer]'") from error
finally:
    if _KEPT is None:
        del os.environ["GRPC_ENABLE_FORK_SUPPORT"]

__all__ = ["grpc"]
