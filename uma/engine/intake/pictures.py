"""From a request with pictures to its prompt: files to pixels to pieces, and pieces to ids. Any thread.

A picture that was seen lately is neither decoded nor encoded again: what is known of it is kept by its file's hash. A
sound is a picture here.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakSet

import attrs

from uma.engine.intake.rendering import rendered
from uma.engine.kv.pictures import LEAST_TOKENS, MAX_TOKENS, ids_of, runs_in
from uma.engine.worker.sequence import PlacedPicture
from uma.errors import BadRequest, Overloaded
from uma.llama.context import Context
from uma.llama.projector import Picture, Pixels, Projector, Samples, Text
from uma.media.decoder import MediaDecoder
from uma.media.files import file_of
from uma.types import Media, Request

MAX_KEPT_BYTES = 256 * 2**20
"""Maximum size of all embeddings that are kept for prompts to come. One of 576 tokens for a 7B model takes 9 MiB."""
MAX_KEPT = 1_024
"""Maximum pictures that are kept."""
MAX_PREPARED = 128
"""Maximum pictures that are prepared and wait to be encoded: each holds its pixels, resized, until then."""
PART_TOKENS = 32
"""Maximum tokens of a part of a picture, where one can be cut. Fewer would take a batch little less time on a CPU."""
RETRY_AFTER_MS = 1_000


@attrs.frozen(eq=False)
class _Seen:
    """A picture's file that was prepared."""

    shape: Pixels | Samples
    """Without its content."""
    parts: tuple[Picture, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.embedding.nbytes for each in self.parts if each.embedding is not None)

    @property
    def is_encoded(self) -> bool:
        return all(each.embedding is not None for each in self.parts)


