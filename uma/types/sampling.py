"""How the next token is chosen, what the output must look like, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import attrs

from uma.constraints import Json, Length, Range, Text, Values, check
from uma.errors import WrongKind, WrongValues
from uma.schema_of import schema_of
from uma.types.fields import MAX_MEMBERS, short_repr, tuple_of_strings, tuple_or_none
from uma.wrong import Wrong, nearest

DEFAULT_MAX_TOKENS = 4096
"""Maximum tokens of an answer where neither its request nor `--max-tokens` gives a number: it ends a model that never
stops by itself before it has filled the context."""
MAX_SEED = 2**32 - 1
MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_STOPS = 16

T = TypeVar("T")

Temperature = Annotated[float, Range(0, 2)]
Share = Annotated[float, Range(0, 1)]
TopK = Annotated[int, Range(-1)]
RepetitionPenalty = Annotated[float, Range(gt=0, le=2)]
Penalty = Annotated[float, Range(-2, 2)]


@attrs.frozen
class SamplerSettings:
    """How the next token is chosen, every figure given. The defaults are greedy: no step changes anything."""

    temperature: Temperature = 0.0
    top_p: Share = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is plain argmax over the logits, with no penalty to apply first."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.frequency_penalty == 0
            and self.presence_penalty == 0
        )


CHAT_SAMPLING: Mapping[str, float] = MappingProxyType({"temperature": 0.7, "top_p": 0.95})
"""Figures with which `uma chat`, `uma generate` and `LLM` draw where neither the request nor the operator nor the
model's file says how: small models repeat themselves where the likeliest token is always taken."""

SAMPLER_FIELDS = tuple(field.name for field in attrs.fields(SamplerSettings))
"""Fields of `SamplingParams` whose default is a setting of the engine (`RuntimeConfig` has one of each name)."""


GRAMMAR_FIELDS = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")
"""A grammar gives exactly one of these."""


@attrs.frozen
class Grammar:
    """The form that an answer must have. Exactly one of the fields is set (`ValueError` otherwise).

    The answer is complete if its finish reason is `stop`. If `max_tokens` cuts it, the reason is `length`.
    """

    json_schema: Annotated[dict[str, Any], Json(le=65_536, members=MAX_MEMBERS)] | None = None
    """A JSON Schema. The answer is JSON that validates against it, without white space between its parts."""
    json_object: Literal[True] | None = None
    """`true`: any JSON object."""
    regex: Annotated[str, Length(1), Text()] | None = None
    """A regular expression, in the syntax of Rust's `regex`, that matches the whole answer."""
    choice: Annotated[tuple[Annotated[str, Length(1), Text()], ...], Length(1, 10_000, "strings")] | None = attrs.field(
        default=None, converter=tuple_or_none
    )
    """The answer is one of these strings."""
    lark: Annotated[str, Length(1), Text()] | None = None
    """A context-free grammar in llguidance's form of Lark's notation."""
    gbnf: Annotated[str, Length(1), Text()] | None = None
    """A context-free grammar in llama.cpp's notation."""

    def __attrs_post_init__(self) -> None:
        check(self)
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            came = "these came: " + ", ".join(given) if given else "none was given"
            raise WrongValues(Wrong("grammar", f"give exactly one of {', '.join(GRAMMAR_FIELDS)}; {came}"))


if TYPE_CHECKING:

    @attrs.frozen(kw_only=True)
    class _GrammarInShort:
        """`Grammar`'s fields as keywords of a class, for type checkers: `_grammar_in_short` is what takes them."""

        json_schema: type | Mapping[str, Any] | None = None
        json_object: Literal[True] | None = None
        regex: str | None = None
        choice: Sequence[str] | None = None
        lark: str | None = None
        gbnf: str | None = None
else:
    _GrammarInShort = object


def _of_grammar(name: str) -> property:
    return property(lambda params: getattr(params.grammar, name, None))


def _grammar_in_short(cls: type[T]) -> type[T]:
    """Lets a class with a field `grammar` take `Grammar`'s fields in its place: `SamplingParams(regex="yes|no")`. The
    signature has them, and each reads as that field of `grammar`.
    """
    make, known = cls.__init__, {field.name for field in attrs.fields(cls)}  # type: ignore[arg-type]

    @wraps(make)
    def init(self: T, *args: Any, **fields: Any) -> None:
        short = {name: value for name in GRAMMAR_FIELDS if (value := fields.pop(name, None)) is not None}
        if "json_schema" in short:
            given = short["json_schema"]
            short["json_schema"] = schema_of(given) or given
            if not isinstance(short["json_schema"], dict):
                known_kinds = "a class of pydantic's or attrs', a dataclass, or a dict that is a JSON Schema"
                raise WrongValues(Wrong("json_schema", f"expected {known_kinds}, not {repr(given)[:100]}"))
        for name in fields:
            if name not in known:
                raise WrongKind(f"{cls.__name__}: {name} is no field of it{nearest(name, [*known, *GRAMMAR_FIELDS])}")
        if not isinstance(given := fields.get("grammar"), Grammar | None):
            what = f"expected a Grammar, not {repr(given)[:100]}"
            raise WrongKind(f"grammar: {what}; give one of {', '.join(GRAMMAR_FIELDS)} in its place")
        if short and fields.get("grammar") is not None:
            raise WrongValues(
                Wrong("grammar", f"{', '.join(short)} says what it must look like, too; give one of them")
            )
        make(self, *args, **(fields | {"grammar": Grammar(**short)} if short else fields))

    told = signature(make)
    more = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in GRAMMAR_FIELDS]
    init.__signature__ = told.replace(parameters=[*told.parameters.values(), *more])  # type: ignore[attr-defined]
    for name in GRAMMAR_FIELDS:
        setattr(cls, name, _of_grammar(name))
    cls.__init__ = init  # type: ignore[assignment]
    return cls


