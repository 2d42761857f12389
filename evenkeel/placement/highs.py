"""HiGHS without its banner: standard output belongs to the program that plans."""

from __future__ import annotations

import highspy


class Highs(highspy.Highs):
    """A solver that prints nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enableCallbacks(self) -> None:  # noqa: N802
        """Silence it first: HiGHS 1.16 prints its name and licence at the first call, which this is."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
