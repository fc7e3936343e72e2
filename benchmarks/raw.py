"""The baseline: `llama_decode` in a loop, and nothing else.

One process, no server, no scheduler, no text: all prompts in as few batches as they fit, then one token a stream and
call, the next token by argmax over all rows at once. Whatever serves the same streams through the same library can
only come near this, if its weights lie where these do. It uses the binding directly, so that it stays what it is
whatever UMA does; only the extra buffer types that UMA found to be faulty here are left out of it as well.

As a program it answers jobs, one JSON object a line on standard input, with results on standard output; so the model
is loaded once and rounds can alternate with other targets'. `--layout` chooses one KV buffer or one each. Weights are
mapped from their file, as llama.cpp does by itself, but with `--read-weights`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

import attrs
import llama_cpp
import numpy as np

from benchmarks.raw_mixed import MixedJob, MixedResult, run_mixed
from uma.llama import extra_buffers

N_BATCH, N_UBATCH = 2048, 512
"""Maximum tokens of a call, and of what is computed at once inside it: the defaults of llama.cpp's programs."""
MAX_AHEAD = 64
"""Steps of a stream before a piece: its reader has four seconds then, and no piece takes as long."""


@attrs.frozen
class Job:
    """Prompts read together, and how many tokens to generate after each."""

    prompts: list[list[int]]
    max_tokens: int
    common: list[int] = attrs.field(factory=list)
    """What all prompts begin with, besides: read once, before them."""


@attrs.frozen
class Result:
    """Seconds from the start of the job. `first_s` is when every stream had its first token."""

    first_s: float
    total_s: float
    decode_call_s: float
    """Time inside `llama_decode`, of `total_s`."""
    generated: int
    common_s: float = 0.0
    """When what all prompts begin with was read."""


@attrs.frozen
class StormJob:
    """Prompts read in pieces and answered, while a stream is to have a token every `pace_ms`, or with 0 has to wait for
    the end.
    """

    stream: list[int]
    """Its prompt, read before."""
    prompts: list[list[int]]
    piece_tokens: int
    pace_ms: float
    answer_tokens: int
    """Of each prompt; all but the last prompt's are computed before the next is read."""
    is_mixed: bool = False
    """The stream's tokens are computed in the batches of the pieces, one in each, and not ahead of them."""


@attrs.frozen
class StormResult:
    """Seconds until all prompts were read, and how late a token of the stream was at worst."""

    read_s: float
    first_read_s: float
    worst_gap_ms: float
    """Between two tokens of the stream, handed out evenly as far as they are there."""
    stream_tokens: int


@attrs.frozen
class RowsJob:
    """Decode steps of some rows each, in turn, behind as many prompts as there are sequences."""

    prompts: list[list[int]]
    batches: list[tuple[int, int]]
    """Rows whose next token is wanted, and rows of other sequences that only fill the batch up."""
    repeats: int


@attrs.frozen
class RowsResult:
    """Median milliseconds of each batch."""

    batch_ms: list[float]


@attrs.frozen
class PieceJob:
    """A piece of a prompt, read again and again behind the same tokens."""

    behind: list[int]
    piece: list[int]
    repeats: int


@attrs.frozen
class PieceResult:
    """Median milliseconds of the piece."""

    piece_ms: float


