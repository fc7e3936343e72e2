"""Several models in one server: a child process for each that is loaded, and what asks the one that a request names."""

from uma.supervisor.models import LoadedModels, budget_of, open_models

__all__ = ["LoadedModels", "budget_of", "open_models"]
