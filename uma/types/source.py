"""The one interface of everything that generates: `Source`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, runtime_checkable

from uma.errors import UmaError
from uma.types.decision import DecisionRequest, Decisions
from uma.types.embedding import Embeddings, EmbedRequest, Ranking, RerankRequest
from uma.types.events import Event, Token, Tokenized
from uma.types.explained import Explained
from uma.types.loading import LoadState
from uma.types.request import Request
from uma.types.server import Activity, Health, ListedModel, ServerInfo

MAX_KEEP_SEC = 86_400.0
"""How long a model is kept without a request for those who cannot pin; see `Models.using`."""


class EventStream(Protocol):
    """The events of a request: `Token`s, then exactly one `Finished`. With `echo` a `Prompt` comes first."""

    tap: Callable[[Token], bool] | None
    """Where set, it is called with each token as it comes, and returns whether it took the token. The iteration gives
    the tokens that it left, and the last event. It saves a task switch a token; it must neither wait nor raise."""

    ignored: tuple[str, ...]
    """Parts of the request that have no effect, by place, as far as that is known once the stream is there."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The stream is its own iterator."""

    async def __anext__(self) -> Event:
        """The next event. Raises an `UmaError` where the request failed. A cancelled wait loses no event."""

    def cancel(self) -> None:
        """End the request at the next token, and let the stream end with `Finished` of reason `cancelled`.

        This is for callers that want the last event and its usage; leaving `generate`'s block cancels without one.
        """

    def end_thinking(self) -> None:
        """Close the model's thinking with the next token, in all answers, so that the answer itself begins: thinking
        that comes later is closed at once. Nothing happens where the model does not think, or the request is over.
        """


@runtime_checkable
class Source(Protocol):
    """The interface that `Engine`, a model in this process, and `Client`, a session with a server, have in common.

    Call its methods only in the Trio thread that opened it.
    """

    @property
    def info(self) -> ServerInfo:
        """The model's card, its capabilities and its limits."""

    def generate(self, request: Request) -> AbstractAsyncContextManager[EventStream]:
        """`async with source.generate(request) as stream: async for event in stream: ...`

        Answer a request as a stream of events: `Token`s, then exactly one `Finished`. An error is raised as an
        `UmaError`, when the block is entered or from the iteration. Leaving the block cancels the request: by the next
        tick boundary its sequence and KV cells are freed.
        """

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Compute an embedding of each text. A cancelled call stops after the batch that runs.

        Raises `BadRequest` if the model has no embeddings, `PromptTooLarge` for a text that does not fit the context,
        and `Overloaded`.
        """

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Rank documents by how well they answer a query. Cancellation and errors are those of `embed`."""

    async def decide(self, request: DecisionRequest) -> Decisions:
        """Compute the probability of each answer to questions about one state, without generated text. A cancelled call
        stops after the batch that runs.

        Raises `BadRequest` if the model cannot answer, `PromptTooLarge`, `TemplateError` and `Overloaded`.
        """

    async def tokenize(self, request: Request, *, pieces: bool = False) -> Tokenized:
        """Tokenize a request's prompt as `generate` does; with `pieces` also return the bytes of each token.

        Raises the errors of `generate` for a wrong prompt.
        """

    async def health(self, *, probe: bool = True) -> Health:
        """Check whether the model can generate; with `probe` by generating one token."""

    async def metrics(self) -> Mapping[str, Any]:
        """Return all metrics: counters, gauges and histograms (`uma.metrics`) by name. With several models these are
        their sums, and `models` has those of each model. Never waits for compute.
        """

    async def activity(self, id: str = "") -> Activity:
        """Return the requests that run now, and how many wait. With `id` only those of this id, without what they wait
        for of other requests, which is not computed then. Never waits for compute.
        """

    async def explain(self, id: str = "") -> Explained:
        """Return where a request's time went: that of the newest request with this id, or of the newest of all. It
        runs, or is one of the last thousand. Raises `BadRequest` if there is none that the caller can ask about. Never
        waits for compute.
        """


