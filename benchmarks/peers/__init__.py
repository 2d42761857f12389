"""Peers' own code, out of checkouts that the user has, beside ours in one run; nothing of theirs is part of Evenkeel."""
