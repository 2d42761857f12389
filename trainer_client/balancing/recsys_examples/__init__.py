"""Evenkeel behind the batch shufflers of NVIDIA's recsys-examples: its training scripts balance through Evenkeel.

Nothing of theirs is imported before `register_shufflers` is called.
"""

from trainer_client.balancing.recsys_examples.shuffler import EvenkeelShuffling, evenkeel_shuffler, register_shufflers

__all__ = ["EvenkeelShuffling", "evenkeel_shuffler", "register_shufflers"]
