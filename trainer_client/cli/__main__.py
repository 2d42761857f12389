"""`python -m trainer_client.cli COMMAND`, for checkouts that are not installed."""

from trainer_client.cli import main

if __name__ == "__main__":
    main()
