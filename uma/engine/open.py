"""Opens an engine (load, context, disk tier, tasks), and handles every way in which it ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import outcome
import trio

from uma.closing import Closing
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.adapters import AdapterSets
from uma.engine.engine import Engine
from uma.engine.kv.disk import MAX_QUEUED_BYTES, DiskTier
from uma.engine.ledger import Ledger
from uma.engine.loading import Loader
from uma.engine.worker.loop import ended_by
from uma.errors import ConfigError, ModelError, ShuttingDown
from uma.figures import MB
from uma.llama import backend
from uma.llama.context import Context
from uma.llama.grammar import GrammarCompiler
from uma.llama.heads import PredictionHeads
from uma.llama.model import Model
from uma.llama.pages import NewPages, give_back_zeros, trim_heap
from uma.llama.shape import PREDICTING
from uma.net.logfmt import log
from uma.net.trio_only import require_trio
from uma.types import LoadProgress

_log = logging.getLogger("uma.engine")

ClosingT = TypeVar("ClosingT", bound=Closing)

LAST_WRITES_SEC = 10.0
"""Maximum time (s) at the end for snapshots that are still being written to disk."""


@asynccontextmanager
async def open_engine(
    config: RuntimeConfig | None = None,
    progress: LoadProgress | None = None,
    *,
    prepares_grammars: bool = False,
    owns_process: bool = False,
) -> AsyncIterator[Engine]:
    """Load a model into this process, and serve requests until the block ends, which cancels those that run.

    Raises `ModelError` or `ConfigError` if the model cannot be loaded. A thread loads it and reports its progress to
    `progress`. If the task is cancelled, the thread ends before the next tensor. `prepares_grammars` also prepares what
    the first grammar needs, which would stop all streams later: see `GrammarCompiler.prepare`. `owns_process` says that
    only UMA's code runs in this process; then unused memory of the context is given back to the system
    (`llama.pages`). Only `config` counts: `UMA_…` variables and files are read by `uma.config.load`. A fault that ends
    the engine cancels the block and is raised from it.
    """
    require_trio("open_engine")
    config = config or RuntimeConfig()
    async with AsyncExitStack() as stack:
        loader = await trio.to_thread.run_sync(Loader, config, progress or LoadProgress())
        config = loader.config
        model = await trio.to_thread.run_sync(loader.model)
        stack.callback(model.close)
        adapters = AdapterSets(model)
        projector = await trio.to_thread.run_sync(loader.projector, model)
        if projector is not None:
            stack.callback(projector.close)
        grammars = GrammarCompiler(model.vocab)
        beside = grammars.prepare if prepares_grammars and model.is_causal else None
        ledger = Ledger(config, model.shape)
        new = NewPages()
        context = await trio.to_thread.run_sync(_make_context, ledger, model, config, beside)
        stack.callback(context.close)
        if owns_process and not backend.has_gpu():  # a GPU's driver pins the memory that it uses
            await _give_back_zeros(new)
        draft, assistant = await trio.to_thread.run_sync(_open_draft, stack, ledger, loader, config, context)
        heads = assistant or await trio.to_thread.run_sync(_open_heads, stack, ledger, config, context)
        ledger.promise_cache(MAX_QUEUED_BYTES if config.prefix_folder else 0)
        disk = await _open_disk(config, context, ledger.cache_bytes, adapters.keys)
        engine = Engine(config, context, ledger, disk, grammars, draft, heads, projector, adapters=adapters)
        stack.callback(engine.close)
        # An exception in the block is raised unchanged, not within the nursery's exception group.
        ended: outcome.Outcome[None] = outcome.Value(None)
        tasks = _Tasks(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tasks.run, nursery.cancel_scope)
            try:
                yield engine
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001  (raised again below)
                ended = outcome.Error(error)
            finally:
                engine.begin_drain()
                engine.worker.stop()
        tasks.thread.unwrap()
        tasks.delivery.unwrap()
        ended.unwrap()


async def _give_back_zeros(new: NewPages) -> None:
    """Give memory of a new context back until its conversations need it, with turns for other tasks in between."""
    for start, end in new.large_parts():
        give_back_zeros(start, end)
        await trio.lowlevel.checkpoint()


class _Tasks:
    """Tasks of an open engine. An exception in one ends the others, and the block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.thread: outcome.Outcome[None] = outcome.Value(None)
        """Outcome of the decode thread."""
        self.delivery: outcome.Outcome[None] = outcome.Value(None)
        """Outcome of the task that delivers events."""

    async def run(self, block: trio.CancelScope) -> None:
        """Run until `worker.stop`. Cancels `block` if a part fails."""
        engine = self._engine
        with trio.CancelScope(shield=True) as shield:
            async with trio.open_nursery() as nursery:
                if engine.disk is not None:
                    nursery.start_soon(engine.disk.run)
                async with trio.open_nursery() as while_it_runs:
                    while_it_runs.start_soon(self._deliver, block)
                    # A limiter of its own: this thread lives as long as the engine, and must not take another's place.
                    run = partial(trio.to_thread.run_sync, engine.worker.run, limiter=trio.CapacityLimiter(1))
                    self.thread = await outcome.acapture(run)
                    self._refuse_rest(block)
                    while_it_runs.cancel_scope.cancel()
                engine.mailbox.empty()
                engine.mailbox.close()
                if engine.disk is not None:
                    engine.disk.close()
                shield.deadline = trio.current_time() + LAST_WRITES_SEC

    def _refuse_rest(self, block: trio.CancelScope) -> None:
        """After the decode thread has ended: refuse all commands that it has not taken, and all later ones."""
        if isinstance(self.thread, outcome.Error):
            self._engine.has_failed(self.thread.error)
            self._engine.worker.commands.refuse_all(ended_by(self.thread.error))
            block.cancel()
        else:
            self._engine.worker.commands.refuse_all(ShuttingDown("the engine is stopping"))

    async def _deliver(self, block: trio.CancelScope) -> None:
        try:
            await self._engine.mailbox.run()
        except Exception as fault:  # noqa: BLE001  (raised from the block)
            _log.critical("the engine ends: its events can no longer be delivered", exc_info=fault)
            self.delivery = outcome.Error(fault)
            self._engine.has_failed(fault)
            self._engine.worker.stop()
            block.cancel()


