"""Structured output: grammars compiled by llguidance, and the position of each constrained sequence in its own.

llguidance computes which tokens are allowed next (a bitmask), which are forced because no other is allowed, and whether
the text is complete. Compiling takes up to a second, and belongs in a thread of its own; the rest takes microseconds.
Masks of a batch are computed by a helper thread while `llama_decode` runs without the GIL.
"""

from __future__ import annotations

import atexit
import json
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from threading import Condition, Lock, Thread
from typing import Any
from weakref import WeakMethod

import attrs
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from uma import json_text
from uma.errors import BadRequest, DecodeFailed
from uma.grammar_depth import too_deep_gbnf, too_deep_rules
from uma.json_schema import COMPACT, for_llguidance, problem, subschemas
from uma.llama import backend
from uma.llama.grammar_reasons import KEPT_LIMITS, LIMITS, in_plain_words, is_size_limit, limit_message
from uma.llama.vocab import Vocab
from uma.types import GRAMMAR_FIELDS, Grammar

MAX_KEPT = 32
"""Maximum compiled grammars kept for each model: a service uses a few dozen schemas. Most take less than a megabyte;
`KEPT_LIMITS` bounds each, so all take less than a gigabyte, whatever clients ask for."""
FEW_USES = 8
"""Number of requests within which a kept grammar that reaches its bound counts as large. All requests with a grammar
share its automaton, which only ever grows, so one of moderate size reaches the bound after many requests."""
MAX_LARGE = 1_024
"""Maximum grammars that are remembered as too large to be kept."""
MAX_PROBES = 256
"""Maximum subschemas compiled to find the place of an error."""

SLICES = [r'[^"\\\x00-\x1F\x7F]{1,16}', r'[^"\\\x00-\x1F\x7F]{1,8}', r"[A-Za-z ]{1,16}"]
"""Token sets with precomputed masks (llguidance's slices): tokens of up to 16 characters inside a JSON string; of these
those of up to 8; and the words and spaces that patterns of letters allow.

A set is used wherever all of its texts are allowed: in strings without a bound, and with `maxLength` while so many
characters are left. Without the bound of 16 it would not be used there, and each mask would visit all tokens: 2.6 ms
for 262,000, not 0.03. Few tokens are longer. With the second set a mask takes 1 ms while 8 to 15 characters are left;
it costs 16 MiB and a tenth of the tokenizer's construction. Smaller sets are not worth that. The third makes masks of
`[A-Za-z ]{1,80}` four times as fast (0.3 ms for 152,000, not 1.5), and construction an eighth slower. llguidance's own
four sets take twice as long to construct (1.3 s, not 0.7)."""

_BITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDENDS = _BITS.astype(np.float32)
"""Values added to the logits of eight tokens, for each byte of a bitmask: 0 where allowed, otherwise minus infinity."""


_BEFORE_TEXT = ("", "\n", "\x01")
"""Prefixes behind which a text is tokenized, so that it is tokenized as in the middle of another text; the first one
that can be cut off is used. SentencePiece vocabularies put a space in front of a text, but not behind a line break.
Some have tokens of several line breaks, and none has a token of a control character and something else."""


END_SEC = 2.0
"""Maximum time that the process's end waits for compiles in abandoned threads."""


class _Compiles:
    """Running compiles. A daemon thread that returns from llguidance after the interpreter's end crashes the process by
    a segmentation fault, so the end waits for them.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = 0
        self._is_over = False
        atexit.register(self._end)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block that compiles. Raises `RuntimeError` once the process is ending."""
        with self._changed:
            if self._is_over:
                raise RuntimeError("the process ends")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._running, END_SEC)


_COMPILES = _Compiles()


class GrammarDelayedError(Exception):
    """A grammar is being compiled again. Once `renewed` is done, its state can continue."""

    def __init__(self, renewed: Future[LLMatcher]) -> None:
        super().__init__("the grammar is being compiled again")
        self.renewed = renewed


