"""Random programs of users, run on real ranks, beside a ledger of every sample and a dense model in one process."""
