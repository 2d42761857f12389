"""The programs of docs/tutorial.md: two plain loops, and the same balanced."""