class GrammarState:
    """Position of one sequence in its grammar. Belongs to one thread at a time.

    Order of calls: `force`, then (`GrammarMasks`, `accept`, `force`) for each sampled token, until `is_over`.
    """

    __slots__ = ("_make", "_renewed", "_tokens", "fault", "is_over", "matcher")

    def __init__(self, matcher: LLMatcher, make: Callable[[], Future[LLMatcher]] | None = None) -> None:
        """`make` begins to compile the grammar again, for this state alone."""
        self.matcher = matcher
        """llguidance's own object."""
        self._make = make
        self._renewed: Future[LLMatcher] | None = None
        self._tokens = array("i")
        """Accepted tokens."""
        self.is_over = False
        """Whether the text is complete, so that nothing can follow."""
        self.fault: BaseException | None = None
        """Why its mask could not be computed, where the grammar is not the reason."""

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Raises as `check` does, except for a delay, which the next mask reports."""
        self._tokens.append(token)
        self.matcher.consume_token(token)
        with suppress(GrammarDelayedError):
            self.check()

    def force(self) -> list[int]:
        """Tokens that come next because no other is allowed; they count as accepted. Raises as `accept` does."""
        tokens = self.matcher.compute_ff_tokens()
        if tokens:
            self._tokens.extend(tokens)
            self.matcher.consume_tokens(tokens)
        with suppress(GrammarDelayedError):
            self.check()
        return tokens

    def common(self, draft: list[int]) -> int:
        """Number of tokens of `draft`, from its first, that the grammar allows one after the other."""
        return 0 if self.is_over or self.matcher.is_error() else self.matcher.validate_tokens(draft)

    def check(self) -> None:
        """Update `is_over`. Raises `BadRequest` where the grammar exceeds a bound at this position, `DecodeFailed`
        where it cannot continue for another reason, `GrammarDelayedError` until it is compiled again, and
        `RuntimeError` after a `fault`.
        """
        if self.matcher.is_error() and self._is_delayed():
            assert self._renewed is not None
            raise GrammarDelayedError(self._renewed)
        if self.fault is not None:
            raise RuntimeError("which tokens its grammar allows could not be computed") from self.fault
        self.is_over = self.matcher.is_stopped()
        if self.is_over and self.matcher.is_error():
            reason = self.matcher.get_error()
            if (bound := limit_message(reason)) is not None:
                raise BadRequest.at("grammar", f"{bound}")
            raise DecodeFailed(f"the grammar cannot be followed further: {in_plain_words(reason)}")

    def _is_delayed(self) -> bool:
        """Whether the grammar is compiled again. That happens once, when a bound of the automaton is reached: the texts
        of other requests can have used it up.
        """
        if self._make is not None and is_size_limit(self.matcher.get_error()):
            self._renewed, self._make = self._make(), None
        return self._renewed is not None

    def renew(self) -> bool:
        """After a bound was reached, continue in a new automaton. False without one, and until it is compiled: that
        takes up to a second, for which all other rows of the batch would wait.
        """
        if not self._is_delayed() or self._renewed is None or not self._renewed.done():
            return False
        renewed, self._renewed = self._renewed, None
        if (fault := renewed.exception()) is not None:
            self.fault = fault
            return False
        self.matcher = renewed.result()
        self.matcher.consume_tokens(self._tokens.tolist())
        self.is_over = self.matcher.is_stopped()
        return not self.is_over

    def fork(self, *, renews: bool = True) -> GrammarState:
        """Another state at the same position; without `renews` it ends at a bound of the automaton."""
        fork = GrammarState(self.matcher.deep_copy(), self._make if renews else None)
        fork._tokens = self._tokens[:]
        fork.is_over = self.is_over
        return fork


@attrs.define(eq=False)
class _KeptGrammar:
    matcher: LLMatcher
    grammar: Grammar
    before: str
    uses: int = 0


class _TooLargeToKeep(Exception):
    """A grammar exceeds `KEPT_LIMITS`."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps those used last. Safe to use from several threads.

    Its states are usable as long as it exists.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, _KeptGrammar] = OrderedDict()
        self._large: deque[int] = deque(maxlen=MAX_LARGE)
        """Hashes of the keys of grammars that are too large to be kept, and are compiled for each request."""
        self._lock = Lock()
        self.turn = Lock()
        """Held while a thread works on a grammar in Python, which takes the GIL from the decode thread: one thread at a
        time. llguidance releases the GIL while it compiles, so that part is done without the lock: grammars are
        compiled in parallel."""
        self._renewing = Lock()
        """Held while a grammar is compiled again: one at a time, because each takes a core."""

    def kept(self, key: str) -> GrammarState | None:
        """A state at the beginning of the grammar of this key (`key_of`), if it is kept; else `compile` is needed."""
        with self._lock:
            return self._state(key) if key in self._kept else None

    @property
    def is_available(self) -> bool:
        """Whether the vocabulary has a token that ends a text. Without one no grammar can end."""
        return len(self._vocab.eog) > 0

    def prepare(self) -> None:
        """Build what every grammar needs, so that the first request does not wait for it, nor all other Python threads.
        Its last part holds the GIL, for 0.1 s with 49,000 tokens and 0.8 s with 262,000.
        """
        if self.is_available:
            with _COMPILES.running(), self.turn, self._vocab.opened():
                self._made_tokenizer()

    def compile(self, grammar: Grammar, before: str = "", *, is_shared: bool = True) -> GrammarState:
        """A state at the beginning of `grammar`, whose first mask is quick to compute. Without `is_shared` it has an
        automaton of its own.

        `before` is a grammar in Lark's notation that comes first, and in which `@held` stands for `grammar`. A kept
        grammar is ready at once; another takes milliseconds, a large one up to a second. Raises `BadRequest` with the
        place of what cannot be compiled.
        """
        key = key_of(grammar, before)
        if not is_shared:
            return GrammarState(self._make(grammar, before))
        if (state := self.kept(key)) is not None:
            return state
        with self._lock:
            is_large = hash(key) in self._large
        if not is_large:
            with suppress(_TooLargeToKeep):
                matcher = self._make(grammar, before, KEPT_LIMITS)
                with self._lock:
                    self._kept[key] = _KeptGrammar(matcher, grammar, before)
                    if len(self._kept) > MAX_KEPT:
                        self._kept.popitem(last=False)
                    return self._state(key)
            self._note_large(key)
        return GrammarState(self._make(grammar, before))

    def serves(self, grammar: Grammar) -> bool:
        """Whether `grammar` can be compiled. It is not kept."""
        try:
            self._make(grammar)
        except BadRequest:
            return False
        return True

    def _state(self, key: str) -> GrammarState:
        kept = self._kept[key]
        self._kept.move_to_end(key)
        kept.uses += 1
        return GrammarState(kept.matcher.deep_copy(), partial(self._make_anew, key, kept))

    def _make_anew(self, key: str, kept: _KeptGrammar) -> Future[LLMatcher]:
        """Compile a kept grammar again, whose automaton has reached its bound, and keep the old one no longer. Runs in
        a thread that a shutdown does not wait for.
        """
        with self._lock:
            if self._kept.get(key) is kept:
                del self._kept[key]
        if kept.uses <= FEW_USES:
            self._note_large(key)
        made = Future[LLMatcher]()

        def make() -> None:
            try:
                with self._renewing:
                    matcher = self._make(kept.grammar, kept.before)
            except BaseException as fault:  # noqa: BLE001  (a panic of llguidance's is no `Exception`)
                made.set_exception(fault)
            else:
                made.set_result(matcher)

        Thread(target=make, name="uma-grammar-renewal", daemon=True).start()
        return made

    def _note_large(self, key: str) -> None:
        with self._lock:
            self._large.append(hash(key))

    def _make(self, grammar: Grammar, before: str = "", limits: LLParserLimits = LIMITS) -> LLMatcher:
        if not self.is_available:
            raise BadRequest.at(
                "grammar", "this model's vocabulary has no token that ends a text, so no grammar can end"
            )
        # Holds the vocabulary: this thread can have been abandoned, and the engine closed meanwhile.
        with _COMPILES.running(), self._vocab.opened():
            return self._made(grammar, before, limits)

    def _made(self, grammar: Grammar, before: str, limits: LLParserLimits) -> LLMatcher:
        with self.turn:
            tokenizer, source = self._read(grammar, before)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        _check_size(matcher, limits)
        if matcher.is_error():
            if before:
                self._make(grammar)  # raises with the place, if the error is in `grammar` itself
            raise self._refusal(grammar, matcher.get_error(), tokenizer)
        behind = matcher.deep_copy()
        with self.turn:
            matcher.compute_ff_tokens()
            behind.consume_tokens(behind.compute_ff_tokens())
        for state in (matcher, behind):
            state.compute_bitmask()
            _check_size(state, limits)
            if state.is_error():  # no text can end, for example where a `$ref` leads to itself
                raise BadRequest.at(_field(grammar), f"{_reason(grammar, state.get_error())}")
        return matcher

    def _read(self, grammar: Grammar, before: str) -> tuple[LLTokenizer, str]:
        """The tokenizer and the source that llguidance compiles. Raises `BadRequest` for what is refused before."""
        if grammar.json_schema is not None and (found := problem(grammar.json_schema)) is not None:
            raise BadRequest.at(f"{_field(grammar)}{found[0]}", f"{found[1]}")
        source = _source(grammar)
        return self._made_tokenizer(), _behind(before, source) if before else source

    def _made_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            # Weak: llguidance keeps the object, in a reference cycle that Python's collector cannot see.
            vocab = _VocabTokenizer(self._vocab, WeakMethod(self._longest_pieces))
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(vocab), eos_token=self._vocab.eog_ids.tolist(), slices=SLICES
            )
            vocab.tokens.clear()  # llguidance has copied them
        return self._tokenizer

    def _longest_pieces(self, text: str) -> list[int]:
        """A text as the longest tokens of text that fit, one after the other; empty before there is a tokenizer."""
        return [] if self._tokenizer is None else self._tokenizer.greedy_tokenize(text)

    def _refusal(self, grammar: Grammar, reason: str, tokenizer: LLTokenizer) -> BadRequest:
        """Error with llguidance's reason for not compiling a grammar, and of a schema the place."""

        def fails_alike(schema: dict[str, Any]) -> bool:
            with self.turn:
                source = _from_schema(schema)
            return LLMatcher.validate_grammar(source, tokenizer, limits=LIMITS) == reason

        place = "" if grammar.json_schema is None else _place(grammar.json_schema, fails_alike)
        return BadRequest.at(f"{_field(grammar)}{place}", f"{_reason(grammar, reason)}")