class RawDecoder:
    """Owns a model and a context for `streams` sequences; a context manager."""

    def __init__(
        self,
        model: Path,
        *,
        streams: int,
        n_ctx: int,
        is_unified: bool,
        threads: int,
        n_ubatch: int = N_UBATCH,
        is_read: bool = False,
    ) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        if is_read:
            model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        with extra_buffers.only(extra_buffers.chosen("auto")):
            self._model = llama_cpp.llama_load_model_from_file(str(model).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, streams, is_unified
        params.n_batch, params.n_ubatch = N_BATCH, n_ubatch
        params.n_threads = params.n_threads_batch = threads
        self._ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise RuntimeError(f"{model}: no context of {n_ctx} cells for {streams} streams")
        self._n_batch = int(llama_cpp.llama_n_batch(self._ctx))
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)
        self._decode_s = 0.0
        self._piece_s: dict[int, float] = {}
        """By its tokens, what the last piece of the last storm took."""
        size = self._n_batch
        self._token = np.ctypeslib.as_array(self._batch.token, (size,))
        self._pos = np.ctypeslib.as_array(self._batch.pos, (size,))
        self._logits = np.ctypeslib.as_array(self._batch.logits, (size,))
        np.ctypeslib.as_array(self._batch.n_seq_id, (size,))[:] = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_free_model(self._model)

    def run(self, job: Job) -> Result:
        """Read all prompts, then generate `max_tokens` in each stream."""
        self._decode_s = 0.0
        start = time.perf_counter()
        self._common(job)
        common_s = time.perf_counter() - start
        steps = self._steps(job)
        next(steps)
        first_s = time.perf_counter() - start
        for _ in steps:
            pass
        total_s = time.perf_counter() - start
        return Result(first_s, total_s, self._decode_s, len(job.prompts) * job.max_tokens, common_s)

    def generate(self, job: Job) -> Iterator[Any]:
        """The same, step by step: the next token of each stream, as an array."""
        self._common(job)
        yield from self._steps(job)

    def _common(self, job: Job) -> None:
        """Empty memory, and read in it what all prompts begin with."""
        memory = llama_cpp.llama_get_memory(self._ctx)
        llama_cpp.llama_memory_clear(memory, True)
        if job.common:
            self._prefill([job.common], 0)
            for stream in range(1, len(job.prompts)):
                llama_cpp.llama_memory_seq_cp(memory, 0, stream, -1, -1)

    def _steps(self, job: Job) -> Iterator[Any]:
        streams, behind = len(job.prompts), len(job.common)
        tokens = self._prefill(job.prompts, behind)
        yield tokens
        positions = np.array([behind + len(prompt) for prompt in job.prompts], dtype=np.int32)
        self._set_sequences(range(streams))
        self._logits[:streams] = 1
        for _ in range(job.max_tokens - 1):
            self._token[:streams] = tokens
            self._pos[:streams] = positions
            tokens = self._decode(streams, streams)
            yield tokens
            positions += 1

    def run_storm(self, job: StormJob) -> StormResult:
        """What any schedule can reach. A batch is expected to take as long as the last of its kind."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)
        self._prefill([job.stream], 0)
        expected_s = self._piece_s.get(job.piece_tokens, 0.0)
        given, first_read_s = _Given(job.pace_ms / 1000, time.perf_counter(), expected_s), 0.0
        row = len(job.stream)
        for number, prompt in enumerate(job.prompts, 1):
            for at in range(0, len(prompt), job.piece_tokens):
                piece = prompt[at : at + job.piece_tokens]
                for _ in range(MAX_AHEAD if job.pace_ms and not job.is_mixed else 0):
                    if given.lasts():
                        break
                    self.batch_of([(1, row + given.tokens, 0, 1)])
                    given.took(is_step=True)
                    if given.is_late:
                        break
                rows = [(token, at + index, number, 0) for index, token in enumerate(piece)]
                ends = at + len(piece) == len(prompt)
                rows[-1] = (*rows[-1][:3], int(ends))
                self.batch_of([(1, row + given.tokens, 0, 1), *rows] if job.is_mixed else rows)
                given.took(is_step=job.is_mixed)
            first_read_s = first_read_s or given.elapsed_s
            for at in range(job.answer_tokens - 1 if number < len(job.prompts) else 0):
                self.batch_of([(1, len(prompt) + at, number, 1)])
                given.waited()
        self._piece_s[job.piece_tokens] = given.piece_s
        return StormResult(given.elapsed_s, first_read_s, given.worst_gap_s * 1000, given.tokens)

    def run_mixed(self, job: MixedJob) -> MixedResult:
        """Prompts beside people's answers; see `raw_mixed`."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)
        return run_mixed(self, job)

    def run_rows(self, job: RowsJob) -> RowsResult:
        """What a batch takes by its number of rows, and whether rows that nothing is wanted of make it faster."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)
        self._prefill(job.prompts, 0)
        held = [len(prompt) for prompt in job.prompts]
        took_ms: list[list[float]] = [[] for _ in job.batches]
        for repeat in range(job.repeats + 1):
            for number, (wanted, filling) in enumerate(job.batches):
                rows = [(1, held[row], row, int(row < wanted)) for row in range(wanted + filling)]
                began = time.perf_counter()
                self.batch_of(rows)
                if repeat:  # the first touches memory
                    took_ms[number].append((time.perf_counter() - began) * 1000)
                # All sequences stay as long as they were: a batch is compared with others behind as many tokens.
                for row in range(wanted + filling):
                    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._ctx), row, held[row], -1)
        return RowsResult([median(each) for each in took_ms])

    def run_piece(self, job: PieceJob) -> PieceResult:
        """What reading a piece takes so deep in a prompt."""
        memory = llama_cpp.llama_get_memory(self._ctx)
        llama_cpp.llama_memory_clear(memory, True)
        behind, last = len(job.behind), len(job.piece) - 1
        if behind:
            self._prefill([job.behind], 0)
        rows = [(token, behind + at, 0, int(at == last)) for at, token in enumerate(job.piece)]
        took_ms: list[float] = []
        for _ in range(job.repeats):
            began = time.perf_counter()
            self.batch_of(rows)
            took_ms.append((time.perf_counter() - began) * 1000)
            llama_cpp.llama_memory_seq_rm(memory, 0, behind, -1)
        return PieceResult(median(took_ms))

    def batch_of(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Tokens with their positions, sequences, and whether logits are wanted."""
        part = np.array(rows, dtype=np.int32)
        count = len(part)
        self._token[:count], self._pos[:count], self._logits[:count] = part[:, 0], part[:, 1], part[:, 3]
        self._set_sequences(part[:, 2])
        self._decode(count, int(part[:, 3].sum()))

    def forget(self, sequence: int) -> None:
        """Remove a sequence from memory."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._ctx), sequence, -1, -1)

    def _prefill(self, prompts: Sequence[Sequence[int]], behind: int) -> Any:
        """Whole prompts, as many in a batch as fit (and long ones in pieces); the first token of each."""
        first = np.zeros(len(prompts), dtype=np.int32)
        rows: list[tuple[int, int, int, int]] = []
        for stream, prompt in enumerate(prompts):
            for pos, token in enumerate(prompt):
                rows.append((token, behind + pos, stream, pos == len(prompt) - 1))
        for at in range(0, len(rows), self._n_batch):
            part = np.array(rows[at : at + self._n_batch], dtype=np.int32)
            count = len(part)
            self._token[:count], self._pos[:count], self._logits[:count] = part[:, 0], part[:, 1], part[:, 3]
            self._set_sequences(part[:, 2])
            ends = part[part[:, 3] == 1, 2]
            first[ends] = self._decode(count, len(ends))
        return first

    def _set_sequences(self, streams: Any) -> None:
        for row, stream in enumerate(streams):
            self._batch.seq_id[row][0] = int(stream)

    def _decode(self, n_tokens: int, n_outputs: int) -> Any:
        self._batch.n_tokens = n_tokens
        start = time.perf_counter()
        code = llama_cpp.llama_decode(self._ctx, self._batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")
        if not n_outputs:
            llama_cpp.llama_synchronize(self._ctx)
        self._decode_s += time.perf_counter() - start
        if not n_outputs:
            return np.empty(0, dtype=np.int32)
        logits = llama_cpp.llama_get_logits(self._ctx)
        return np.ctypeslib.as_array(logits, (n_outputs, self._n_vocab)).argmax(axis=1)


class _Given:
    """The tokens that a stream was given, and when. One that is early is handed out when it is due."""

    def __init__(self, pace_s: float, began_s: float, piece_s: float) -> None:
        self._pace_s, self._began_s = pace_s, began_s
        self._due_s = self._last_s = began_s
        self._step_s = 0.0
        self.piece_s = piece_s
        """What the next piece is expected to take."""
        self._then_s = began_s
        self.tokens = 0
        self.worst_gap_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return self._then_s - self._began_s

    def lasts(self) -> bool:
        """Whether the next is not due before a piece and the step behind it have been computed."""
        return self._due_s >= self._then_s + self.piece_s + self._step_s

    @property
    def is_late(self) -> bool:
        """Whether the last step took so long that more of them would not help."""
        return self._step_s >= self._pace_s

    def waited(self) -> None:
        """A batch has ended that was nothing to the stream, and no piece."""
        self._then_s = time.perf_counter()

    def took(self, *, is_step: bool) -> None:
        """A batch has ended. One with a step of the stream gave it a token."""
        now_s = time.perf_counter()
        took_s, self._then_s = now_s - self._then_s, now_s
        if not is_step:
            self.piece_s = took_s
            return
        self._step_s = took_s
        self.tokens += 1
        handed_s = max(self._due_s, now_s)
        self.worst_gap_s = max(self.worst_gap_s, handed_s - self._last_s)
        self._last_s, self._due_s = handed_s, handed_s + self._pace_s


def _swallow(level: int, text: bytes, user_data: object) -> None:
    """llama.cpp's log: standard output belongs to the results."""


