"""What can go wrong beside a wrong argument."""


class PartitionError(ValueError):
    """No assignment can be returned that respects every rank's memory cap."""


class ImpossiblePartitionError(PartitionError):
    """No assignment respects the memory caps, and that is proven.

    Attributes:
        shortfall: Memory that is missing at least, in the unit of `memory`.
    """

    def __init__(self, message: str, shortfall: float) -> None:
        super().__init__(message)
        self.shortfall = shortfall

    def __reduce__(self) -> tuple[type["ImpossiblePartitionError"], tuple[str, float]]:
        return type(self), (str(self), self.shortfall)


class PartitionNotFoundError(PartitionError):
    """The search ended without an assignment within the memory caps, and without a proof that none exists."""
