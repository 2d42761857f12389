"""Imports gRPC so that it takes no part in the forks of this process.

Its fork handlers do nothing for a process whose streams are open, as a rank's are while a DataLoader forks workers, and
now and then they end the worker. gRPC reads the variable when it is imported and never again, so it is there only then.
"""

import os

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "0"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]
