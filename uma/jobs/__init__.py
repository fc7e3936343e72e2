"""Jobs on disk: rows of a file, each asked as a request over HTTP, and a result line for each that no crash loses.

A job knows neither engine nor socket nor HTTP: it is given a `RowAsk`, which answers one request's body. The
application over HTTP is one (`uma.http.in_memory`), so the rules of every dialect hold for rows as for clients.
"""

from uma.jobs.ask import Progress, RowAnswer, RowAsk
from uma.jobs.journal import EndedRow, FinishedRows, JobChanged, Results, judge
from uma.jobs.rows import (
    BadInput,
    BadRow,
    JobRow,
    RowForm,
    RowRequest,
    has_columns,
    judge_rows,
    read_rows,
)
from uma.jobs.runner import Runner, in_flight
from uma.jobs.server import ReturningServer, model_of
from uma.jobs.tally import Tally

__all__ = [
    "BadInput",
    "BadRow",
    "EndedRow",
    "FinishedRows",
    "JobChanged",
    "JobRow",
    "Progress",
    "Results",
    "ReturningServer",
    "RowAnswer",
    "RowAsk",
    "RowForm",
    "RowRequest",
    "Runner",
    "Tally",
    "has_columns",
    "in_flight",
    "judge",
    "judge_rows",
    "model_of",
    "read_rows",
]
