"""Sets of LoRA adapters that requests are computed with: none, one by its name, or some with scales of their own."""

from __future__ import annotations

from array import array

import attrs

from uma.engine.kv.adapter_keys import MAX_SETS, TOKEN_BITS, keyed
from uma.errors import BadRequest, ModelError
from uma.llama.adapters import Adapter
from uma.llama.model import Model
from uma.models.names import adapter_in
from uma.types import AdapterScale

MAX_PAIRS = 2
"""Maximum matrices that a set adds, for each tensor of the model: llama.cpp plans the nodes of its graphs for them."""


@attrs.frozen(eq=False)
class AdapterSet:
    """Adapters, each with its scale, which a batch has in common. There is one object for each set."""

    number: int = 0
    """0: no adapters."""
    scaled: tuple[tuple[Adapter, float], ...] = ()

    def key(self, tokens: array[int]) -> array[int]:
        """Tokens of a prompt as the cache knows them."""
        return keyed(tokens, self.number) if self.number else tokens


NO_ADAPTERS = AdapterSet()


class AdapterSets:
    """The sets that a model's requests have asked for."""

    def __init__(self, model: Model) -> None:
        """Raises `ModelError` where the cache cannot tell sets of such a model apart."""
        self._adapters = model.adapters
        if self._adapters and model.vocab.n_tokens > 2**TOKEN_BITS:
            raise ModelError(f"{model.path}: LoRA adapters are unsupported with {model.vocab.n_tokens:,} tokens")
        self._most_pairs = MAX_PAIRS * model.n_tensors
        self._sets: dict[tuple[tuple[int, float], ...], AdapterSet] = {(): NO_ADAPTERS}
        self._named = {adapter.name: self._set({index: adapter.scale}) for index, adapter in enumerate(self._adapters)}
        self.keys = tuple(
            ";".join(f"{adapter.digest}:{scale}" for adapter, scale in known.scaled) for known in self._sets.values()
        )
        """What a file of the cache says of each set that a name stands for, by the set's number."""

    def asked(self, model: str | None, lora: tuple[AdapterScale, ...] | None = None) -> AdapterSet:
        """The set for a request that names this model, and these adapters. Raises `BadRequest`."""
        if lora is None:
            name = None if model is None else adapter_in(model, self._named)
            return NO_ADAPTERS if name is None else self._named[name]
        scales = {part.id: part.scale for part in lora}
        if unknown := [id for id in scales if id >= len(self._adapters)]:
            there = f"they are 0 to {len(self._adapters) - 1}" if self._adapters else "this model has none (--lora)"
            raise BadRequest.at("lora", f"no adapter has the id {unknown[0]}; {there}")
        return self._set(scales)

    def _set(self, scales: dict[int, float]) -> AdapterSet:
        used = tuple(sorted((id, scale) for id, scale in scales.items() if scale))
        if (found := self._sets.get(used)) is not None:
            return found
        if len(self._sets) > MAX_SETS:
            raise BadRequest.at(
                "lora", f"{MAX_SETS:,} different sets were asked for, the maximum until a restart; use one of these"
            )
        scaled = tuple((self._adapters[id], scale) for id, scale in used)
        if (pairs := sum(adapter.pairs for adapter, _ in scaled)) > self._most_pairs:
            raise BadRequest.at("lora", f"{len(used)} adapters at once change {pairs:,} matrices, which is too many")
        found = self._sets[used] = AdapterSet(len(self._sets), scaled)
        return found

    def check_none(self, model: str | None) -> None:
        """Raise `BadRequest` where embeddings are asked for of a model with an adapter."""
        if self.asked(model) is not NO_ADAPTERS:
            raise BadRequest.at("model", "embeddings with a LoRA adapter are unsupported; ask for the model without it")


def check_beginning(tokens: array[int], adapters: AdapterSet) -> None:
    """Raise `BadRequest` where the cache cannot tell that a prompt is one of this set."""
    if adapters.number and tokens[0] < 0:
        raise BadRequest.at("prompt", "with a LoRA adapter it cannot begin with a picture; put text before it")
