import pytest

from evenkeel.addresses import Endpoint, check_address, endpoints, grpc_target


@pytest.mark.parametrize(
    ("address", "bare"),
    [
        ("balancer:50051", "balancer:50051"),
        ("grpc://balancer_1.team-a.svc:50051", "balancer_1.team-a.svc:50051"),
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("[::1]:50051", "[::1]:50051"),
        ("[fe80::1%eth0]:50051", "[fe80::1%eth0]:50051"),
        ("10.0.0.1:1,10.0.0.2:2", "10.0.0.1:1,10.0.0.2:2"),
        ("[::1]:1,[::2]:1", "[::1]:1,[::2]:1"),
    ],
)
def test_what_is_an_address(address: str, bare: str) -> None:
    assert check_address(address) == bare


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("::1:50051", r"an IPv6 address in brackets, as '\[::1\]:50051'"),
        ("[::1:50051", "in brackets"),
        ("[balancer]:50051", "give host:port"),
        ("http://balancer:50051", "speaks gRPC: give host:port, or grpc://host:port"),
        ("balancer:50051/path", "give host:port"),
        ("balancer:٥٠٠٥١", "give host:port"),
        ("spread://balancers:50051", "speaks gRPC"),
        ("balancers:50051,others:50051", "of several replicas give IPs"),
        ("10.0.0.1:1,[::1]:1", "of one kind"),
        ("10.0.0.1:1,", "give host:port"),
        ("", "give host:port"),
    ],
)
def test_what_is_none_is_refused_with_its_remedy(address: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check_address(address)


@pytest.mark.parametrize(
    ("address", "target", "hosts"),
    [
        ("localhost:1", "dns:///localhost:1", {"127.0.0.1"}),
        ("127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2", {"127.0.0.1", "127.0.0.2"}),
        ("[::1]:1", "ipv6:[::1]:1", {"::1"}),
    ],
)
def test_replicas_are_those_behind_the_address(address: str, target: str, hosts: set[str]) -> None:
    assert grpc_target(address) == target
    assert hosts <= {found.host for found in endpoints(address)}
    assert str(Endpoint("::1", 2, "name")) == "[::1]:2"
