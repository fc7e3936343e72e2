"""Tokens of a request's prompt: checked, rendered, tokenized. Belongs to the Trio thread."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import cache, partial
from itertools import islice, takewhile
from typing import TypeVar
from weakref import WeakValueDictionary

import attrs
import trio

from uma import json_text
from uma.config import RuntimeConfig
from uma.engine.clock import now_ms
from uma.engine.intake.compaction import EXTRA_TOKENS, summary_tokens
from uma.engine.intake.lanes import LaneLimiter
from uma.engine.intake.overload import MIN_RETRY_MS, UNKNOWN_SERVICE_MS
from uma.engine.intake.rendering import message_ends, rendered
from uma.engine.intake.truncation import INSTRUCTIONS, MESSAGE_TOKENS, Cut, left_out
from uma.engine.kv.prefix_tree import common_length
from uma.engine.recorder import TRIO, Recorder
from uma.errors import BadRequest, Overloaded, PromptTooLarge
from uma.llama.model import Model
from uma.net.arrivals import arrivals
from uma.net.client import CLIENT
from uma.types import Message, Request, Tokenized

T = TypeVar("T")
Rewrite = Callable[[Request], Request]

SHORT_PROMPT_CHARS, SHORT_CHAT_MESSAGES = 2_000, 32
"""Maximum size of a prompt that is tokenized on the Trio thread, which takes less time than the way to another thread.
Messages count because rendering takes time for each, however short it is."""
TOKENIZER_THREADS = 2
"""Maximum prompts tokenized at once, in threads of their own. More would only take cores from decoding."""
PICTURE_THREADS = 2
"""Maximum pictures and sounds decoded at once. Each client has one at a time, and clients take turns file by file: slow
files of some delay neither text nor other clients' files."""
MAX_PICTURE_CLIENTS = 32
"""Maximum requests with pictures that have a thread; most of them wait in it for their turn."""
MAX_PREPARING_BYTES = 32 * 2**20
"""Maximum text of all prompts that wait to be tokenized, or are being tokenized: more is refused as overload. A prompt
also exists as a frame, as a string and as tokens, so this bounds memory several times as large."""
LANE_SHARE = {1: 1.0, 0: 0.75, -1: 0.5}
"""Maximum share of `MAX_PREPARING_BYTES` by lane: a flood in one lane leaves space for those above it."""
PIECE_CHARS = 65_536
"""Maximum characters of short texts that are tokenized in one turn: some 20 ms."""
TEXT_CHARS = 64
"""Characters that each text counts on top of its own."""
MAX_CUTS = 4
"""Maximum cuts of a conversation, if its template writes more around messages than is counted for them."""


def roomier(model: Model, max_tokens: int) -> str:
    """Advice for a context of more than `max_tokens`."""
    if 0 < model.n_ctx_train <= max_tokens:
        most = f"this one takes {model.n_ctx_train:,} tokens, whatever n_ctx (--n-ctx) says"
        return f"use a model with a longer context: {most}"
    return "run with a larger n_ctx (--n-ctx)"


