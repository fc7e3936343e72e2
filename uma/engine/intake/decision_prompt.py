"""Prompts of decisions: a question behind the state, rendered by the chat template, and the tokens of its labels.

The wording has a version, `types.decision.WORDING`. The state is rendered and tokenized once; each question is
tokenized alone behind it, if that gives the same tokens as the whole text. No text of a request is read as a special
token: a state that spells the end of a turn does not end one.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import zip_longest

import attrs

from uma.engine.intake.chat import ChatAbilities
from uma.engine.intake.pictures import PictureReader, SeenFile, placed
from uma.engine.intake.prompt import PromptReader
from uma.engine.intake.rendering import rendered
from uma.engine.intake.trained_form import TrainedForm
from uma.engine.kv.prefix_tree import common_length
from uma.engine.policy import labels
from uma.engine.policy.labels import AskedPrompt
from uma.engine.worker.sequence import PlacedPicture
from uma.errors import BadRequest, TemplateError
from uma.llama.model import Model
from uma.types import Message, Request
from uma.types.decision import DecisionQuestion, DecisionRequest, Option

MAX_NAME_TOKENS = 64
"""Maximum tokens of all names of a question for which names are used by default: each can need a row of logits."""
_QUESTION, _CUT = "\ufdd0", "\ufdd1"
"""Characters that no text has: for the question's place, or a cut in a special token's spelling."""
_NONE = "\ufffd"
"""Character that replaces these in a text, so that the places of its pictures stay."""
Speller = Callable[[str], labels.Path]
_ANSWER = "UMA reads the answer here"
_UNSAID = {"predicate": "Does this hold?", "choice": "Which option fits best?", "score": "Which level fits best?"}


@attrs.frozen(eq=False)
class DecisionPrompts:
    """All prompts of a decision."""

    state: array[int]
    """Common first tokens of all prompts; empty if questions change how the state is tokenized."""
    border: int
    """Number of first tokens of all prompts that belong to the state."""
    asked: Iterable[AskedPrompt]
    """Prompts, made one by one: making hundreds at once would take longer than a stream can wait."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures of the state, at the same positions in all prompts."""


