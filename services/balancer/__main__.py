"""`python -m services.balancer`: serves until SIGTERM or SIGINT."""

if __name__ == "__main__":  # workers import this module too, and need nothing of it
    import os
    import sys

    # gRPC's core writes a line of its own format for each failed handshake of a stranger; it reads this at import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from services.balancer.server import main

    sys.exit(main(sys.argv[1:]))
