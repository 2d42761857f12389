"""Evenkeel under the frameworks and launchers that people train with; each module is one of them, and has a page."""
