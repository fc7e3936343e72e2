"""A worker's answers as Dynamo's frontends ask for them: a request's fields come in, chunks go out.

Nothing of Dynamo is needed for that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

import attrs

from uma.bridges.dynamo.host import DynamoJob, EngineHost
from uma.bridges.dynamo.mapping import asked, chunks_for, end_of_what_is_left
from uma.contracts.request import is_health_check
from uma.errors import ContractViolation, InternalError
from uma.net.logfmt import log

_log = logging.getLogger("uma.bridges.dynamo")


@attrs.define(eq=False)
class DynamoAnswers:
    """All that run, on the asyncio loop."""

    _host: EngineHost
    _bos: int | None
    """What begins each text, where the model wants that."""
    _show_blocks: Callable[[int], None] = attrs.field(default=lambda added: None)
    """Called with how many tokens were put before a request's, once it has been given to the engine."""
    violations: int = attrs.field(default=0, init=False)
    """Answers that broke the contract."""
    _jobs: dict[str, list[DynamoJob]] = attrs.field(factory=dict, init=False)
    """Running requests by Dynamo's id, the oldest first: a migration can bring one back before its first ends."""
    _ids: count[int] = attrs.field(factory=lambda: count(1), init=False)
    _named: set[str] = attrs.field(factory=set, init=False)
    """Fields that were named as ignored."""

    async def generate(self, fields: dict[str, Any], id: str) -> AsyncGenerator[dict[str, Any], None]:
        """Answer one request, in chunks of all tokens that are ready. Raises `UmaError`; the frontend's probe is
        answered where no other request would be. To be closed when it is left.
        """
        if is_health_check(fields):
            yield await self._probe()
            return
        if (end := end_of_what_is_left(fields)) is not None:
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
                        # The last item's generator can be closed much later: nothing is left to be freed by then. All
                        # items before it have been taken: a drain that ended earlier would lose them.
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
        """Free a request whose client is gone; of several with this id the oldest, which is the one that broke off."""
        if jobs := self._jobs.get(id):
            self._forget(id, job := jobs[0])
            job.cancel()

    def _forget(self, id: str, job: DynamoJob) -> bool:
        """Whether the job was still running."""
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
