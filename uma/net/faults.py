"""A client learns that there was a fault. What it was is in the log."""

from __future__ import annotations

import logging
from typing import Any

from uma.errors import InternalError, UmaError, sole_error
from uma.net.logfmt import log


def as_uma_error(fault: Exception, logger: logging.Logger, event: str, **fields: Any) -> UmaError:
    """The error of a request that `fault` has ended: the `UmaError` that it is, or that nurseries have made a group of;
    of anything else, which is logged as `event` with `fields`, an `InternalError` without a word of it.
    """
    error = sole_error(fault) if isinstance(fault, ExceptionGroup) else fault
    if isinstance(error, UmaError):
        return error
    log(logger, logging.ERROR, event, fault=fault, **fields)
    return InternalError("a fault in the server itself; its log says more")