def _bias_by_name(bias: Mapping[int | str, float] | None) -> dict[str, float] | None:
    return bias if bias is None else {str(token): value for token, value in bias.items()}


NO_LIMIT = "; without it the engine's limit holds, and a number over what the context has left is cut to that"
"""What people mean by -1, which other programs take."""


@_grammar_in_short
@attrs.frozen(repr=False)
class SamplingParams(_GrammarInShort):
    """Parameters of sampling, and when an answer ends. Values are checked on construction (`ValueError`).

    The steps run in the order of llama.cpp's default chain: logit bias, grammar, penalties, DRY, top-n-sigma, top-k,
    typical-p, top-p, min-p, XTC, temperature, draw. Mirostat replaces all steps between DRY and the draw except
    temperature. A step with its default value is skipped. A parameter that is None is the engine's setting of the
    same name (`--temperature`), and greedy without one. `LLM` and the commands use the value of the model's file
    instead, or 0.7 for temperature and 0.95 for top_p.
    """

    max_tokens: Annotated[int, Range(0, hint=NO_LIMIT)] | None = None
    """Maximum tokens of an answer. None: the engine's limit, or 4,096 without one. 0: the prompt is only read."""
    min_tokens: Annotated[int, Range(0)] = 0
    """Minimum tokens before the model can end the answer. Stop strings still end it."""
    temperature: Temperature | None = None
    """Randomness of the choice. 0 is greedy: always the likeliest token."""
    top_p: Share | None = None
    """Keep the likeliest tokens whose probabilities together reach this sum (nucleus sampling); 1: all."""
    top_k: TopK | None = None
    """Keep the k likeliest tokens; 0 or -1: all."""
    min_p: Share | None = None
    """Keep the tokens with at least this fraction of the likeliest token's probability; 0: all."""
    repetition_penalty: RepetitionPenalty | None = None
    """Makes tokens within `penalty_window` less likely by this factor; 1: no penalty."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit for each time that it occurs within `penalty_window`."""
    presence_penalty: Penalty | None = None
    """Subtracted once from the logit of a token that occurs within `penalty_window`."""
    seed: Annotated[int, Range(0, MAX_SEED)] | None = None
    """Seed of the random choice. None: the engine draws one, which `Finished.seed` reports."""
    stop: Annotated[tuple[Annotated[str, Length(1, 1024)], ...], Length(0, MAX_STOPS, "strings")] = attrs.field(
        default=(), converter=tuple_of_strings
    )
    """Strings that end the answer. The string itself is not part of the answer."""
    ignore_eos: bool = False
    """Generate `max_tokens` tokens, also where the model would end earlier."""
    grammar: Grammar | None = None
    """The form that the answer must have. The answer ends where the grammar does, or at a stop string before that. The
    fields of `Grammar` can be given directly: `SamplingParams(json_schema={…})`. A schema can also be a class: of
    pydantic, of attrs, or a dataclass."""
    logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    """Number of likeliest tokens that are returned for each token, all with log probabilities. None: no log
    probabilities."""
    prompt_logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    """Alternatives for each prompt token except the first, in the `Prompt` event. The whole prompt is computed."""
    logit_bias: Annotated[dict[str, float], Length(0, 1024, "tokens"), Values(Range(-100, 100))] | None = attrs.field(
        default=None, converter=_bias_by_name
    )
    """Added to logits of tokens. A key is a token id in decimal digits, or a text, which means each of its tokens."""
    n: Annotated[int, Range(1, MAX_ANSWERS)] = 1
    """Number of answers to the prompt, which is prefilled once. Answer i has the seed `seed` + i."""
    best_of: Annotated[int, Range(1, MAX_ANSWERS)] | None = None
    """Answers that are generated; the `n` with the highest mean log probability are returned. Not with `stream`."""
    echo: bool = False
    """Return the prompt's text and tokens too, in a `Prompt` event before the first token."""
    penalty_window: Annotated[int, Range(0, 65_536)] = 64
    """Number of latest tokens, of prompt and answer, to which the three penalties above apply."""
    penalize_prompt: bool = True
    """False: these penalties count only tokens of the answer."""
    typical_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Keep the tokens nearest to the expected information that make up this probability; 1: all."""
    top_n_sigma: Annotated[float, Range(gt=0)] | None = None
    """Keep the tokens within so many standard deviations of the highest logit; None: all."""
    xtc_probability: Annotated[float, Range(0, 1)] = 0.0
    """Probability with which all tokens over `xtc_threshold` except the least likely one are dropped; 0: never."""
    xtc_threshold: Annotated[float, Range(0, 0.5)] = 0.1
    dynatemp_range: Annotated[float, Range(0, 2)] = 0.0
    """The temperature moves by as much as this up and down with the distribution's entropy; 0: it is fixed."""
    dynatemp_exponent: Annotated[float, Range(gt=0, le=10)] = 1.0
    mirostat: Literal[0, 1, 2] = 0
    """The version of Mirostat that draws; 0: none."""
    mirostat_tau: Annotated[float, Range(gt=0)] = 5.0
    """The surprise that Mirostat aims at, in bits."""
    mirostat_eta: Annotated[float, Range(gt=0, le=1)] = 0.1
    """How fast Mirostat corrects itself."""
    dry_multiplier: Annotated[float, Range(0, 100)] = 0.0
    """How strongly tokens that would go on repeating a passage are penalised (DRY); 0: not."""
    dry_base: Annotated[float, Range(1, 10)] = 1.75
    """Factor by which the penalty grows with each token of the passage."""
    dry_allowed_length: Annotated[int, Range(1, 65_536)] = 2
    """Passages up to this length are not penalised."""
    dry_window: Annotated[int, Range(0, 65_536)] = 4096
    """Tokens of prompt and output in which DRY looks for passages."""
    dry_sequence_breakers: Annotated[tuple[Annotated[str, Length(1), Text()], ...], Length(0, 64, "strings")] = (
        attrs.field(default=("\n", ":", '"', "*"), converter=tuple_of_strings)
    )
    """Strings that end a passage."""
    reproducible: bool = False
    """Compute the request apart from all others, in a context of its own and without cache, so that the same prompt,
    seed and settings give the same text whatever else runs or ran. Slower, and one such request at a time. Not with
    `echo` or `prompt_logprobs`."""
    max_reasoning_tokens: Annotated[int, Range(0)] | None = None
    """Maximum tokens of thinking in each answer, without its marks. At the maximum the closing mark is written, and the
    answer follows. A character that has begun is completed first. None: the engine's setting, which is no limit
    by default."""

    __repr__ = short_repr

    def __attrs_post_init__(self) -> None:
        check(self)
        if self.best_of is not None and self.best_of < self.n:
            raise WrongValues(Wrong("best_of", f"{self.best_of} answers cannot have the {self.n} best (n) among them"))

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values for these fields, which are checked as on construction. A field of `Grammar`
        replaces the whole `grammar`.
        """
        return attrs.evolve(self, **({"grammar": None} if changes.keys() & {*GRAMMAR_FIELDS} else {}) | changes)

    def over(self, defaults: SamplerSettings) -> SamplingParams:
        """Return a copy with these defaults for fields that are None, or `self` if that changes nothing."""
        told = {name: getattr(defaults, name) for name in SAMPLER_FIELDS}
        return self.with_suggested({name: value for name, value in told.items() if value != getattr(_NEUTRAL, name)})

    def with_suggested(self, figures: Mapping[str, float]) -> SamplingParams:
        """Return a copy with these values for fields that have their default, or `self` if that changes nothing."""
        unsaid: dict[str, Any] = {
            name: value for name, value in figures.items() if getattr(self, name) in (None, _DEFAULTS[name])
        }
        return attrs.evolve(self, **unsaid) if unsaid else self

    @property
    def drawn_answers(self) -> int:
        """Number of answers that are generated: `best_of`, or `n` without it."""
        return max(self.n, self.best_of or 1)

    @property
    def settled(self) -> SamplerSettings:
        """Settings of the sampler: these parameters, and for those that are None the value that changes nothing."""
        given = {name: value for name in SAMPLER_FIELDS if (value := getattr(self, name)) is not None}
        return SamplerSettings(**given)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is plain argmax over the logits, with no penalty to apply first."""
        return self.settled.is_greedy and self.dry_multiplier == 0


def _refuse(_self: SamplingParams, name: str, _value: Any) -> None:
    raise AttributeError(f"SamplingParams are not changed; params.replace({name}=…) returns a copy")


SamplingParams.__setattr__ = _refuse  # type: ignore[method-assign, assignment]  # attrs has its own for frozen classes
_NEUTRAL = SamplerSettings()
_DEFAULTS = {field.name: field.default for field in attrs.fields(SamplingParams)}
