"""Which models can be loaded from here, by which names: the built-in one, those of all places, and any path."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from uma.chat.families import shows_tools, thinking_of
from uma.config import BUILTIN
from uma.constraints import is_utf8
from uma.errors import ModelError, UnknownModel
from uma.gguf import Glance, glance
from uma.llama import header
from uma.llama.builtin import builtin_path
from uma.llama.header import Header, file_type_name
from uma.models.names import NONE_HERE, meant, nearest_model, several_words
from uma.models.places import OLLAMA, UMA_MODELS, Found, find, folder_problem, quantization_of
from uma.models.projectors import Projectors, senses
from uma.types import EMBEDDINGS, RERANKER

WHOLE_TOKENS = 1_000_000
"""Maximum length of all vocabularies together with which the files' whole headers are read: half a second or less."""


@attrs.frozen
class ResolvedModel:
    """The file that a model's name stands for."""

    path: Path
    is_builtin: bool


@attrs.frozen
class ModelFile:
    """A model that can be loaded by its `name`, as its header describes it; or the `problem` that is in the way."""

    name: str
    path: Path
    size_bytes: int
    """Size of all parts together."""
    place: str
    """`UMA_MODELS`, `Hugging Face`, `LM Studio`, `Ollama`, or `builtin`."""
    kind: str = ""
    """`dense`, `MoE`, `hybrid`, `recurrent`, `embeddings` or `reranker`, and `sliding window` where it has one."""
    quantization: str = ""
    context_length: int = 0
    architecture: str = ""
    parameters: int = 0
    """0 where only the beginning of the header was read."""
    problem: str | None = None
    is_sound: bool = True
    """Whether the file is whole; one with another `problem` holds no model."""
    also: tuple[str, ...] = ()
    """Other whole names of it."""
    projector: Path | None = None
    """What it sees or hears by (mmproj file), where one that fits it lies beside it."""
    vision: bool = False
    """Whether it sees pictures, by its projector."""
    thinks: bool = False
    """Whether its chat template knows of thinking; not where only the beginning of the header was read."""
    is_base: bool = False
    """Whether it has no chat template; not where only the beginning of the header was read."""
    has_tools: bool = False
    """Whether its chat template tells it of tools; not where only the beginning of the header was read."""


def resolve(model: str, environ: Mapping[str, str], others: Iterable[str] = ()) -> ResolvedModel:
    """The file for `builtin`, a path, or a name of any place, with or without `.gguf`, in any case, with or without
    what stands before a `/`, or as much of its beginning as tells it from the others.

    A path that exists wins over a name, a whole name over a beginning. Raises `ModelError` naming what was looked for,
    and what is near it: a server's models count as `others`.
    """
    if not model.strip():
        raise ModelError("the model's name is empty; name a GGUF file, a model that `uma models` lists, or builtin")
    if not is_utf8(model):
        raise ModelError(f"{model!r}: the path is no UTF-8; rename the file, or its folder")
    if model == BUILTIN:
        return ResolvedModel(builtin_path(), is_builtin=True)
    path = Path(model).expanduser()
    if _is_there(path):
        return ResolvedModel(path, is_builtin=False)
    return ResolvedModel(named(model, environ, others).path, is_builtin=False)


def _is_there(path: Path) -> bool:
    """Whether there is such a file, or one that cannot be looked at, which loading it tells."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        return path.is_absolute() and getattr(error, "errno", None) in _UNTOLD
    return True


_UNTOLD = (errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP)


def named(model: str, environ: Mapping[str, str], others: Iterable[str] = ()) -> Found:
    """The one file that a name stands for, as `resolve`. Raises `UnknownModel` where there is none, or several."""
    found = find(environ)
    matching = _distinct(meant(model, {model_found: (model_found.name, *model_found.also) for model_found in found}))
    if len(matching) == 1:
        return matching[0]
    shown = _short_names(found)
    if matching:
        raise UnknownModel(f"{model}: {several_words(sorted(shown[match] for match in matching))}")
    near = nearest_model(model, (*shown.values(), *(model_found.name for model_found in found), BUILTIN, *others))
    problem = folder_problem(environ)
    pull = f"; `uma pull {model}` gets it" if _REPOSITORY.fullmatch(model) else ""
    other = near + pull or "; `uma models` tells what is here, `uma pull OWNER/NAME` gets others"
    hint = f"; {problem}" if problem else other
    raise UnknownModel(f"{model}: {NONE_HERE}, and no such file{hint}")


_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.gguf)(:[\w.-]+)?", re.ASCII | re.IGNORECASE)
"""A name that can be a repository of Hugging Face's, with a tag or without."""


