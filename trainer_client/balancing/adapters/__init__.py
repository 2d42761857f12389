"""Evenkeel under the frameworks that people train with; each module is one of them, and has a page."""