class PromptReader:
    """Prepares prompts for one model. `max_tokens` is the longest prompt that leaves space for an answer, plus one."""

    def __init__(self, config: RuntimeConfig, model: Model, max_tokens: int) -> None:
        self._max_bytes = config.max_prompt_bytes
        self._model = model
        self._max_tokens = max_tokens
        self.lanes = LaneLimiter(TOKENIZER_THREADS)
        self._picture_lanes = LaneLimiter(PICTURE_THREADS)
        self._picture_threads = trio.CapacityLimiter(MAX_PICTURE_CLIENTS)
        self._picture_turns: WeakValueDictionary[Hashable, trio.Lock] = WeakValueDictionary()
        """Locks by client, while it has requests with pictures to decode."""
        self.recorder: Recorder | None = None
        """Gets a span for each prompt that is prepared, if there is one."""
        self._preparing_bytes = 0
        self._bytes_by_client: Counter[Hashable] = Counter()
        self._bytes_per_ms = 0.0

    async def read(self, request: Request, *, must_fit: bool = True) -> array[int]:
        """The prompt's tokens. Raises `BadRequest`, `PromptTooLarge`, `TemplateError`, or `Overloaded` if too much text
        is being prepared. With `must_fit` a text that cannot fit the context is refused before it is tokenized.
        """
        if request.token_ids is not None:
            if not must_fit:
                return await self._prepare(self._checked_ids, request)
            self.check_fits(len(request.token_ids))
            return self._checked_ids(request)
        self._check_bytes(request)
        if must_fit and request.prompt is not None:
            self._check_bound(request.prompt)
        tokens = await self._prepare(partial(self._tokenize, must_fit=must_fit), request)
        if not tokens:
            raise BadRequest.at("prompt", "gives no token at all, so there is nothing to continue")
        return tokens

    async def rewritten(self, rewrite: Rewrite, request: Request) -> Request:
        """`rewrite(request)`; in a thread if that reads many messages, or long calls. Raises what `rewrite` does,
        `PromptTooLarge`, and `Overloaded`.
        """
        # Without calls `rewrite` reads nothing, and a thread would take longer.
        if _is_short(request) or not any(message.tool_calls for message in request.messages or ()):
            return rewrite(request)
        self._check_bytes(request)
        return await self.in_thread(partial(rewrite, request), _chars(request), request.priority)

    async def cut(self, request: Request, prepared: Rewrite, prompt_tokens: int, picture_tokens: Sequence[int]) -> Cut:
        """The request without the turns that do not fit beside its answer, with space for a summary if it asks for one.
        `prepared` makes a request renderable. The prompt takes `prompt_tokens`, and each picture file `picture_tokens`.

        Raises what `read` and `prepared` do.
        """
        most, answer = self._max_tokens - 1, request.sampling.max_tokens
        # An answer without a limit gets all that is left: a quarter of the context is reserved for it.
        limit = most - (most // 4 if answer is None or answer >= most else min(answer, most // 2))
        if request.truncation == "off" or request.messages is None or prompt_tokens <= limit:
            return Cut(request=request)
        if request.truncation == "compact":
            limit = max(1, limit - summary_tokens(self._max_tokens) - EXTRA_TOKENS)
        cut = partial(self._cut_to_fit, limit=limit, prepared=prepared, picture_tokens=picture_tokens)
        return await self._prepare(cut, request)

    def _cut_to_fit(self, request: Request, *, limit: int, prepared: Rewrite, picture_tokens: Sequence[int]) -> Cut:
        def prompt_tokens(messages: Sequence[Message]) -> int:
            text = self._render(prepared(attrs.evolve(request, messages=messages)))
            return len(self._tokens_of(text))

        def tokens(at: int) -> int:
            message = every[at]
            calls = [f"{call.name}{call.arguments}" for call in message.tool_calls]
            text = "".join([message.content, message.reasoning or "", *calls])
            return len(self._tokens_of(text)) + seen[at] + MESSAGE_TOKENS * (1 + len(calls))

        every, of_pictures = request.messages or (), iter(picture_tokens)
        seen = [sum(islice(of_pictures, len(message.media))) for message in every]
        # Any answer limit up to a quarter gives the same cut, so that a next request with another one is cached.
        goal = min(limit, self._max_tokens - 1 - (self._max_tokens - 1) // 4)
        instructions = takewhile(lambda message: message.role in INSTRUCTIONS, every)
        fixed = prompt_tokens([*instructions, Message("user", "?")])
        counted = cache(tokens)
        for _ in range(MAX_CUTS):
            gone = left_out(every, counted, fixed, goal)
            places = [at for at in range(len(every)) if at not in gone]
            kept, pictures = [every[at] for at in places], sum(seen[at] for at in places)
            if (excess := prompt_tokens(kept) + pictures - limit) <= 0:
                break
            goal -= excess
        return Cut(request=attrs.evolve(request, messages=kept), gone=frozenset(gone))

    async def read_pictures(self, read: Callable[[Request, Callable[[], None]], T], request: Request) -> T:
        """Call `read` for a request with pictures, in a thread of its own kind, for one request of each client at a
        time. `read` must call the function that it gets before each file, to wait for its turn: with 64 slow files
        each, two clients would have kept all others waiting for minutes. Raises what `read` does, `PromptTooLarge`, and
        `Overloaded`.
        """
        self._check_bytes(request)
        sizes = [len(media.data) for _, media in request.placed_media()]
        # A text takes some 4 bytes a character in all its forms; a file takes its own size and its base64.
        chars = _chars(request) + sum(sizes) // 2
        turn = self._picture_turns.setdefault(CLIENT.get(), trio.Lock())
        with self._preparing(4 * chars, request.priority), arrivals().reading(4 * chars):
            async with turn, AsyncExitStack() as slot:

                async def next_file() -> None:
                    await slot.aclose()
                    share = chars / max(1, len(sizes))
                    await slot.enter_async_context(self._picture_lanes.slot(request.priority, share))

                work = partial(self._recorded, partial(read, request, partial(trio.from_thread.run, next_file)))
                # Not abandoned on cancel: the thread ends with its present file, which is bounded (`media.decoder`),
                # because it has its client's turn, and the engine's end frees the projector that it uses.
                return await trio.to_thread.run_sync(work, limiter=self._picture_threads)

    def _checked_ids(self, request: Request) -> array[int]:
        ids, limit = request.token_ids or (), self._model.vocab.n_tokens
        if max(ids) >= limit:
            raise BadRequest.at("token_ids", f"{max(ids)} is not in the vocabulary of {limit:,} tokens")
        return array("i", ids)

    async def message_ends(self, request: Request, tokens: array[int]) -> tuple[int, ...]:
        """Numbers of prompt tokens before the places where other prompts are likely to differ (`rendering`)."""
        if request.messages is None or request.continued is not None:
            return ()
        return await self._prepare(partial(self._message_ends, tokens=tokens), request)

    def _message_ends(self, request: Request, *, tokens: array[int]) -> tuple[int, ...]:
        text = self._render(request)
        ends = message_ends(self._model.chat_template, request, text)
        return tuple(sorted({common_length(self._tokens_of(text[:end]), tokens) for end in ends} - {0}))

    async def explain(self, request: Request, *, pieces: bool) -> Tokenized:
        """Tokens of the prompt, and their meaning. Raises what `read` does."""
        return await self.explained(request, await self.read(request, must_fit=False), pieces=pieces)

    async def explained(self, request: Request, tokens: array[int], *, pieces: bool) -> Tokenized:
        """Meaning of a prompt's tokens. Raises `PromptTooLarge` if given ids stand for too much text."""
        told = await self._prepare(lambda _: self._pieces_of(tokens), request) if pieces else None
        if request.prompt is not None:
            vocab = self._model.vocab
            is_added = (
                vocab.adds_bos and tokens[0] == vocab.bos and self._adds_special(request.prompt, request.parse_special)
            )
            return Tokenized(tuple(tokens), added_tokens=int(is_added), pieces=told)
        text = await self.text(request) if told is None or request.token_ids is None else _text(told)
        return Tokenized(tuple(tokens), text, pieces=told)

    async def text(self, request: Request) -> str:
        """Text of the prompt's tokens: the prompt itself, the rendered conversation, or the text of given ids."""
        return request.prompt if request.prompt is not None else await self._prepare(self._text_of, request)

    def _pieces_of(self, tokens: array[int]) -> tuple[bytes, ...]:
        known = {token: self._model.vocab.spelled(token) for token in set(tokens)}
        pieces = tuple(map(known.__getitem__, tokens))
        self._check_size("token_ids", sum(map(len, pieces)))
        return pieces

    async def _prepare(self, function: Callable[[Request], T], request: Request) -> T:
        """Call `function(request)`: at once for a short prompt, else in a thread, in the order of lanes.

        Raises `Overloaded` if too much text is waiting.
        """
        is_quick = self._model.chat_template.is_cheap and not request.tools
        if _is_short(request) and (request.messages is None or is_quick):
            return self._recorded(partial(function, request), TRIO)
        return await self.in_thread(partial(function, request), _chars(request), request.priority)

    async def prepare_texts(self, function: Callable[[int], T], sizes: Sequence[int], lane: int) -> list[T]:
        """Call `function(index)` for each of many texts with these sizes in characters. Long ones are done in pieces,
        between which other requests have a turn.
        """
        chars = sum(sizes)
        if chars <= SHORT_PROMPT_CHARS and len(sizes) <= SHORT_CHAT_MESSAGES:
            return list(map(function, range(len(sizes))))
        found: list[T] = []
        with self._preparing(4 * chars, lane):
            for piece in _pieces(sizes):
                size = sum(sizes[index] for index in piece)
                found += await self._in_slot(partial(_each, function, piece), size, lane)
        return found

    async def in_thread(self, function: Callable[[], T], chars: int, lane: int) -> T:
        """Call `function()`, which reads `chars` characters, in a thread, in the order of lanes. Raises `Overloaded` if
        too much text is waiting.
        """
        with self._preparing(4 * chars, lane), arrivals().reading(4 * chars):
            return await self._in_slot(function, chars, lane)

    async def _in_slot(self, function: Callable[[], T], chars: int, lane: int) -> T:
        async with self.lanes.slot(lane, chars) as slot:
            began = now_ms()
            result = await slot.in_thread(partial(self._recorded, function))
            self._bytes_per_ms = 4 * chars / max(0.001, now_ms() - began)
            return result

    def _recorded(self, function: Callable[[], T], thread: str = "") -> T:
        if (recorder := self.recorder) is None:
            return function()
        began = now_ms()
        result = function()
        recorder.span(thread, "render", began, now_ms())
        return result

    @contextmanager
    def _preparing(self, size_bytes: int, lane: int) -> Iterator[None]:
        client = CLIENT.get()
        self._check_budget(lane, size_bytes, client)
        self._preparing_bytes += size_bytes
        self._bytes_by_client[client] += size_bytes
        try:
            yield
        finally:
            self._preparing_bytes -= size_bytes
            self._bytes_by_client[client] -= size_bytes
            if not self._bytes_by_client[client]:
                del self._bytes_by_client[client]

    def _check_budget(self, lane: int, size_bytes: int, client: Hashable) -> None:
        ahead, limit = self._preparing_bytes, LANE_SHARE[lane] * MAX_PREPARING_BYTES
        mine = 0 if client is None else self._bytes_by_client[client]
        # A single prompt is always accepted: `max_prompt_bytes` limits it. Each client leaves as much as it takes
        # (dynamic thresholds, Choudhury and Hahne 1998), so that another one's first prompt is accepted.
        if (ahead and ahead + size_bytes > limit) or (mine and mine + size_bytes > limit - ahead):
            raise Overloaded(
                f"too many prompts are being prepared: {ahead:,} bytes of text wait to be tokenized",
                retry_after_ms=max(MIN_RETRY_MS, round(ahead / self._bytes_per_ms))
                if self._bytes_per_ms
                else UNKNOWN_SERVICE_MS,
            )

    def _check_bound(self, text: str) -> None:
        """Refuse a text that must have too many tokens, before it is tokenized."""
        least = self._model.vocab.least_tokens(text) if len(text) > self._max_tokens else 0
        if least >= self._max_tokens:
            raise PromptTooLarge(
                f"prompt too large: {len(text):,} characters are {least:,} tokens at least, which do not fit the "
                f"context of {self._max_tokens:,} tokens; shorten the prompt, or "
                f"{roomier(self._model, self._max_tokens)}",
                prompt_tokens=least,
                n_ctx=self._max_tokens,
            )

    async def read_rendered(self, text: str) -> tuple[int, ...]:
        """Tokens of a text to which another program has applied a chat template: spellings of special tokens are these
        tokens, and BOS is added if the text does not begin with it. Raises what `read` does.
        """
        return tuple(await self.read(Request(id="rendered", prompt=text, parse_special=True), must_fit=False))

    def _text_of(self, request: Request) -> str:
        if request.messages is not None:
            return self._render(request)
        pieces = tuple(map(self._model.vocab.piece, request.token_ids or ()))
        self._check_size("token_ids", sum(map(len, pieces)))
        return _text(pieces)

    def check_fits(self, prompt_tokens: int) -> None:
        """Raise `PromptTooLarge` for a prompt that leaves no space for an answer in the context."""
        if prompt_tokens >= self._max_tokens:
            raise PromptTooLarge(
                f"prompt too large: {prompt_tokens:,} tokens do not fit the context of {self._max_tokens:,} tokens, "
                f"which must also hold the answer; shorten the prompt, or {roomier(self._model, self._max_tokens)}",
                prompt_tokens=prompt_tokens,
                n_ctx=self._max_tokens,
            )

    def _check_bytes(self, request: Request) -> None:
        self.check_bytes_of(*_texts(request))

    def check_bytes_of(self, *texts: str, where: str = "") -> None:
        """Raise `PromptTooLarge` for one prompt whose texts are over `max_prompt_bytes`; `where` names it."""
        if sum(map(len, texts)) * 4 <= self._max_bytes:
            return
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        self._check_size(where, size)

    def _check_size(self, where: str, n_bytes: int) -> None:
        if n_bytes > self._max_bytes:
            raise PromptTooLarge.at(
                where,
                f"prompt too large: {n_bytes:,} bytes are over this server's limit of {self._max_bytes:,} "
                "(max_prompt_bytes)",
            )

    def _render(self, request: Request) -> str:
        return rendered(self._model.chat_template, request)

    def _tokenize(self, request: Request, *, must_fit: bool) -> array[int]:
        text, parse_special = request.prompt or "", request.parse_special
        if request.messages is not None:
            text, parse_special = self._render(request), True
            if must_fit:
                self._check_bound(text)
        return self._tokens_of(text, parse_special=parse_special)

    def _tokens_of(self, text: str, *, parse_special: bool = True) -> array[int]:
        add_special = self._adds_special(text, parse_special)
        ids = self._model.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)
        tokens: array[int] = array("i")
        tokens.frombytes(ids.tobytes())
        return tokens

    def _adds_special(self, text: str, parse_special: bool) -> bool:
        return not parse_special or self._model.chat_template.needs_bos(text)


def _each(function: Callable[[int], T], piece: range) -> list[T]:
    return list(map(function, piece))


def _pieces(sizes: Sequence[int]) -> Iterator[range]:
    """Texts by index, in pieces that are tokenized in one turn."""
    start = taken = 0
    for index, size in enumerate(sizes):
        taken += size + TEXT_CHARS
        if taken > PIECE_CHARS and index > start:
            yield range(start, index)
            start, taken = index, size + TEXT_CHARS
    yield range(start, len(sizes))


def _text(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


def _is_short(request: Request) -> bool:
    """Whether the request can be read faster than another thread could begin."""
    return len(request.messages or ()) <= SHORT_CHAT_MESSAGES and _chars(request) <= SHORT_PROMPT_CHARS


def _chars(request: Request) -> int:
    """Characters of its text, or number of token ids: both take about as long to read."""
    return len(request.token_ids or ()) or sum(map(len, _texts(request)))


def _texts(request: Request) -> Iterator[str]:
    """All text that the prompt is made from."""
    yield request.prompt or ""
    for message in request.messages or ():
        yield message.content
        yield message.reasoning or ""
        yield from (call.arguments for call in message.tool_calls)
    for tool in request.tools:
        yield tool.description
        yield json_text.dumps(tool.parameters)
