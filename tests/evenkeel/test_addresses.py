import pytest

from evenkeel.addresses import check_address


@pytest.mark.parametrize(
    ("address", "bare"),
    [
        ("balancer:50051", "balancer:50051"),
        ("grpc://balancer_1.team-a.svc:50051", "balancer_1.team-a.svc:50051"),
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("[::1]:50051", "[::1]:50051"),
        ("[fe80::1%eth0]:50051", "[fe80::1%eth0]:50051"),
        ("spread://balancers:50051", "spread://balancers:50051"),
        ("grpc://spread://balancers:50051", "spread://balancers:50051"),
        ("spread://[::1]:1,[::2]:1", "spread://[::1]:1,[::2]:1"),
    ],
)
def test_what_is_an_address(address: str, bare: str) -> None:
    assert check_address(address) == bare


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("::1:50051", r"an IPv6 address in brackets, as '\[::1\]:50051'"),
        ("fe80::1:50051", "in brackets"),
        ("[::1:50051", "in brackets"),
        ("[balancer]:50051", "give host:port"),
        ("http://balancer:50051", "speaks gRPC: give host:port, or grpc://host:port"),
        ("https://balancer:50051", "speaks gRPC"),
        ("spread://http://balancer:50051", "speaks gRPC"),
        ("balancer:50051/path", "give host:port"),
        ("bal ancer:50051", "give host:port"),
        ("balancer:٥٠٠٥١", "give host:port"),
        ("spread://balancers:50051,others:50051", "of several balancers give the IPs"),
        ("", "give host:port"),
    ],
)
def test_what_is_none_is_refused_with_its_remedy(address: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check_address(address)
