"""The programs of docs/start/tutorial.md: two plain loops, and the same balanced."""