@attrs.frozen(eq=False, slots=False)
class DecisionReader:
    """Makes the prompts of decisions for one model."""

    _model: Model
    _prompts: PromptReader
    _chat: ChatAbilities
    _pictures: PictureReader | None
    _with_files: Callable[[Request], Awaitable[Request]]
    """Replaces URLs of a request's pictures by their files."""

    @cached_property
    def _trained(self) -> TrainedForm | None:
        ids = partial(self._ids, begins=False)
        return TrainedForm(self._model, self._cut, ids) if self._model.header.decision_type else None

    async def read(self, request: DecisionRequest) -> DecisionPrompts:
        """The prompts of a request. Raises what `PromptReader.read` does."""
        self._prompts.check_bytes_of(*request.texts)
        conversation = await self._prompts.rewritten(self._chat.prepared, _conversation(request))
        read = partial(self._read, request)
        if any(conversation.placed_media()):
            if request.reproducible:
                raise BadRequest.at("reproducible", "pictures and sounds cannot be read so yet; leave it out")
            if self._trained is not None:
                raise BadRequest.at("messages", "pictures and sounds of decision models are not supported; send text")
            return await self._prompts.read_pictures(read, await self._with_files(conversation))
        chars = sum(map(len, request.texts))
        return await self._prompts.in_thread(partial(read, conversation), chars, request.priority)

    def _read(
        self, request: DecisionRequest, conversation: Request, next_file: Callable[[], None] | None = None
    ) -> DecisionPrompts:
        """The prompts, on any thread. `next_file` is given if the state has pictures: see `PictureReader.read`."""
        if self._trained is not None:
            every = list(self._trained.prompts(request))
            return DecisionPrompts(array("i"), min(common_length(every[0].tokens, one.tokens) for one in every), every)
        files = list[SeenFile]()
        if self._pictures is not None and next_file is not None:
            conversation, files = self._pictures.marked(conversation, next_file)
        front, behind, lead = self._frame(conversation)
        text = self._cut(question_text(request.questions[0], (), ()))
        whole = self._ids(front + text, files=files)
        # Trailing blank lines can merge into one token with what follows: they then belong to each question.
        for state_text in (front, front.rstrip()):
            state, rest = self._ids(state_text, files=files), front[len(state_text) :]
            border, ids = common_length(state, whole), partial(self._ids, begins=False)
            if state + ids(rest + text) == whole:
                break
        else:
            state, rest, ids = array("i"), front, partial(self._ids, files=files)
        asked = self._asked(request, lambda text: ids(rest + self._cut(text) + behind), self._speller(behind, lead))
        return DecisionPrompts(state, border, asked, placed(whole, files))

    def _frame(self, conversation: Request) -> tuple[str, str, str]:
        """The conversation as text before a question, text behind it up to the answer, and the spaces that the template
        writes before the answer, which belong to its first token.
        """
        messages = tuple(map(self._guarded, conversation.messages or ()))
        text = rendered(self._model.chat_template, attrs.evolve(conversation, messages=messages))
        before, mark, behind = text.removesuffix(_ANSWER).partition(_QUESTION)
        if not mark or not text.endswith(_ANSWER) or _QUESTION in behind:
            raise TemplateError("this model's chat template does not show a question as it is; ask another model")
        stripped = behind.rstrip(" ")
        return before, stripped, behind[len(stripped) :]

    def _guarded(self, message: Message) -> Message:
        calls = [attrs.evolve(call, arguments=self._cut(call.arguments)) for call in message.tool_calls]
        return attrs.evolve(message, content=self._cut(message.content), tool_calls=calls)

    def _cut(self, text: str) -> str:
        return self._specials.sub(lambda found: found[0][0] + _CUT + found[0][1:], text)

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """Spellings of special tokens."""
        vocab = self._model.vocab
        spellings = {vocab.text_of(token) for token in vocab.special_ids}
        longest = sorted((text for text in spellings if len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def _ids(self, text: str, *, begins: bool = True, files: Sequence[SeenFile] = ()) -> array[int]:
        """Tokens of a text, cut where a request spells a special token. `begins`: it is the beginning of a prompt.
        `files` are the pictures for its marks.
        """
        vocab, ids = self._model.vocab, array("i")
        adds = begins and self._model.chat_template.needs_bos(text)
        parts = self._pictures.parts_of(text, files) if files and self._pictures is not None else [text]
        for part, file in zip_longest(parts, files):
            for piece in part.split(_CUT):
                ids.frombytes(vocab.tokenize(piece, add_special=adds, parse_special=True).tobytes())
                adds = False
            if file is not None:
                ids += file.tokens
        return ids

    def _asked(
        self, request: DecisionRequest, ids: Callable[[str], array[int]], spelled: Speller
    ) -> Iterator[AskedPrompt]:
        """The prompts of all questions. `ids` gives a question's tokens behind the state."""
        for index, question in enumerate(request.questions):
            named = self._names(request, question, spelled)
            how = request.orders if request.orders != "auto" else "one" if named else "two"
            orders = labels.orders(max(2, len(question.options)), how if question.kind == "choice" else "one")
            codes = [] if named else self._codes(question, spelled)
            for order in orders:
                # Names move with their options; codes stay in their places.
                text = question_text(question, order, [code for code, _ in codes])
                spellings = [named[at] for at in order] if named else [[path] for _, path in codes]
                yield AskedPrompt(index, order, ids(text), spellings)

    def _names(self, request: DecisionRequest, question: DecisionQuestion, spelled: Speller) -> labels.Spellings:
        """Spellings of a question's options by their names; empty if codes are used."""
        if question.kind == "predicate":
            return [list(map(spelled, names)) for names in (("yes", "Yes"), ("no", "No"))]
        if request.labels == "codes":
            return ()
        found = [[spelled(option.label)] for option in question.options]
        is_short = request.labels == "names" or sum(len(path) for (path,) in found) <= MAX_NAME_TOKENS
        return found if is_short and labels.is_distinct(found) else ()

    def _codes(self, question: DecisionQuestion, spelled: Speller) -> list[tuple[str, labels.Path]]:
        """Codes by place, each with its tokens: those with the fewest."""
        count = len(question.options)
        texts = labels.codes(count) if question.kind == "choice" else tuple(map(str, range(count)))
        found = sorted(((text, spelled(text)) for text in texts), key=lambda code: len(code[1]))
        return sorted(found[:count])

    def _speller(self, behind: str, lead: str) -> Speller:
        """Gives the tokens of a label behind the prompt. It is tokenized with the text behind the last special token,
        because its first token depends on that; if both merge, alone.
        """
        tail = behind[max((found.end() for found in self._specials.finditer(behind)), default=0) :]
        before = self._plain(tail)

        @cache
        def spelled(label: str) -> labels.Path:
            whole = self._plain(tail + lead + label)
            return whole[len(before) :] if whole[: len(before)] == before else self._plain(lead + label)

        return spelled

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._model.vocab.tokenize(text, add_special=False, parse_special=False).tolist())


def _conversation(request: DecisionRequest) -> Request:
    """The state as a conversation that ends with an answer, with a mark for the question."""
    *before, last = (
        attrs.evolve(turn, content=turn.content.replace(_QUESTION, _NONE).replace(_CUT, _NONE))
        for turn in request.messages
    )
    if last.role == "user":
        last = attrs.evolve(last, content=f"{last.content}\n\n{_QUESTION}" if last.content else _QUESTION)
    else:
        before, last = [*before, last], Message("user", _QUESTION)
    return Request(id=request.id, messages=(*before, last, Message("assistant", _ANSWER)), reasoning="off")


def question_text(question: DecisionQuestion, order: Sequence[int], codes: Sequence[str]) -> str:
    """Text of a question behind the state; without `codes` the answer is a name."""
    lines = [f"Question: {question.instructions or _UNSAID[question.kind]}"]
    options = question.options or (Option("yes"), Option("no"))
    if question.kind == "predicate":
        options = tuple(attrs.evolve(option, label=name) for option, name in zip(options, ("yes", "no"), strict=True))
    shown = [f"{options[at].label}: {text}" if (text := options[at].description) else options[at].label for at in order]
    if codes:
        lines += [f"{code}: {text}" for code, text in zip(codes, shown, strict=True)]
        what = "letter of one option" if question.kind == "choice" else "number of one level"
        return "\n".join([*lines, f"Answer with the {what} only."])
    if any(option.description for option in options):
        lines += ["Options:", *(f"- {text}" for text in shown)]
    else:
        lines.append("Options: " + ", ".join(shown))
    return "\n".join([*lines, "Answer with one of these options only, exactly as it is written."])
