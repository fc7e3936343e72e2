"""Unexpected exceptions as errors for a client, which does not learn their cause: that is in the log."""

from __future__ import annotations

import logging
from typing import Any

from uma.errors import InternalError, UmaError, sole_error
from uma.net.logfmt import log


def as_uma_error(fault: Exception, logger: logging.Logger, event: str, **fields: Any) -> UmaError:
    """The error to send for a request that `fault` has ended: `fault` itself if it is a `UmaError`, or the only one in
    an exception group. Anything else is logged as `event` with `fields`, and becomes an `InternalError` that does not
    quote it.
    """
    error = sole_error(fault) if isinstance(fault, ExceptionGroup) else fault
    if isinstance(error, UmaError):
        return error
    log(logger, logging.ERROR, event, fault=fault, **fields)
    return InternalError("a fault in the server itself; its log says more")
