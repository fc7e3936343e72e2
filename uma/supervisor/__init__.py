"""Several models in one server: a child process for each that is loaded, and what asks the one that a request names."""

from uma.supervisor.models import LoadedModels, check_models, open_models, shelf_of, too_large

__all__ = ["LoadedModels", "check_models", "open_models", "shelf_of", "too_large"]