class GrammarMasks:
    """Computes masks of a batch's rows on a helper thread. Belongs to one thread, which calls `begin`, computes
    something else, and calls `wait`.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._words = -(-n_vocab // 32)
        self._bits = np.empty((0, self._words), np.int32)
        self._addends = np.empty((0, self._words * 4, 8), np.float32)
        self._threads = max(1, backend.core_count() // 2)
        self._helper: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._job: Future[npt.NDArray[np.float32]] | None = None

    def begin(self, states: Sequence[GrammarState], drafts: Sequence[list[int]] | None = None) -> None:
        """Start computing the masks of these states, which must not change until `wait`.

        With `drafts`, a list of tokens for each state, also the masks behind each of its tokens, in order. The grammar
        must allow the tokens (`GrammarState.common`).
        """
        if self._helper is None:  # made on first use, so that there are no threads without grammars
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="uma-grammar")
            self._executor = LLExecutor(self._threads)
        elif self._job is not None:
            self._job.result()  # the job of a batch that failed still uses the buffers
        self._job = self._helper.submit(self._fill, states, drafts or [[]] * len(states))

    def wait(self) -> npt.NDArray[np.float32]:
        """Addends to the logits, `[masks, n_vocab]`: 0 for allowed tokens, minus infinity for others.

        Valid until the next `begin`. A state whose grammar became too complex, or whose mask could not be computed, has
        rows without any allowed token; its `check` says why.
        """
        assert self._job is not None
        job, self._job = self._job, None
        return job.result()

    def close(self) -> None:
        """End the helper thread. Harmless when repeated."""
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None

    def _fill(self, states: Sequence[GrammarState], drafts: Sequence[list[int]]) -> npt.NDArray[np.float32]:
        """Compute the addends. After a fault each state is computed alone, to find the one with the fault."""
        try:
            return self._filled(states, drafts)
        except BaseException as error:  # noqa: BLE001  (a panic of llguidance's is no `Exception`)
            if len(states) == 1:
                states[0].fault = error
                return np.broadcast_to(np.float32(-np.inf), (1 + len(drafts[0]), self._n_vocab))
        alone = [self._fill([state], [draft]).copy() for state, draft in zip(states, drafts, strict=True)]
        return np.concatenate(alone)

    def _filled(self, states: Sequence[GrammarState], drafts: Sequence[list[int]]) -> npt.NDArray[np.float32]:
        size = len(states) + sum(map(len, drafts))
        if size > len(self._bits):
            self._bits = np.empty((size, self._words), np.int32)
            self._addends = np.empty((size, self._words * 4, 8), np.float32)
        bits, addends = self._bits[:size], self._addends[:size]
        self._fill_bits(states, drafts, bits)
        np.take(_ADDENDS, bits.view(np.uint8), axis=0, out=addends, mode="clip")
        return addends.reshape(size, -1)[:, : self._n_vocab]

    def _fill_bits(
        self, states: Sequence[GrammarState], drafts: Sequence[list[int]], bits: npt.NDArray[np.int32]
    ) -> None:
        assert self._executor is not None
        memory = bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits)
        rows = list(accumulate((1 + len(draft) for draft in drafts), initial=0))[:-1]
        places = list(zip(states, rows, drafts, strict=True))
        plain = [(state.matcher, row) for state, row, draft in places if not draft]
        drafted = [(state.matcher, row, draft) for state, row, draft in places if draft]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *memory)
        for _, row, draft in drafted:
            bits[row : row + 1 + len(draft)] = 0  # llguidance writes no masks behind the end of a grammar
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
        for state, row, draft in places:
            if state.matcher.is_error() and state.renew():
                self._fill_bits([state], [draft], bits[row : row + 1 + len(draft)])
            elif state.matcher.is_error():  # llguidance would allow the end of text, as if the text were complete
                bits[row : row + 1 + len(draft)] = 0


class _VocabTokenizer:
    """llguidance's interface to a vocabulary, with which it tokenizes forced text."""

    def __init__(self, vocab: Vocab, longest_pieces: WeakMethod[Callable[[str], list[int]]]) -> None:
        self._vocab = vocab
        self.tokens = vocab.pieces()  # also finds special tokens
        self._special = frozenset(vocab.special_ids)
        self.eos_token_id = int(vocab.eog_ids[0])
        self.bos_token_id = vocab.bos if vocab.bos >= 0 else None
        self.special_token_ids = list(vocab.special_ids)
        for token in vocab.special_ids:
            self.tokens[token] = vocab.text_of(token).encode()
        self._longest_pieces = longest_pieces

    def __call__(self, text: bytes) -> list[int]:
        """Token ids as they stand in the middle of a text. They are tokens of text, and spell exactly these bytes
        wherever the vocabulary allows that: llguidance ends a grammar whose forced text is tokenized to something else.
        """
        wanted = text.decode()
        for before in _BEFORE_TEXT:
            ids = self._vocab.tokenize(before + wanted, add_special=False, parse_special=False).tolist()
            pieces = [self._vocab.piece(token) for token in ids]
            starts = list(accumulate(map(len, pieces), initial=0))
            surplus = starts[-1] - len(text)
            if surplus in starts:
                cut = starts.index(surplus)
                if b"".join(pieces[cut:]) == text:
                    return [part for token in ids[cut:] for part in self._as_text(token)]
        return self._longest(wanted)

    def _as_text(self, token: int) -> list[int]:
        """A token, or tokens of text instead of a special one: llama.cpp parses user-defined tokens in any text."""
        return self._longest(self._vocab.piece(token).decode()) if token in self._special else [token]

    def _longest(self, text: str) -> list[int]:
        longest_pieces = self._longest_pieces()
        return [] if longest_pieces is None else longest_pieces(text)


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's own form. Raises `BadRequest` for invalid GBNF, and for grammars that are too deep."""
    if grammar.json_schema is not None:
        return _from_schema(grammar.json_schema)
    if grammar.json_object:
        return _from_schema({"type": "object"})
    if grammar.regex is not None:
        return LLMatcher.grammar_from_regex(grammar.regex)
    if grammar.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, grammar.choice)))
    if grammar.lark is not None:
        _check_depth(grammar, too_deep_rules(grammar.lark))
        return LLMatcher.grammar_from_lark(grammar.lark)
    assert grammar.gbnf is not None
    _check_depth(grammar, too_deep_gbnf(grammar.gbnf))
    try:
        lark = gbnf_to_lark(grammar.gbnf)
    except Exception as error:  # noqa: BLE001  (that is what the converter raises)
        raise BadRequest.at("grammar.gbnf", f"{in_plain_words(str(error) or type(error).__name__)}") from None
    _check_depth(grammar, too_deep_rules(lark))
    return LLMatcher.grammar_from_lark(lark)


