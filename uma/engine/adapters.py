"""Sets of LoRA adapters by which requests are computed: none, a named one, or several with given scales."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Hashable

import attrs

from uma.engine.kv.adapter_keys import MAX_SETS, TOKEN_BITS, keyed
from uma.errors import BadRequest, ModelError, Overloaded
from uma.llama.adapters import Adapter
from uma.llama.model import Model
from uma.models.names import adapter_in
from uma.net.client import CLIENT
from uma.types import AdapterScale

Scales = tuple[tuple[int, float], ...]
"""Adapters by index, in order, each with its scale."""

MAX_PAIRS = 2
"""Maximum matrices in a set, per tensor of the model: llama.cpp plans the nodes of its graphs for as many."""
MAX_OF_CLIENT = 64
"""Maximum unnamed sets kept for one client. Without a limit a client that sweeps scales would use up all numbers, and
the cached prefixes of all other clients' sets would be dropped."""


@attrs.frozen(eq=False)
class AdapterSet:
    """Adapters with scales, common to a batch. There is one object for each set in use."""

    number: int = 0
    """Number in cache keys; 0: no adapters, or not numbered yet (`AdapterSets.numbered`)."""
    scaled: tuple[tuple[Adapter, float], ...] = ()
    scales: Scales = ()
    is_named: bool = True
    """Whether a name, an adapter's or the model's, stands for the set: then its number never changes."""
    client: Hashable = None
    """Client that asked for it first (`net.client.CLIENT`)."""

    @property
    def invocation(self) -> bytes:
        """Tokens that activate it, if it is an aLoRA."""
        return array("i", self.scaled[0][0].invocation).tobytes() if self.scaled else b""

    def placed(self, tokens: array[int]) -> tuple[AdapterSet, int]:
        """The set for a prompt, and the index of its first token: for an aLoRA the last activation; without one the
        model alone.
        """
        if not (invocation := self.invocation):
            return self, 0
        data, end = tokens.tobytes(), len(tokens) * tokens.itemsize
        while (at := data.rfind(invocation, 0, end)) % tokens.itemsize:
            if at < 0:
                return NO_ADAPTERS, 0
            end = at + len(invocation) - 1
        return self, at // tokens.itemsize

    def key(self, tokens: array[int]) -> array[int]:
        """Tokens of a prompt as keys of the prefix cache."""
        found, at = self.placed(tokens)
        return keyed(tokens, found.number, at) if found.number else tokens


NO_ADAPTERS = AdapterSet()


class AdapterSets:
    """Sets that requests for one model use. Belongs to the Trio thread."""

    def __init__(self, model: Model) -> None:
        """Raises `ModelError` if cache keys cannot distinguish sets of the model."""
        self._adapters = model.adapters
        if self._adapters and model.vocab.n_tokens > 2**TOKEN_BITS:
            raise ModelError(f"{model.path}: LoRA adapters are unsupported with {model.vocab.n_tokens:,} tokens")
        self._most_pairs = MAX_PAIRS * model.n_tensors
        self._lasting: dict[Scales, AdapterSet] = {(): NO_ADAPTERS}
        self._named: dict[str, AdapterSet] = {}
        for index, adapter in enumerate(self._adapters):
            scales = ((index, adapter.scale),) if adapter.scale else ()
            known = AdapterSet(len(self._lasting), ((adapter, adapter.scale),), scales)
            self._named[adapter.name] = self._lasting.setdefault(scales, known)
        self._passing: dict[Scales, AdapterSet] = {}
        """Unnamed sets, the longest unused first. Each has a number."""
        self.keys = tuple(
            ";".join(f"{adapter.digest}:{scale}" for adapter, scale in known.scaled) for known in self._lasting.values()
        )
        """Identity of each named set in files of the cache, by the set's number."""

    def asked(self, model: str | None, lora: tuple[AdapterScale, ...] | None = None) -> AdapterSet:
        """The set for a request with this model name and these adapters. Raises `BadRequest`."""
        if lora is None:
            name = None if model is None else adapter_in(model, self._named)
            return NO_ADAPTERS if name is None else self._named[name]
        given = {part.id: part.scale for part in lora}
        if unknown := [id for id in given if id >= len(self._adapters)]:
            there = f"they are 0 to {len(self._adapters) - 1}" if self._adapters else "this model has none (--lora)"
            raise BadRequest.at("lora", f"no adapter has the id {unknown[0]}; {there}")
        scales = tuple(sorted((id, scale) for id, scale in given.items() if scale))
        if (known := self._lasting.get(scales)) is not None:
            return known
        scaled = tuple((self._adapters[id], scale) for id, scale in scales)
        if (pairs := sum(adapter.pairs for adapter, _ in scaled)) > self._most_pairs:
            raise BadRequest.at("lora", f"{len(scales)} adapters at once change {pairs:,} matrices, which is too many")
        if len(scaled) > 1 and any(adapter.invocation for adapter, _ in scaled):
            raise BadRequest.at(
                "lora", "an aLoRA, used from certain tokens on, cannot be beside others; leave them out"
            )
        return AdapterSet(0, scaled, scales, is_named=False, client=CLIENT.get())

    def numbered(self, asked: AdapterSet, running: Collection[AdapterSet], forget: Callable[[int], None]) -> AdapterSet:
        """The set with a number, for a request that is submitted next; `running` are the sets in use. If no number is
        free, `forget` is called with the number of the longest unused set, whose prefixes must be dropped. Raises
        `Overloaded` if all are in use.
        """
        if asked.is_named:
            return asked
        if (known := self._passing.pop(asked.scales, None)) is None:
            known = attrs.evolve(asked, number=self._free_number(asked.client, running, forget))
        self._passing[asked.scales] = known
        return known

    def _free_number(self, client: Hashable, running: Collection[AdapterSet], forget: Callable[[int], None]) -> int:
        own = [known for known in self._passing.values() if known.client == client]
        number, candidates = len(self._lasting) + len(self._passing), own
        if len(own) < MAX_OF_CLIENT:
            if number <= MAX_SETS:
                return number
            candidates = list(self._passing.values())
        oldest = next((known for known in candidates if known not in running), None)
        if oldest is None:
            raise Overloaded(
                f"lora: requests with {len(candidates):,} different sets of adapters run or wait, the maximum",
                retry_after_ms=1_000,
            )
        del self._passing[oldest.scales]
        forget(oldest.number)
        return oldest.number

    def check_none(self, model: str | None) -> None:
        """Raise `BadRequest` for embeddings from a model with an adapter."""
        if self.asked(model) is not NO_ADAPTERS:
            raise BadRequest.at("model", "embeddings with a LoRA adapter are unsupported; ask for the model without it")


def check_beginning(tokens: array[int], adapters: AdapterSet) -> None:
    """Raise `BadRequest` if cache keys cannot show that a prompt has this set."""
    if adapters.scaled and tokens[0] < 0 and not adapters.invocation:
        raise BadRequest.at("prompt", "with a LoRA adapter it cannot begin with a picture; put text before it")
