"""From a request to its prompt's tokens: checked, rendered, tokenized. Belongs to the Trio thread."""

from __future__ import annotations

from array import array
from functools import partial

import trio

from uma.config import RuntimeConfig
from uma.errors import BadRequest, PromptTooLarge
from uma.llama.model import Model
from uma.types import Request, Tokenized

SHORT_PROMPT_CHARS, SHORT_CHAT_MESSAGES = 2_000, 32
"""Maximum size of a prompt that is tokenized on the Trio thread: that takes less time than the way to another thread.
Messages count because rendering takes time for each, however short it is."""


class PromptReader:
    """Prepares prompts for one model. `max_tokens` is the longest prompt that leaves space for an answer, plus one."""

    def __init__(self, config: RuntimeConfig, model: Model, max_tokens: int) -> None:
        self._max_bytes = config.max_prompt_bytes
        self._model = model
        self._max_tokens = max_tokens

    async def read(self, request: Request) -> array[int]:
        """The prompt's tokens. Raises `BadRequest`, `PromptTooLarge` or `TemplateError`."""
        if request.token_ids is not None:
            limit = self._model.vocab.n_tokens
            if max(request.token_ids) >= limit:
                raise BadRequest(f"token_ids: {max(request.token_ids)} is not in the vocabulary of {limit:,} tokens")
            return array("i", request.token_ids)
        chars = len(request.prompt or "") + sum(len(message.content) for message in request.messages or ())
        self._check_bytes(request, chars)
        is_short = chars <= SHORT_PROMPT_CHARS and len(request.messages or ()) <= SHORT_CHAT_MESSAGES
        if is_short and (request.messages is None or self._model.chat_template.is_cheap):
            tokens = self._tokenize(request)
        else:
            tokens = await trio.to_thread.run_sync(self._tokenize, request)
        if not tokens:
            raise BadRequest("prompt: gives no token at all, so there is nothing to continue")
        return tokens

    async def explain(self, request: Request) -> Tokenized:
        """The prompt's tokens, and what they stand for. Raises what `read` does."""
        tokens = await self.read(request)
        if request.prompt is not None:
            vocab = self._model.vocab
            return Tokenized(tuple(tokens), added_tokens=int(vocab.adds_bos and tokens[0] == vocab.bos))
        return Tokenized(tuple(tokens), await trio.to_thread.run_sync(self._text_of, request))

    async def read_rendered(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that a chat template has been applied to elsewhere: spellings of special tokens are these
        tokens, and BOS is added where the text does not begin with it. Raises what `read` does.
        """
        self._check_bytes(Request(id="rendered", prompt=text), len(text))
        add_special = self._model.chat_template.needs_bos(text)
        ids = await trio.to_thread.run_sync(
            partial(self._model.vocab.tokenize, text, add_special=add_special, parse_special=True)
        )
        return tuple(ids.tolist())

    def _text_of(self, request: Request) -> str:
        if request.messages is not None:
            return self._model.chat_template.render(request.messages)
        return b"".join(map(self._model.vocab.piece, request.token_ids or ())).decode("utf-8", "replace")

    def check_fits(self, prompt_tokens: int) -> None:
        """Raise `PromptTooLarge` for a prompt that leaves no space for an answer in the context."""
        if prompt_tokens >= self._max_tokens:
            raise PromptTooLarge(
                f"prompt too large: {prompt_tokens:,} tokens do not fit the context of {self._max_tokens:,} tokens, "
                "which must also hold the answer; shorten the prompt, or run with a larger --n-ctx"
            )

    def _check_bytes(self, request: Request, chars: int) -> None:
        if chars * 4 <= self._max_bytes:
            return
        texts = [request.prompt or "", *(message.content for message in request.messages or ())]
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > self._max_bytes:
            raise PromptTooLarge(
                f"prompt too large: {size:,} bytes are over this server's limit of {self._max_bytes:,} "
                "(max_prompt_bytes)"
            )

    def _tokenize(self, request: Request) -> array[int]:
        vocab = self._model.vocab
        if request.messages is not None:
            template = self._model.chat_template
            text = template.render(request.messages)
            ids = vocab.tokenize(text, add_special=template.needs_bos(text), parse_special=True)
        else:
            ids = vocab.tokenize(request.prompt or "", add_special=True, parse_special=False)
        tokens: array[int] = array("i")
        tokens.frombytes(ids.tobytes())
        return tokens
