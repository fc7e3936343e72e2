"""The context for reproducible requests (`worker/reproducer.py`): made with the first of them, in a thread. Belongs to
the Trio thread that opened the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.ledger import Ledger
from uma.errors import BadRequest, ConfigError, ModelError, PromptTooLarge, ShuttingDown
from uma.llama.context import Context
from uma.llama.model import Model
from uma.net.logfmt import log

_log = logging.getLogger("uma.engine")


@attrs.define(eq=False)
class ReproducibleContext:
    """Makes the context when it is first needed, and closes it."""

    _config: RuntimeConfig
    _model: Model
    _ledger: Ledger
    max_tokens: int
    """Maximum tokens, prompt and output together, of one request."""
    _use: Callable[[Context], None]
    """Passes the context to the decode thread."""
    _lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _context: Context | None = attrs.field(default=None, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    async def ready_for(self, prompt_tokens: int) -> None:
        """Make the context if there is none. Raises `PromptTooLarge`, and `BadRequest` if there is no memory for it."""
        if prompt_tokens >= self.max_tokens:
            raise PromptTooLarge.at(
                "reproducible",
                f"a request that is computed apart has {self.max_tokens:,} tokens with its output, and "
                f"the prompt has {prompt_tokens:,}; shorten it, or leave reproducible out",
                prompt_tokens=prompt_tokens,
                n_ctx=self.max_tokens,
            )
        async with self._lock:
            if self._context is not None:
                return
            try:
                free_bytes = self._ledger.kv_bytes
                params = sizing.reproducible_params(self._model.shape, self._config, self.max_tokens, free_bytes)
                with self._ledger.promised(self._model.shape, params):
                    self._context = await trio.to_thread.run_sync(Context, self._model, params)
            except (ConfigError, ModelError) as error:
                raise BadRequest.at(
                    "reproducible", f"there is no context for it ({error.message}); leave it out, or free memory"
                ) from None
            if self._is_closed:
                self._context.close()
                raise ShuttingDown("the engine is stopping")
            log(_log, logging.INFO, "context.reproducible", n_ctx=self.max_tokens, took_ms=self._context.opened_ms)
            self._use(self._context)

    def close(self) -> None:
        """Free the context, once the decode thread has ended."""
        self._is_closed = True
        if self._context is not None:
            self._context.close()
