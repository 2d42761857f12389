"""What benchmarks and tests share: processes of services and ranks, and what goes wrong with them."""
