"""Importing this puts Evenkeel behind all shufflers that are registered: one `import` line of a gin configuration."""

from trainer_client.balancing.adapters.recsys_examples import register_shufflers

register_shufflers(replace=True)