_quiet = llama_cpp.llama_log_callback(_swallow)
"""Kept here, for C holds no reference of its own."""


def _answer(
    decoder: RawDecoder, fields: dict[str, Any]
) -> Result | StormResult | MixedResult | RowsResult | PieceResult:
    if "people" in fields:
        return decoder.run_mixed(MixedJob(**fields))
    if "piece" in fields:
        return decoder.run_piece(PieceJob(**fields))
    if "stream" in fields:
        return decoder.run_storm(StormJob(**fields))
    return decoder.run_rows(RowsJob(**fields)) if "batches" in fields else decoder.run(Job(**fields))


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The options of a program that `opened` makes a decoder for."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--n-ctx", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--layout", choices=("unified", "split"), required=True)
    parser.add_argument("--ubatch", type=int, default=N_UBATCH)
    parser.add_argument("--read-weights", action="store_true")
    return parser


def opened(args: argparse.Namespace) -> RawDecoder:
    """The decoder that these options ask for."""
    return RawDecoder(
        args.model,
        streams=args.streams,
        n_ctx=args.n_ctx,
        is_unified=args.layout == "unified",
        threads=args.threads,
        n_ubatch=args.ubatch,
        is_read=args.read_weights,
    )


def main() -> int:
    """Serve jobs until standard input ends."""
    with opened(arguments(__doc__).parse_args()) as decoder:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            fields = json.loads(line)
            print(json.dumps(attrs.asdict(_answer(decoder, fields))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
