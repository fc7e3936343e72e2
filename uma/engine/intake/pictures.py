"""Prompts with pictures: from files to pixels to pieces, and from pieces to token ids. Any thread.

A picture that was seen recently is neither decoded nor encoded again: it is kept by its file's hash. Sounds count as
pictures here.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from weakref import WeakSet

import attrs

from uma.engine.intake.overload import UNKNOWN_SERVICE_MS
from uma.engine.intake.prompt import roomier
from uma.engine.intake.rendering import message_ends, rendered
from uma.engine.kv.memory_kinds import kind_of
from uma.engine.kv.pictures import MAX_TOKENS, MIN_TOKENS, ids_of, runs_in
from uma.engine.kv.prefix_tree import common_length
from uma.engine.worker.sequence import PlacedPicture
from uma.errors import BadRequest, Overloaded, PromptTooLarge
from uma.llama.context import Context
from uma.llama.projector import Picture, Pixels, Projector, Samples, TextPiece
from uma.media.decoder import MediaDecoder
from uma.media.files import file_of
from uma.types import Media, Request

MAX_KEPT_BYTES = 256 * 2**20
"""Maximum size of all embeddings kept for later prompts. One of 576 tokens for a 7B model takes 9 MiB."""
MAX_PREPARED_TOKENS = 32_768
"""Maximum tokens of all pictures that are prepared and wait to be encoded; those of one request are bounded by the
context. Until then each token holds its pixels, resized, or its part of a spectrum: from 2 kB (LLaVA) to 40 (Gemma 3).
Of decoded files each tokenizer thread has one at a time."""
PART_TOKENS = 32
"""Maximum tokens of a part of a picture, if it can be cut. Smaller parts would hardly be faster on a CPU."""


@attrs.frozen(eq=False)
class SeenFile:
    """The file of a picture, prepared."""

    tokens: array[int]
    """Tokens of its parts, and of the text that the model puts around them."""
    parts: tuple[tuple[Picture, int], ...]
    """Parts by run of ids: the picture, and the index of its first token in the part."""
    pictures: tuple[Picture, ...]

    @property
    def size_bytes(self) -> int:
        return sum(picture.embedding.nbytes for picture in self.pictures if picture.embedding is not None)

    @property
    def is_encoded(self) -> bool:
        return all(picture.embedding is not None for picture in self.pictures)


@attrs.frozen
class PicturePrompt:
    """Prompt of a request, as tokens."""

    tokens: array[int]
    pictures: tuple[PlacedPicture, ...] = ()
    message_ends: tuple[int, ...] = ()
    """See `Sequence.message_ends`; none of a prompt without pictures."""
    file_tokens: tuple[int, ...] = ()
    """Tokens of each picture's file."""