class PictureReader:
    """Makes prompts of requests with pictures, for one context and its projector."""

    def __init__(self, context: Context, projector: Projector) -> None:
        self._context = context
        self._projector = projector
        self._decoder = MediaDecoder(sees=projector.sees, hears=projector.hears)
        self._lock = threading.Lock()
        self._kept: dict[str, _Seen] = {}
        """By the file's hash, those used last at the end."""
        self._prepared: WeakSet[_Seen] = WeakSet()
        """Those that were not encoded when they were looked at last."""

    def read(self, request: Request, *, first: int = 0) -> tuple[array[int], tuple[PlacedPicture, ...]]:
        """The prompt's ids, and the pictures among them. Raises `BadRequest`, which counts messages from the `first`,
        `TemplateError` or `Overloaded`.
        """
        marked, where = self._marked(request, first), _where(request)
        known: dict[str, _Seen] = {}
        decoded = [self._decoded(each.data, f"{field}.data", known) for field, each in request.placed_media(first)]
        template, parse_special = self._context.model.chat_template, True
        if marked.prompt is None:
            text = rendered(template, marked)
        else:
            text, parse_special = marked.prompt, marked.parse_special
        pieces = self._projector.tokenize(
            text,
            decoded,
            add_special=not parse_special or template.needs_bos(text),
            parse_special=parse_special,
        )
        for each in decoded:
            if each.id not in known:
                known[each.id] = self._keep(each, pieces, sum(other.id == each.id for other in decoded), where)
        tokens, parts = self._joined(pieces, known, where)
        pairs = zip(runs_in(tokens), parts, strict=True)
        return tokens, tuple(PlacedPicture(run, picture, start) for run, (picture, start) in pairs)

    def _marked(self, request: Request, first: int) -> Request:
        """The request with marks in the place of pictures."""
        if request.prompt is not None:
            return attrs.evolve(request, prompt=self._marked_text(request.prompt, request.media, "media"), media=())
        messages = [
            attrs.evolve(
                each, content=self._marked_text(each.content, each.media, f"messages[{index}].media"), media=()
            )
            for index, each in enumerate(request.messages or (), -first)
        ]
        return attrs.evolve(request, messages=messages)

    def _marked_text(self, text: str, media: Sequence[Media], field: str) -> str:
        parts, before = list[str](), 0
        for at, each in enumerate(media):
            if not before <= each.at <= len(text):
                raise BadRequest(f"{field}[{at}].at: {each.at} is before another one's, or behind the text's end")
            parts += text[before : each.at], self._projector.marker
            before = each.at
        return "".join((*parts, text[before:]))

    def _decoded(self, text: str, field: str, known: dict[str, _Seen]) -> Pixels | Samples:
        """A picture; without its content where it was seen lately, and then it is `known`."""
        data = file_of(text, field)
        id = hashlib.sha256(data).hexdigest()
        with self._lock:
            if (seen := self._kept.pop(id, None)) is not None:
                self._kept[id] = known[id] = seen
                return seen.shape
            self._check_room()
        return self._decoder.decode(data, id, field)

    def _check_room(self) -> None:
        for each in [each for each in self._prepared if each.is_encoded]:
            self._prepared.discard(each)
        if len(self._prepared) < MAX_PREPARED:
            return
        # Those whose request has gone are kept here alone.
        self._kept = {id: each for id, each in self._kept.items() if each.is_encoded}
        if len(self._prepared) >= MAX_PREPARED:
            raise Overloaded(f"too many pictures wait to be encoded: {MAX_PREPARED}", retry_after_ms=RETRY_AFTER_MS)

    def _keep(self, file: Pixels | Samples, pieces: Sequence[Text | Picture], times: int, where: str) -> _Seen:
        """What was made of a file, which is so often among the pieces."""
        parts = [each for each in pieces if isinstance(each, Picture) and each.id == file.id]
        parts = parts[: len(parts) // times]
        for part in parts:
            self._check(part, where)
        made = _Seen(attrs.evolve(file, data=None), tuple(parts))
        with self._lock:
            seen = self._kept.setdefault(file.id, made)
            self._prepared.add(seen)
            size = sum(each.size_bytes for each in self._kept.values())
            while size > MAX_KEPT_BYTES or len(self._kept) > MAX_KEPT:
                size -= self._kept.pop(next(iter(self._kept))).size_bytes
        return seen

    def _joined(
        self, pieces: Sequence[Text | Picture], known: dict[str, _Seen], where: str
    ) -> tuple[array[int], list[tuple[Picture, int]]]:
        """The ids of all pieces, and the parts of pictures among them: each with the first token that it has of it."""
        tokens, pictures, numbers = array("i"), list[tuple[Picture, int]](), Counter[str]()
        for piece in pieces:
            if isinstance(piece, Text):
                tokens.frombytes(piece.tokens.tobytes())
                continue
            parts = known[piece.id].parts
            number = numbers[piece.id] % len(parts)
            numbers[piece.id] += 1
            cuts = self._cuts(parts[number])
            for start, end in pairwise(cuts):
                key = f"{self._projector.identity} {piece.id} {number} {start}".encode()
                tokens += ids_of(key, end - start, end - start if len(cuts) > 2 else piece.n_positions)
                pictures.append((parts[number], start))
        if not tokens or tokens[-1] < 0:
            raise BadRequest(f"{where}: a prompt cannot end with a picture or a sound; write something behind it")
        return tokens, pictures

    def _cuts(self, picture: Picture) -> list[int]:
        """Where a picture is cut, its beginning and end included: streams go on between its parts."""
        tokens, parts = picture.n_tokens, 1
        if self._projector.can_be_cut(picture):
            parts = -(-tokens // PART_TOKENS)
        return [tokens * each // parts for each in range(parts + 1)]

    def _check(self, picture: Picture, where: str) -> None:
        tokens, most = picture.n_tokens, min(MAX_TOKENS, self._context.n_ctx_seq)
        if not LEAST_TOKENS <= tokens <= most:
            raise BadRequest(
                f"{where}: a picture or a sound of {tokens:,} tokens; from {LEAST_TOKENS} to {most:,} can be read"
            )
        if self._projector.attends_both_ways(picture) and tokens > self._context.n_ubatch:
            most = self._context.n_ubatch
            raise BadRequest(f"{where}: a picture takes {tokens:,} tokens in one batch, and --n-ubatch is {most:,}")

    def close(self) -> None:
        """End the child process."""
        self._decoder.close()


def _where(request: Request) -> str:
    """The field that errors name which are about all of the request's pictures."""
    return "messages" if request.prompt is None else "prompt"
