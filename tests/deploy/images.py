"""Builds the images that the checks of this folder run: `python -m tests.deploy.images`.

Exit status 1: a build fails; 3: it fails because of a download that does.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.deploy.stack import OFFLINE, Compose

DOWNLOAD_FAILS = re.compile(
    r"Retrying \(Retry\(|[Nn]ame resolution|[Tt]imed out|Connection (reset|broken|refused)|IncompleteRead"
    r"|TLS handshake timeout|[Nn]etwork is unreachable|toomanyrequests"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        files = ("docker-compose.yml", "deploy/compose.hostnet.yml")
        compose = Compose(project="evenkeel-test", files=files, secrets=Path(folder))
        try:
            if OFFLINE:
                compose.build_prometheus(Path(folder))
            compose.build("balancer-1", "planner")
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 3 if DOWNLOAD_FAILS.search(str(error)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
