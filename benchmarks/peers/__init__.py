"""Peers' own code, out of checkouts that the user has, beside ours; nothing of theirs is part of Evenkeel."""