class Download(Protocol):
    """A model that is fetched from the Hugging Face hub."""

    @property
    def digest(self) -> str:
        """Digest of its first file; empty while it is not known."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""

    @property
    def completed_bytes(self) -> int:
        """Bytes that are here."""

    def run(self) -> None:
        """Fetch it, in a thread of its own. Raises `UmaError`."""

    def stop(self) -> None:
        """Have `run` end as soon as the network lets it; the next download goes on where it was."""


class Models(Source):
    """Several models by their names, as a source that asks the one which a request names. A name is taken as far as it
    is needed; None is the default model's. `UnknownModel` is raised for one that is not here.
    """

    @abstractmethod
    def listed(self) -> Sequence[ListedModel]:
        """All of them, the default one first."""

    def gone(self) -> Sequence[ListedModel]:
        """Models that no request can name any more, as their files are gone, and which still have a process."""
        return ()

    @abstractmethod
    def find(self, model: str) -> ListedModel:
        """The one of this name."""

    @abstractmethod
    def using(
        self, model: str | None, keep_sec: float | None = None, id: str = ""
    ) -> AbstractAsyncContextManager[Source]:
        """A block in which a model is loaded. Entering it waits for that, and raises why it cannot be loaded. The
        request with this `id` is told of meanwhile.

        `keep_sec` is how long it stays from then on without a request (Ollama's `keep_alive`): 0: it leaves with its
        last one, also where that fails or is cancelled; infinite: as if pinned. None: as it was said last, at first as
        the server is configured.
        """

    @abstractmethod
    def loaded(self, model: str | None) -> Source | None:
        """A model that is loaded just now, to be asked about itself: it does not stay for that. None for any other."""

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[EventStream]:
        async with self.using(request.model, id=request.id) as source:
            entering = source.generate(request)
            del request  # with its files
            async with entering as stream:
                yield stream

    async def embed(self, request: EmbedRequest) -> Embeddings:
        async with self.using(request.model, id=request.id) as source:
            return await source.embed(request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        async with self.using(request.model, id=request.id) as source:
            return await source.rerank(request)

    async def decide(self, request: DecisionRequest) -> Decisions:
        async with self.using(request.model, id=request.id) as source:
            return await source.decide(request)

    async def tokenize(self, request: Request, *, pieces: bool = False) -> Tokenized:
        async with self.using(request.model, id=request.id) as source:
            return await source.tokenize(request, pieces=pieces)

    @abstractmethod
    async def load(self, model: str | None, keep_sec: float | None = None) -> ListedModel:
        """Have a model loaded, and wait for that. Raises as `using`."""

    @abstractmethod
    async def unload(self, model: str | None) -> ListedModel:
        """Have a model leave once the requests that run have ended, without waiting for that; later ones load it again.
        One that is being loaded leaves behind those that wait for it. Raises `BadRequest` where it is pinned.
        """

    @abstractmethod
    async def pin(self, model: str | None, *, is_pinned: bool = True) -> ListedModel:
        """Have a model loaded, and wait for that; it stays, whatever needs its memory, until this is taken back, and
        is loaded again where its process ends. Raises as `using`; then it is not pinned.
        """

    @abstractmethod
    def download(self, name: str) -> Download:
        """The download of what `uma pull` takes. Raises `BadRequest` for anything else, and where what comes would not
        be served.
        """

    @abstractmethod
    async def remove(self, model: str) -> None:
        """Take a model off the disk, as `uma rm` does. What runs with it comes to its end. Raises `BadRequest` where it
        is pinned or not UMA's to remove.
        """

    @abstractmethod
    async def look_again(self, *, is_changed: bool = False) -> None:
        """Take in what has come to the folders and left them, unless that was done a moment ago. `is_changed`: they
        have changed just now, by a download or a removal, so it has to be done.
        """

    @abstractmethod
    async def trace(self, seconds: float) -> str:
        """What the threads of all that are loaded do within so many seconds: JSON in Chrome's trace event format.

        Raises `BadRequest` where none is loaded, or a trace is on.
        """

    @abstractmethod
    async def card(self, model: str | None, *, loads: bool = True) -> ServerInfo:
        """What a model is. A model that was never loaded is loaded for that; without `loads` the card has no path and,
        where the model is named, what its file's header tells.
        """

    def load_of(self, model: str | None) -> LoadState | None:
        """How far the load is of a model that has to be waited for; None where it need not be."""
        try:
            found = self.listed()[0] if model is None else self.find(model)
        except (UmaError, IndexError):  # its file is gone or broken, which the request itself is told
            return None
        return None if found.state == "loaded" else found.load
