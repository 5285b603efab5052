"""How a worker leaves a run that goes on, or ends, without it: by an exception that no user code takes for an error."""

from __future__ import annotations

__all__ = ["CleanExit"]


class CleanExit(SystemExit):
    """This worker has finished its part of the run; the exit code says how the run ends."""
