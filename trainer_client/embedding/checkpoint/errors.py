"""What can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or does not fit; the message names the file and the remedy."""


class RoutingMismatchError(CheckpointError):
    """A checkpoint was saved under another routing, and conversion is switched off."""