def _check_depth(grammar: Grammar, reason: str) -> None:
    if reason:
        raise BadRequest.at(_field(grammar), reason)


def _field(grammar: Grammar) -> str:
    return f"grammar.{next(name for name in GRAMMAR_FIELDS if getattr(grammar, name) is not None)}"


def _reason(grammar: Grammar, reason: str) -> str:
    """llguidance's reason. Places in it refer to Lark's notation, so they are only shown for grammars that were given
    in it.
    """
    return in_plain_words(reason, has_places=grammar.lark is not None)


def _behind(before: str, source: str) -> str:
    """llguidance's form of the grammar `before`, in which `@held` stands for the grammar `source`, which is JSON or
    Lark.
    """
    held = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    return json.dumps({"grammars": [{"lark_grammar": before}, {**held, "name": "held"}]})


def _check_size(matcher: LLMatcher, limits: LLParserLimits) -> None:
    if limits is KEPT_LIMITS and matcher.is_error() and is_size_limit(matcher.get_error()):
        raise _TooLargeToKeep


def key_of(grammar: Grammar, before: str) -> str:
    """Key of a grammar, equal for those that `GrammarCompiler.compile` treats as one."""
    return json_text.dumps([attrs.asdict(grammar), before])


def _literal(text: str) -> str:
    """Regular expression that matches only `text`."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _from_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(for_llguidance(schema, COMPACT))


def _place(root: dict[str, Any], fails_alike: Callable[[dict[str, Any]], bool]) -> str:
    """Path of the innermost subschema that fails with the same reason as the whole."""
    shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions", "$schema") if name in root}
    place, schema, probes = "", root, 0
    while True:
        for step, inner in subschemas(schema):
            probes += 1
            if probes > MAX_PROBES:
                return place
            if fails_alike({**shared, **inner, "x-guidance": {}}):
                place, schema = place + step, inner
                break
        else:
            return place
