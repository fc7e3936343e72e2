"""A generation asked for: its prompt, tools and targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Json, Length, Range, Text, check
from uma.errors import WrongValues
from uma.types.fields import MAX_MEMBERS, tuple_or_none
from uma.types.sampling import SamplingParams
from uma.wrong import Wrong

Role = Literal["system", "user", "assistant", "tool"]
ReasoningMode = Literal["auto", "on", "off"]
ModelName = Annotated[str, Length(1, 256), Text()]
Pace = Literal["auto", "off"]
"""Whether tokens decoded ahead are delivered evenly."""
Truncation = Literal["off", "auto", "compact"]
"""What happens to a conversation that does not fit the context."""
SUMMARY_HEADING = "Summary of our conversation so far:"
"""What stands before a summary, in the first question that the model is given with it."""


@attrs.frozen
class ToolCall:
    """One call of a tool, as a model made it."""

    id: Annotated[str, Length(1, 128), Text()]
    name: Annotated[str, Length(1, 128), Text()]
    arguments: Annotated[str, Text()]
    """A JSON object, as the model wrote it."""

    def __attrs_post_init__(self) -> None:
        check(self)


MAX_MEDIA = 64
"""Maximum pictures and sounds of one request, those of earlier turns included."""
MAX_TOOLS = 512
"""Maximum tools of one request."""
MAX_MEDIA_CHARS = 28_000_000
"""Longest base64 of a file: some 20 MiB."""


@attrs.frozen
class Media:
    """A picture or a sound in a message or a prompt; its file's first bytes tell which. It has one of `data`, `url` and
    `path`.
    """

    data: Annotated[str, Length(0, MAX_MEDIA_CHARS)] = attrs.field(
        default="", repr=lambda data: f"<{len(data):,} characters>"
    )
    """The file (PNG, JPEG, GIF or BMP; WAV, MP3 or FLAC) as base64."""
    at: Annotated[int, Range(0)] = 0
    """How many characters of the message's content, or of the prompt, come before it."""
    url: Annotated[str, Length(1, 2_048), Text()] | None = None
    """Where it is fetched from, by http or https (`Capabilities.media_urls`)."""
    path: Annotated[str, Length(1, 4_096), Text()] | None = None
    """Absolute path of the file, on the server's socket alone. It must be the client's own."""

    def __attrs_post_init__(self) -> None:
        check(self)
        if [bool(self.data), self.url is not None, self.path is not None].count(True) != 1:
            raise WrongValues(Wrong("data", "expected one of data, url and path"))


def joined(parts: Sequence[str | Media]) -> tuple[str, tuple[Media, ...]]:
    """The text of a message's parts, and the media among them where they stand in it. Parts are lines, but for what
    stands beside a picture or a sound, as in llama-server.
    """
    text, media, was_media = "", list[Media](), True
    for part in parts:
        if isinstance(part, Media):
            media.append(attrs.evolve(part, at=len(text)))
        else:
            text += part if was_media else "\n" + part
        was_media = isinstance(part, Media)
    return text, tuple(media)


@attrs.frozen
class Message:
    """One turn of a conversation, for the model's chat template."""

    role: Annotated[str, Length(1, 64), Text()]
    content: Annotated[str, Text()]
    tool_calls: Annotated[tuple[ToolCall, ...], Length(0, 128, "calls")] = attrs.field(
        default=(), converter=tuple_or_none
    )
    """The calls that the assistant made in this turn."""
    tool_call_id: Annotated[str, Length(1, 128), Text()] | None = None
    """Id of the call whose result a message of role `tool` is."""
    name: Annotated[str, Length(1, 128), Text()] | None = None
    """Which tool's result it is."""
    reasoning: Annotated[str, Text()] | None = None
    """What the assistant thought before it answered, for templates that show thinking of earlier turns."""
    media: Annotated[tuple[Media, ...], Length(0, MAX_MEDIA, "files")] = attrs.field(
        default=(), converter=tuple_or_none
    )
    """Pictures and sounds that the content has, in their order (`Capabilities.vision`, `audio`)."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Tool:
    """A function that the model can call."""

    name: Annotated[str, Length(1, 128), Text()]
    description: Annotated[str, Text()] = ""
    parameters: Annotated[dict[str, Any], Json(le=65_536, members=MAX_MEMBERS)] | None = None
    """A JSON Schema of its arguments; None: it takes none."""
    strict: bool = False
    """Calls follow the schema in full, or the request is refused. Without it, where the model may choose, keywords that
    no grammar can keep to are left out of the grammar, not of the prompt, and named in the answer's warnings."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Slo:
    """Per-request latency targets; None: the engine's own target."""

    target_ttft_ms: Annotated[float, Range(gt=0)] | None = None
    """Time to first token."""
    target_tbt_ms: Annotated[float, Range(gt=0)] | None = None
    """Time between tokens. Faster ones are delivered several at a time, each at most two fifths of this target late."""

    def __attrs_post_init__(self) -> None:
        check(self)


class Priority(IntEnum):
    """Lanes: an interactive request goes before a normal one, a background one waits for both."""

    BACKGROUND = -1
    NORMAL = 0
    INTERACTIVE = 1


PROMPT_FIELDS = ("prompt", "messages", "token_ids")
"""A request gives exactly one of these."""


def prompt_problem(given: Sequence[str]) -> Wrong | None:
    """What is wrong with a request that gives these of `PROMPT_FIELDS`, or None."""
    if len(given) == 1:
        return None
    came = "these came: " + ", ".join(given) if given else "none was given"
    return Wrong("prompt", f"give exactly one of prompt, messages, token_ids; {came}")