def short_name(path: Path, environ: Mapping[str, str]) -> str:
    """What `uma models` lists a file by that has just come; its path where it lists it not."""
    shown = _short_names(find(environ))
    return next((name for model, name in shown.items() if model.path == path), str(path))


def _distinct(found: Iterable[Found]) -> list[Found]:
    """Without further copies: files of one name and size that two places have, or several revisions."""
    return list(
        {
            (model_found.path.name.casefold(), _size(model_found.path)): model_found
            for model_found in reversed(list(found))
        }.values()
    )


def _short_names(found: list[Found]) -> dict[Found, str]:
    """What each is listed by: its own name alone, where no other has it. In `UMA_MODELS` and of Ollama, all of it."""
    short = {model: model.name.rpartition("/")[2] for model in found}
    used = Counter(name.casefold() for name in short.values())
    return {
        model: model.name if used[name.casefold()] > 1 or model.place in (UMA_MODELS, OLLAMA) else name
        for model, name in short.items()
    }


def available(
    environ: Mapping[str, str], places: Iterable[str] | None = None, *, is_thorough: bool = False
) -> list[ModelFile]:
    """The built-in model and those of all places, or of some, by name. A file that is no model is listed with its
    problem.

    Where the vocabularies are few the whole headers are read, which shows a file that is cut short at its end;
    otherwise (see `WHOLE_TOKENS`) the beginnings alone, but for `is_thorough`.
    """
    found = find(environ)
    chosen = [(model, name) for model, name in _short_names(found).items() if places is None or model.place in places]
    glances = [glance(model.path) for model, _ in chosen]
    is_few = is_thorough or sum(glanced.n_tokens for glanced in glances if glanced is not None) <= WHOLE_TOKENS
    look = Projectors()
    return [
        described(BUILTIN, builtin_path(), BUILTIN),
        *(
            attrs.evolve(
                described(name, model.path, model.place, look)
                if is_few or seen is None
                else _glanced(name, model, seen, look),
                also=(model.name, *model.also),
            )
            for (model, name), seen in zip(chosen, glances, strict=True)
        ),
    ]


def described(name: str, path: Path, place: str = "", look: Projectors | None = None) -> ModelFile:
    """A model's file, by the whole headers of all parts. `look` has found the projectors of others."""
    try:
        parts = header.read_parts(path)
    except ModelError as error:
        return ModelFile(name, path, _size(path), place, problem=error.message, is_sound=False)
    first, size = parts[0], sum(part.size_bytes for part in parts)
    if (problem := _no_model(parts)) is not None:
        return ModelFile(name, path, size, place, problem=f"{path}: {problem}")
    template, kind = str(first.metadata.get("tokenizer.chat_template", "")), kind_of(first.metadata)
    model = ModelFile(
        name=name,
        path=path,
        size_bytes=size,
        place=place,
        kind=kind,
        thinks=thinking_of(template) is not None,
        is_base=not template and kind not in (EMBEDDINGS, RERANKER),
        has_tools=shows_tools(template),
        quantization=first.quantization,
        context_length=first.context_length,
        architecture=first.architecture,
        parameters=sum(part.parameters for part in parts),
    )
    return _with_projector(model, first.metadata, look or Projectors())


