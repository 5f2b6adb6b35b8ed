"""What scripts/netlab is made of; standard library only."""


class LabError(Exception):
    """What a user can do something about: one clear message. `status` is the exit code."""

    def __init__(self, message, status=2):
        super().__init__(message)
        self.status = status


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP came."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number
