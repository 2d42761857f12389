"""Asks a health address and tells by exit status: for images, which hold no curl.

python -m services.operations.probe http://127.0.0.1:9101/readyz
"""

import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Returns 0 if the address answers 200, 1 if not, 2 without an address."""
    if len(arguments) != 1:
        print("usage: python -m services.operations.probe URL", file=sys.stderr)
        return 2
    # A proxy of the environment is for the way out, never for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(arguments[0], timeout=TIMEOUT_SECONDS) as response:
            return 0 if response.status == 200 else 1
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
