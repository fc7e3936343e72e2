"""The version, for the package, the command and the wire: written here and nowhere else."""

__version__ = "0.3.0"