@attrs.frozen
class AdapterScale:
    """How strongly a LoRA adapter takes part in a request."""

    id: Annotated[int, Range(0, 1_023)]
    """Index of the adapter among `Capabilities.adapters`."""
    scale: Annotated[float, Range(-1_000_000, 1_000_000)]

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Request:
    """A request for generated text. Exactly one of `prompt`, `messages`, `token_ids` is set (`ValueError` otherwise).

    `prompt` is a text that the model continues (BOS is added if the model needs it). `messages` are a conversation,
    which the model's chat template renders. `token_ids` are the tokens of a prompt, to which nothing is added.
    """

    id: Annotated[str, Length(1, 128)]
    prompt: Annotated[str, Text()] | None = None
    messages: Annotated[tuple[Message, ...], Length(1, None, "messages")] | None = attrs.field(
        default=None, converter=tuple_or_none
    )
    token_ids: Annotated[tuple[Annotated[int, Range(0)], ...], Length(1, None, "tokens")] | None = attrs.field(
        default=None, converter=tuple_or_none
    )
    media: Annotated[tuple[Media, ...], Length(0, MAX_MEDIA, "files")] = attrs.field(
        default=(), converter=tuple_or_none
    )
    """Pictures and sounds that `prompt` has, in their order; those of messages stand in these."""
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    """False: there are no `Token` events, and `Finished` has the whole text."""
    priority: Literal[-1, 0, 1] = 0
    slo: Slo = Slo()
    pace: Pace = "auto"
    """`auto`: while other prompts are prefilled, tokens decoded ahead are delivered evenly, `target_tbt_ms` apart at
    most. `off`: each as soon as it is computed."""
    cache_prompt: bool = True
    """False: the prompt is computed without the prefix cache, and is not put into it."""
    expects_more: bool = False
    """A hint for the cache: another request will continue from the end of this one, so keep it as if one had."""
    parse_special: bool = False
    """The spelling of a control token in `prompt` is that token, as in a text that a chat template has been applied to;
    BOS is added where the text does not begin with it. In text that others have written it lets them end a turn."""
    tools: Annotated[tuple[Tool, ...], Length(0, MAX_TOOLS, "tools")] = attrs.field(default=(), converter=tuple_or_none)
    """Functions that the model can call; with `messages` only. Its calls are separated from the text."""
    tool_choice: Annotated[str, Length(1, 128), Text()] = "auto"
    """`auto`, `none`, `required`, or the name of the tool that must be called. A grammar enforces it, and the schema of
    the arguments."""
    parallel_tool_calls: bool = True
    """False: the output ends with its first call."""
    reasoning: ReasoningMode | None = None
    """`auto`: text between the template's thinking marks is separated from the answer, and a grammar begins behind it.
    `on`: the same, and thinking is switched on where the template has a switch for it.
    `off`: separated too, but thinking is switched off where the template has a switch for it, and a grammar begins at
    once. None: thinking stays in the text, and a grammar begins at once."""
    chat_template_kwargs: Annotated[dict[str, Any], Json()] | None = None
    """Further variables of the chat template, by the names that it reads (`Capabilities.template_variables`)."""
    continue_final_message: bool = True
    """Messages that end with the assistant's have its text continued, and only what is new is given; false: another
    turn of the assistant begins. A message with calls is always followed by another turn."""
    truncation: Truncation = "off"
    """What happens if the conversation does not fit the context. `off`: it is refused (`PromptTooLarge`). `auto`: its
    oldest turns are left out, and `Finished.dropped_messages` counts their messages; instructions, tools and the last
    question stay. Space is kept for `max_tokens`, at most half of the context. `compact`: as `auto`, and the model
    writes a summary of the turns that are left out (`Finished.summary`). If that takes over a minute, there is no
    summary, and a warning says so."""
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""
    model: ModelName | None = None
    """The model that is asked, by its name; None: the session's, or the server's default. `model+NAME` is the model
    with its LoRA adapter of this name."""
    lora: Annotated[tuple[AdapterScale, ...], Length(0, 64, "adapters")] | None = attrs.field(
        default=None, converter=tuple_or_none
    )
    """LoRA adapters that it is computed with, and no others; None: the one that `model` names."""

    def placed_media(self, first: int = 0) -> Iterator[tuple[str, Media]]:
        """Each picture and sound, and where it stands: `media[0]`, or `messages[2].media[0]`, counted from the `first`
        message.
        """
        for at, media_file in enumerate(self.media):
            yield f"media[{at}]", media_file
        for index, message in enumerate(self.messages or (), -first):
            for at, media_file in enumerate(message.media):
                yield f"messages[{index}].media[{at}]", media_file

    def with_media(self, media: Iterable[Media]) -> Request:
        """A copy with other pictures and sounds."""
        given = iter(media)
        own = tuple(islice(given, len(self.media)))
        messages = [
            attrs.evolve(message, media=tuple(islice(given, len(message.media)))) for message in self.messages or ()
        ]
        return attrs.evolve(self, media=own, messages=messages or None)

    @property
    def continued(self) -> Message | None:
        """The assistant's message that the answer continues; None: a turn of its own begins."""
        if not self.messages or not self.continue_final_message:
            return None
        last = self.messages[-1]
        continues = last.role == "assistant" and not last.tool_calls and (last.content or last.reasoning)
        return last if continues else None

    def __attrs_post_init__(self) -> None:
        if problem := prompt_problem([name for name in PROMPT_FIELDS if getattr(self, name) is not None]):
            raise WrongValues(problem)
        check(self)
        if self.media and self.prompt is None:
            raise WrongValues(Wrong("media", "stands beside prompt alone; a message has its own"))
