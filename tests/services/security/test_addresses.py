import pytest

from services.security.addresses import network_of


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5000", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::1]:443", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:80", "192.0.2.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64"),
        ("unix:/run/evenkeel.sock", "unix"),
        ("unknown", "unknown"),
    ],
)
def test_an_address_counts_as_its_network(peer: str, network: str) -> None:
    assert network_of(peer) == network