def _with_projector(model: ModelFile, metadata: Mapping[str, Any], look: Projectors) -> ModelFile:
    if model.place == BUILTIN or model.kind in (EMBEDDINGS, RERANKER):
        return model
    projector = look.of(model.path, metadata)
    return model if projector is None else attrs.evolve(model, projector=projector, vision=senses(projector)[0])


def _glanced(name: str, found: Found, seen: Glance, look: Projectors) -> ModelFile:
    """What the beginning of the first part's header tells."""
    metadata, path = seen.metadata, found.path
    # Of an array a glance has the length alone; this one can be long where no figure in it is large.
    if (impossible := header.impossible_figure(metadata, {"expert_used_count": ()})) is not None:
        return ModelFile(
            name, path, _size(path), found.place, problem=f"{path}: {header.DAMAGED}{impossible}", is_sound=False
        )
    count = max(1, int(metadata.get("split.count", 0)))
    parts = [path] if count == 1 else [header.part_path(path, at + 1, count) for at in range(count)]
    missing = next((part for part in parts if not os.path.exists(part)), None)
    problem = _OTHER_KINDS.get(str(metadata.get("general.type")), None if seen.n_tensors else _NO_WEIGHTS)
    if missing is not None:
        problem = f"its part {missing.name} is missing"
    architecture = str(metadata.get("general.architecture", "unknown"))
    model = ModelFile(
        name=name,
        path=path,
        size_bytes=sum(map(_size, parts)),
        place=found.place,
        kind=kind_of(metadata),
        quantization=file_type_name(metadata.get("general.file_type")) or quantization_of(found.name),
        context_length=int(metadata.get(f"{architecture}.context_length", 0)),
        architecture=architecture,
        problem=None if problem is None else f"{path}: {problem}",
        is_sound=missing is None,
    )
    return _with_projector(model, metadata, look)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def kind_of(metadata: Mapping[str, Any]) -> str:
    """What kind of model a header describes, in a word or two (see `ModelFile.kind`)."""
    architecture = str(metadata.get("general.architecture"))

    def number(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}", 0)
        return int(value) if isinstance(value, (int, float)) else 0

    if number("pooling_type") == _RANK:
        return RERANKER
    if number("pooling_type") or metadata.get(f"{architecture}.attention.causal") is False:
        return EMBEDDINGS
    words = []
    if any(number(key) for key in _STATE_KEYS):
        words.append("hybrid" if number("attention.head_count_kv") or number("shortconv.l_cache") else "recurrent")
    if number("expert_count"):
        words.append("MoE")
    if not words:
        words.append("dense")
    if number("attention.sliding_window"):
        words.append("sliding window")
    return ", ".join(words)


_RANK = 4
"""llama.cpp's pooling type of models that score a text."""
_STATE_KEYS = ("ssm.conv_kernel", "ssm.inner_size", "shortconv.l_cache", "wkv.head_size", "kda.head_dim")
"""Figures that only recurrent layers have."""
_OTHER_KINDS = {
    "adapter": "is a LoRA adapter, not a model; it is loaded with its own: --model NAME --lora NAME=FILE",
    "mmproj": "is a projector for images, a part of a model that reads them",
    "imatrix": "is an importance matrix for quantizing, not a model",
}
"""What `general.type` says of GGUF files that hold no model."""
_NO_WEIGHTS = "holds a vocabulary and no weights, so there is nothing to compute with"
MAX_BROKEN = 5
"""Maximum broken files that are told of; of more the number."""


def broken(files: Iterable[ModelFile]) -> list[str]:
    """What is wrong with files that are damaged or incomplete, unlike those that hold no model."""
    found = [file.problem for file in files if file.problem is not None and not file.is_sound]
    more = len(found) - MAX_BROKEN
    return [*found[:MAX_BROKEN], *([f"{more:,} more broken files: `uma models` lists them"] if more > 0 else [])]


def _no_model(parts: list[Header]) -> str | None:
    """Why sound files do not make a model that generates text, or None."""
    kind = _OTHER_KINDS.get(str(parts[0].metadata.get("general.type")))
    if kind is None and not any(part.parameters for part in parts):
        return _NO_WEIGHTS
    return kind
