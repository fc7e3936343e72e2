"""UMA as RustInfer's engine: its messages (protocol 1.0) on a ZeroMQ ROUTER socket."""