class PictureReader:
    """Makes prompts of requests with pictures, for one context and its projector."""

    def __init__(self, context: Context, projector: Projector) -> None:
        self._context = context
        self._is_checkpointed = not kind_of(context).can_be_cut
        self._projector = projector
        self._decoder = MediaDecoder(sees=projector.sees, hears=projector.hears)
        self._lock = threading.Lock()
        self._kept: dict[str, SeenFile] = {}
        """Prepared files by hash, the last used at the end."""
        self._prepared: WeakSet[Picture] = WeakSet()
        """Pictures that were not encoded when last checked."""

    def read(self, request: Request, next_file: Callable[[], None], *, first: int = 0) -> PicturePrompt:
        """The prompt of a request. Raises `BadRequest`, which counts messages from the `first`, `TemplateError`,
        `PromptTooLarge` or `Overloaded`. Called in a thread. Before each file it calls `next_file`, which waits for the
        file's turn, and raises if the waiting task is cancelled.
        """
        marked, where = self._marked(request, first), _where(request)
        template, vocab, parse_special = self._context.model.chat_template, self._context.model.vocab, True
        if marked.prompt is None:
            text = rendered(template, marked)
        else:
            text, parse_special = marked.prompt, marked.parse_special
        files = self._files(request, next_file, first, where)
        head, *rest = self.parts_of(text, files, where)
        adds_special = not parse_special or template.needs_bos(text)
        tokens = array("i", [vocab.bos] if adds_special and vocab.adds_bos else [])
        begun = array("i", [vocab.bos])
        ends, at, token_ends = self._ends(marked, text), 0, set[int]()
        for index, part in enumerate((head, *rest)):
            own = self._tokens_of(part, parse_special=parse_special)
            for end in ends:
                if at <= end <= at + len(part):
                    own_end = common_length(self._tokens_of(text[at:end], parse_special=parse_special), own)
                    token_ends.add(len(tokens) + own_end)
            tokens += own
            at += len(part) + len(self._projector.marker)
            if index < len(files):
                # Only now is its position known. (libmtmd adds the beginning of text last, so it does not count.)
                if lead := (len(tokens) - (vocab.adds_bos and tokens[:1] == begun)) % self._projector.block:
                    field, item = next(islice(request.placed_media(first), index, None))
                    files[index] = self._seen(item.data, f"{field}.data", where, files[:index], lead)
                tokens += files[index].tokens
        if adds_special and vocab.adds_eos:
            tokens.append(vocab.eos)
        if not tokens or tokens[-1] < 0:
            raise BadRequest.at(where, "a prompt cannot end with a picture or a sound; write something behind it")
        sizes = tuple(len(file.tokens) for file in files)
        return PicturePrompt(tokens, placed(tokens, files), tuple(sorted(token_ends - {0})), sizes)

    def marked(self, request: Request, next_file: Callable[[], None]) -> tuple[Request, list[SeenFile]]:
        """The request with marks in place of its pictures, and these. See `read`."""
        if self._projector.block > 1 and any(True for _ in request.placed_media()):
            raise BadRequest.at(_where(request), "pictures of this model's kind are unsupported in decisions")
        return self._marked(request, 0), self._files(request, next_file, 0, _where(request))

    def parts_of(self, text: str, files: Sequence[SeenFile], where: str = "messages") -> list[str]:
        """Text of a rendered prompt before, between and behind its pictures. Raises `BadRequest`."""
        if len(parts := text.split(self._projector.marker)) != len(files) + 1:
            raise BadRequest.at(where, "the chat template drops a picture or a sound, or shows one twice")
        return parts

    def _files(self, request: Request, next_file: Callable[[], None], first: int, where: str) -> list[SeenFile]:
        files = list[SeenFile]()
        for field, media in request.placed_media(first):
            next_file()
            self._check_length(files, f"{field}.data")
            files.append(self._seen(media.data, f"{field}.data", where, files))
        return files

    def _ends(self, marked: Request, text: str) -> list[int]:
        """Ends of messages that can be used, in characters of the prompt."""
        if not self._is_checkpointed or marked.messages is None or marked.continued is not None:
            return []
        return message_ends(self._context.model.chat_template, marked, text)

    def _tokens_of(self, text: str, *, parse_special: bool) -> array[int]:
        tokens = array("i")
        if text:
            ids = self._context.model.vocab.tokenize(text, add_special=False, parse_special=parse_special)
            tokens.frombytes(ids.tobytes())
        return tokens

    def _marked(self, request: Request, first: int) -> Request:
        """The request with marks in the place of pictures."""
        if request.prompt is not None:
            return attrs.evolve(request, prompt=self._marked_text(request.prompt, request.media, "media"), media=())
        messages = [
            attrs.evolve(
                message, content=self._marked_text(message.content, message.media, f"messages[{index}].media"), media=()
            )
            for index, message in enumerate(request.messages or (), -first)
        ]
        return attrs.evolve(request, messages=messages)

    def _marked_text(self, text: str, media: Sequence[Media], field: str) -> str:
        parts, before = list[str](), 0
        for at, item in enumerate(media):
            if not before <= item.at <= len(text):
                raise BadRequest.at(f"{field}[{at}].at", f"{item.at} is before another one's, or behind the text's end")
            parts += text[before : item.at], self._projector.marker
            before = item.at
        return "".join((*parts, text[before:]))

    def _check_length(self, files: Sequence[SeenFile], field: str) -> None:
        """Refuse a request whose files so far already exceed the context, before the next file is decoded."""
        taken, most = sum(len(file.tokens) for file in files), self._context.n_ctx_seq
        if taken > most:
            raise PromptTooLarge.at(
                field,
                f"what stands before it takes {taken:,} tokens and does not fit the context of {most:,}; send "
                f"fewer or smaller pictures and sounds, or {roomier(self._context.model, most)}",
                prompt_tokens=taken,
                n_ctx=most,
            )

    def _seen(self, text: str, field: str, where: str, own: Sequence[SeenFile], lead: int = 0) -> SeenFile:
        """A file as it appears in a prompt; it is decoded unless it was seen recently. `own` are the request's files
        before it. `lead`: see `Projector.prepare`.
        """
        data = file_of(text, field)
        id = hashlib.sha256(data).hexdigest() + (f" {lead}" if lead else "")
        with self._lock:
            if (seen := self._kept.pop(id, None)) is not None:
                self._kept[id] = seen
                return seen
            self._check_room(own)
        made = self._made(self._decoder.decode(data, id, field), where, lead)
        with self._lock:
            seen = self._kept.setdefault(id, made)
            self._prepared.update(seen.pictures)
            size = sum(kept.size_bytes for kept in self._kept.values())
            while size > MAX_KEPT_BYTES:
                size -= self._kept.pop(next(iter(self._kept))).size_bytes
        return seen

    def _check_room(self, own: Sequence[SeenFile]) -> None:
        for picture in [picture for picture in self._prepared if picture.embedding is not None]:
            self._prepared.discard(picture)
        if self._waiting_tokens(own) < MAX_PREPARED_TOKENS:
            return
        # Pictures of requests that have ended are referenced only here.
        self._kept = {id: seen for id, seen in self._kept.items() if seen.is_encoded}
        if (waiting := self._waiting_tokens(own)) >= MAX_PREPARED_TOKENS:
            raise Overloaded(
                f"too many pictures and sounds wait to be encoded: {waiting:,} tokens of them; ask again",
                retry_after_ms=UNKNOWN_SERVICE_MS,
            )

    def _waiting_tokens(self, own: Sequence[SeenFile]) -> int:
        mine = {picture for seen in own for picture in seen.pictures}
        return sum(picture.n_tokens for picture in self._prepared if picture not in mine)

    def _made(self, file: Pixels | Samples, where: str, lead: int) -> SeenFile:
        """A decoded file as it appears in a prompt. Everything is asked of its pictures here, while no other thread has
        them.
        """
        tokens, parts, pictures = array("i"), list[tuple[Picture, int]](), list[Picture]()
        for piece in self._projector.prepare(file, lead):
            if isinstance(piece, TextPiece):
                tokens.frombytes(piece.tokens.tobytes())
                continue
            self._check(piece, where)
            cuts = self._cuts(piece)
            for start, end in pairwise(cuts):
                key = f"{self._projector.identity} {file.id} {len(pictures)} {start}".encode()
                tokens += ids_of(key, end - start, self._positions(piece, start, end))
                parts.append((piece, start))
            pictures.append(piece)
        return SeenFile(tokens, tuple(parts), tuple(pictures))

    def _positions(self, picture: Picture, start: int, end: int) -> int:
        """Positions of a part of a picture."""
        if not self._projector.shares_positions(picture):
            return end - start
        return picture.n_positions if end == picture.n_tokens else 0

    def _cuts(self, picture: Picture) -> list[int]:
        """Where a picture is cut, with its beginning and end: streams go on between its parts."""
        tokens, parts = picture.n_tokens, 1
        if not self._projector.attends_both_ways(picture):
            parts = -(-tokens // min(PART_TOKENS, self._context.n_batch))
        return [tokens * part // parts for part in range(parts + 1)]

    def _check(self, picture: Picture, where: str) -> None:
        tokens, most = picture.n_tokens, min(MAX_TOKENS, self._context.n_ctx_seq)
        if not MIN_TOKENS <= tokens <= most:
            raise BadRequest.at(
                where, f"a picture or a sound of {tokens:,} tokens; from {MIN_TOKENS} to {most:,} can be read"
            )
        if self._projector.attends_both_ways(picture) and tokens > self._context.n_ubatch:
            most = self._context.n_ubatch
            raise BadRequest.at(where, f"a picture takes {tokens:,} tokens in one batch, and --n-ubatch is {most:,}")

    def close(self) -> None:
        """End the child process."""
        self._decoder.close()


def placed(tokens: array[int], files: Sequence[SeenFile]) -> tuple[PlacedPicture, ...]:
    """Pictures of a prompt, each with the place of its ids."""
    parts = ((at, *part) for at, file in enumerate(files) for part in file.parts)
    pairs = zip(runs_in(tokens), parts, strict=True)
    return tuple(PlacedPicture(run, picture, start, before) for run, (before, picture, start) in pairs)


def _where(request: Request) -> str:
    """Field that errors about all pictures of the request name."""
    return "messages" if request.prompt is None else "prompt"
