"""`python -m evenkeel.cli COMMAND`, for checkouts that are not installed."""

from evenkeel.cli.app import main

if __name__ == "__main__":
    main()
