"""The balancer: a gRPC service at which the ranks of a job meet once per batch."""
