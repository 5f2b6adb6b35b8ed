"""Implementation of lab/netlab; standard library only."""


class LabError(Exception):
    """An error that the user can resolve: one message. `status` is the exit code."""

    def __init__(self, message, status=2):
        super().__init__(message)
        self.status = status


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP was received."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number
