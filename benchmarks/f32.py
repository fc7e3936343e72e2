"""Real models with their weights as 32-bit floats: what is exact in a server shows in its answers, word for word.

Products of quantized weights take rounded inputs, and depend in the last digits on how many rows a batch has.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

from benchmarks.cache import cache_dir
from benchmarks.reference import RealModel, fetch_model


def f32_model(name: RealModel) -> Path:
    """The file, from the cache or written now. Raises as `fetch_model`."""
    path = cache_dir() / f"{name}-f32.gguf"
    if not path.exists():
        source = fetch_model(name)
        # Written beside and renamed, so that a run broken off leaves no half file under the real name.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        write_f32(partial, source)
        partial.rename(path)
    return path


def write_f32(path: Path, source: Path) -> None:
    """Write another file's model with its weights as 32-bit floats."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name not in ("general.architecture", "general.file_type") and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
