"""Implementation of scripts/gpu-check; standard library only."""


class UserError(Exception):
    """A mistake of whoever called: exit code 2."""


class Interrupted(Exception):
    """A signal asked for an end."""
