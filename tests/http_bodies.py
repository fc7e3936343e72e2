"""What each endpoint of HTTP reads its body as, for tests that go over all of them."""

from __future__ import annotations

from typing import Any

import attrs

from uma.contracts.health import HealthCheckPayload
from uma.http import (
    anthropic,
    batches,
    decisions,
    llama_server,
    llama_server_completion,
    llama_server_embeddings,
    ollama,
    ollama_embeddings,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    openai_transcriptions,
    router,
    running,
    systemone,
    vllm_scores,
)
from uma.http.page.endpoints import AnswerBody


@attrs.frozen
class NoBody:
    """None is read."""


RERANK = llama_server_embeddings.RerankBody
BODIES: dict[str, type[Any]] = {
    "/v1/chat/completions": openai_chat.ChatBody,
    "/v1/chat/completions/input_tokens": openai_chat.Conversation,
    "/v1/responses/input_tokens": openai_responses.ResponsesBody,
    "/v1/completions": openai_completions.CompletionBody,
    "/v1/embeddings": openai_embeddings.EmbeddingsBody,
    "/v1/responses": openai_responses.ResponsesBody,
    "/v1/audio/transcriptions": openai_transcriptions.TranscriptionBody,
    "/v1/messages": anthropic.MessagesBody,
    "/v1/messages/count_tokens": anthropic.Conversation,
    "/api/chat": ollama.ChatBody,
    "/api/generate": ollama.GenerateBody,
    "/api/embed": ollama_embeddings.EmbedBody,
    "/api/embeddings": ollama_embeddings.EmbeddingsBody,
    "/api/show": ollama_models.NameBody,
    "/api/pull": ollama_models.PullBody,
    "/api/copy": NoBody,
    **dict.fromkeys(("/models/load", "/models/unload"), router.RouterBody),
    "/health/check": HealthCheckPayload,
    **dict.fromkeys(("/completion", "/completions"), llama_server_completion.CompletionBody),
    "/infill": llama_server_completion.InfillBody,
    "/tokenize": llama_server.TokenizeBody,
    "/detokenize": llama_server.DetokenizeBody,
    "/apply-template": openai_chat.Conversation,
    **dict.fromkeys(("/embedding", "/embeddings"), llama_server_embeddings.EmbeddingBody),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), RERANK),
    "/v1/decisions": decisions.DecisionsBody,
    "/v1/systemone": systemone.SystemOneBody,
    **dict.fromkeys(("/score", "/v1/score"), vllm_scores.ScoreBody),
    "/v1/chat/completions/control": running.ControlBody,
    "/v1/batches": batches.BatchBody,
    **dict.fromkeys(("/v1/files", "/v1/batches/{id}/cancel"), NoBody),
    **dict.fromkeys(("/v1/requests/{id}/answer", "/ui/api/answers/{token}/answer"), NoBody),
    "/ui/api/answers": AnswerBody,
}
"""By path."""
