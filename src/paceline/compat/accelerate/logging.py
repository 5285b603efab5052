"""`get_logger` of Accelerate: a logger that speaks on the first worker, or on all with main_process_only=False."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from paceline.worker.program_worker import program_worker

__all__ = ["FirstWorkerLogger", "get_logger"]


class FirstWorkerLogger(logging.LoggerAdapter[logging.Logger]):
    """Passes a message on where this is the first worker; `main_process_only=False`: on every worker."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log, with the options of `logging.Logger.log`."""
        is_first_only, _ = kwargs.pop("main_process_only", True), kwargs.pop("in_order", None)
        kwargs.setdefault("stacklevel", 2)
        worker = program_worker()
        if self.isEnabledFor(level) and (not is_first_only or worker is None or worker.is_first):
            message, options = self.process(msg, kwargs)
            self.logger.log(level, message, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message as it is."""
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> FirstWorkerLogger:
    """Return a logger of this name. `log_level`: such as "INFO"."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return FirstWorkerLogger(logger, {})
