"""HiGHS as the planner runs it: on one thread, beside whatever else of the process uses it, and without a word."""

from __future__ import annotations

import highspy


class Highs(highspy.Highs):
    """A solver that prints nothing and is deterministic."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for option, value in (("threads", 1), ("parallel", "off"), ("random_seed", 0)):
            self.setOptionValue(option, value)

    def enableCallbacks(self) -> None:  # noqa: N802
        """Silence it first: HiGHS 1.16 prints its name and licence at the first call, which this is."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]

    def run(self) -> highspy.HighsStatus:
        """Solve.

        All solvers of a process share one pool of threads. HiGHS refuses to run where the rest of the program has made
        it with another number of threads than these; it is then used as it is.
        """
        status: highspy.HighsStatus = super().run()
        if status == highspy.HighsStatus.kError:
            self.setOptionValue("threads", 0)
            status = super().run()
        return status
