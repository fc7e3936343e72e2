"""Answers of a worker: a frontend's request fields come in, chunks go out.

Imports nothing of Dynamo.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

import attrs

from uma.bridges.dynamo.host import DynamoJob, EngineHost
from uma.bridges.dynamo.mapping import asked, chunks_for, end_without_tokens
from uma.contracts.request import is_health_check
from uma.errors import ContractViolation, InternalError
from uma.net.logfmt import log

_log = logging.getLogger("uma.bridges.dynamo")


@attrs.define(eq=False)
class DynamoAnswers:
    """All running requests of a worker, on the asyncio loop."""

    _host: EngineHost
    _bos: int | None
    """Token that begins each text, where the model wants one."""
    _show_blocks: Callable[[int], None] = attrs.field(default=lambda added: None)
    """Called with the number of tokens that were put before a request's own, once the engine has the request."""
    violations: int = attrs.field(default=0, init=False)
    """Number of answers that broke the contract."""
    _jobs: dict[str, list[DynamoJob]] = attrs.field(factory=dict, init=False)
    """Running requests by Dynamo's id, the oldest first: a migration can bring a request back before its first run
    ends."""
    _ids: count[int] = attrs.field(factory=lambda: count(1), init=False)
    _named: set[str] = attrs.field(factory=set, init=False)
    """Ignored fields that were already logged."""

    async def generate(self, fields: dict[str, Any], id: str) -> AsyncGenerator[dict[str, Any], None]:
        """Answer one request, in chunks of all tokens that are ready. A frontend's health probe is answered ahead of
        all requests. Raises `UmaError`. Close the generator when leaving it.
        """
        if is_health_check(fields):
            yield await self._probe()
            return
        if (end := end_without_tokens(fields)) is not None:
            yield end
            return
        engine = self._host.engine
        wanted = asked(fields, engine.info, f"{id}.{next(self._ids)}", self._bos)
        self._tell_ignored(wanted.ignored)
        job = self._host.submit(wanted.request)
        self._show_blocks(wanted.added_tokens)
        self._jobs.setdefault(id, []).append(job)
        maker = chunks_for(wanted, engine.info)
        try:
            while events := await job.next():
                for chunk in maker.of(events):
                    if "finish_reason" in chunk:
                        # Free everything before the last chunk: the generator can be closed much later. And not
                        # earlier: a drain that ended before all chunks were taken would lose them.
                        self._forget(id, job)
                        job.leave()
                    yield chunk
            if self._forget(id, job):
                raise InternalError("the engine's stream ended before the answer did")
        except ContractViolation as error:
            self.violations += 1
            job.cancel()
            log(
                _log,
                logging.ERROR,
                "dynamo.contract_violation",
                request=wanted.request.id,
                reason=error.message,
            )
            raise
        finally:
            job.leave()
            if self._forget(id, job):
                job.cancel()

    def abort(self, id: str) -> None:
        """Free a request whose client has disconnected. Of several with this id it is the oldest, whose connection
        broke.
        """
        if jobs := self._jobs.get(id):
            self._forget(id, job := jobs[0])
            job.cancel()

    def _forget(self, id: str, job: DynamoJob) -> bool:
        """Remove a job. Returns whether it was still running."""
        jobs = self._jobs.get(id, [])
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._jobs[id]
        return True

    async def _probe(self) -> dict[str, Any]:
        health = await self._host.health()
        if health.status != "ok":
            raise InternalError(f"the engine is {health.status}")
        usage = {"prompt_tokens": 1, "completion_tokens": health.tokens_generated, "total_tokens": 2}
        return {"token_ids": [], "index": 0, "finish_reason": "length", "completion_usage": usage}

    def _tell_ignored(self, ignored: tuple[str, ...]) -> None:
        for path in set(ignored) - self._named:
            self._named.add(path)
            log(_log, logging.WARNING, "dynamo.ignored_field", field=path)