def _make_context(ledger: Ledger, model: Model, config: RuntimeConfig, beside: Callable[[], None] | None) -> Context:
    """Make the context, and call `beside` at the same time, in another thread. An exception in `beside` is ignored: it
    comes again in the request that needs its result.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="uma-grammar") as helper:
        if beside is not None:
            helper.submit(beside)
        params = ledger.context_params()
        with ledger.promised(model.shape, params):
            context = Context(model, params)
    trim_heap()
    if config.n_ctx and context.n_ctx != config.n_ctx:
        log(_log, logging.INFO, "context.rounded", n_ctx=context.n_ctx, asked=config.n_ctx)
    return context


def _open_draft(
    stack: AsyncExitStack, ledger: Ledger, loader: Loader, config: RuntimeConfig, target: Context
) -> tuple[Context | None, PredictionHeads | None]:
    """The draft model's context, or an assistant, if one is configured and can be used. `stack` closes it; it keeps its
    model open.
    """
    if not config.draft:
        return None, None
    if reason := sizing.why_no_drafts(target, config):
        _log.warning("--draft is not used: %s", reason)
        return None, None
    is_assistant = loader.has_assistant
    if config.speculate == "mtp" and not is_assistant:
        raise ConfigError.at(
            "draft", f"mtp is unsupported with {config.draft}, which is no assistant; use --speculate auto"
        )
    model = loader.draft()
    try:
        if is_assistant and (problem := model.why_no_assistant_of(target.model)) is not None:
            raise ConfigError.at(
                "draft", f"{model.path} is no assistant of {target.model.path}: {problem}; leave --draft out"
            )
        ledger.promise_weights(model.shape)
        if is_assistant:
            return None, _closed_with(stack, PredictionHeads(target, sizing.assisting_params(target), model))
        params = sizing.draft_params(model, target, config, ledger.kv_bytes)
        with ledger.promised(model.shape, params):
            return _closed_with(stack, Context(model, params)), None
    finally:
        model.close()


def _open_heads(
    stack: AsyncExitStack, ledger: Ledger, config: RuntimeConfig, target: Context
) -> PredictionHeads | None:
    """The model's own prediction head, if it has one that can be used; `stack` closes it."""
    predicts = target.model.predicts
    if config.speculate == "mtp" and not predicts:
        raise ConfigError.at(
            "speculate",
            f"mtp is unsupported with {target.model.path}: it has no prediction head (nextn layer) that is "
            f"used, which files of {', '.join(PREDICTING)} can have; use --speculate auto",
        )
    if not predicts or sizing.why_no_drafts(target, config):
        return None
    try:
        params = sizing.predicting_params(target, config, ledger.kv_bytes)
        with ledger.promised(target.model.shape.of_prediction_heads, params):
            return _closed_with(stack, PredictionHeads(target, params))
    except (ConfigError, ModelError) as error:
        if config.speculate == "mtp":
            raise
        _log.warning("the model's prediction head is not used: %s", error.message)
        return None


def _closed_with(stack: AsyncExitStack, opened: ClosingT) -> ClosingT:
    stack.callback(opened.close)
    return opened


async def _open_disk(
    config: RuntimeConfig, context: Context, memory_bytes: int, adapter_keys: Sequence[str]
) -> DiskTier | None:
    if not config.prefix_folder or not context.model.is_causal:
        return None
    identity = await trio.to_thread.run_sync(sizing.snapshot_identity, context)
    folder, capacity_bytes = Path(config.prefix_folder), config.cache_disk_mb * MB
    disk = DiskTier(folder, identity, capacity_bytes, memory_bytes, adapter_keys)
    await disk.open()
    return disk
