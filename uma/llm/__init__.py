"""The synchronous way in, for scripts and notebooks: `LLM().generate(prompts)`.

An `LLM` keeps an engine on a Trio loop in a thread of its own, so it works wherever Python runs, also under a running
asyncio loop, and the model stays loaded between calls.
"""

from uma.llm.llm import LLM
from uma.llm.results import Completion, RequestOutput
from uma.llm.stream import LLMStream

__all__ = ["LLM", "Completion", "LLMStream", "RequestOutput"]
