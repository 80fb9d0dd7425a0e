"""What the demo tells its user instead of a traceback."""

from __future__ import annotations


class DemoError(Exception):
    """Something the user can put right. The message is one line."""


class ModelFileError(DemoError):
    """A model file that cannot be used."""
