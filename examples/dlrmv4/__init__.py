"""MLPerf Training's DLRMv4 with our plan, our routing and our order of samples; see README.md."""
