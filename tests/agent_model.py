"""A model that works as an agent: it calls the tool that it is asked to run, and says a word about the result.

It is a real Llama with the vocabulary of a real model, so that a prompt has as many tokens as with any other. Its layer
adds nothing: each token of its scripts is a direction of its own, and the output weights lead from each to the one
after it. The chat template decides which script it begins, by the token that the prompt ends with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

HEAD = 32
SURENESS = 16
"""Makes the next token of a script certain at any temperature."""
RUN = "RUN IT"
"""A question with these words is answered by a call."""
DONE, PLAIN, ENDLESS = "The file is made.", "There is nothing to do.", "TALK ON"
"""The answer to a result of a tool, and to anything else. A question with the last is talked about without an end."""

_TEMPLATE = """\
{% set say = namespace(next='<|plain|>') %}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% if m.role == 'assistant' %}{% set say.next = '<|plain|>' %}{% elif m.role == 'tool' %}\
{% set say.next = '<|done|>' %}{% elif m.role == 'user' and 'ENDLESS' in m.content %}{% set say.next = '<|endless|>' %}\
{% elif m.role == 'user' and 'RUN' in m.content %}CALLS{% endif %}{% endfor %}\
<|im_start|>assistant
{% if tools %}{{ say.next }}{% else %}<|plain|>{% endif %}"""
_CALL = """{% for tool in tools or [] if tool.function.name == 'NAME' \
and tool.function.parameters.required | length == COUNT %}{% set say.next = '<|call-NAME-COUNT|>' %}{% endfor %}"""


def command_of(tool: str) -> str:
    """The command that the tool is called with."""
    return f"echo by {tool} > made.txt"


def write_agent_model(
    path: Path, vocabulary: Path, calls: Collection[tuple[str, str]], *, context_length: int = 65_536
) -> Path:
    """Write a model to `path`, with the vocabulary of the one at `vocabulary`.

    `calls` has names of tools, and the arguments of each as JSON: all that it requires, with `%s` where the command
    stands. The one that is offered, and requires as many, is called.
    """
    scripts: dict[str, Sequence[str]] = {
        "<|done|>": ["The file", " is made."],
        "<|plain|>": ["There is nothing", " to do."],
        "<|endless|>": ["On and", " on and", " ever on,"],
        **{f"<|call-{name}-{len(json.loads(filled))}|>": _call(name, filled) for name, filled in calls},
    }
    reader = gguf.GGUFReader(vocabulary)
    key = gguf.Keys.Tokenizer
    tokens: list[str] = reader.fields[key.LIST].contents()
    types: list[int] = reader.fields[key.TOKEN_TYPE].contents()
    end: int = reader.fields[key.EOS_ID].contents()
    following: dict[int, int] = {}
    for begin, pieces in scripts.items():
        first = len(tokens)
        tokens += [begin, *pieces]
        types += [gguf.TokenType.CONTROL, *[gguf.TokenType.USER_DEFINED] * len(pieces)]
        following |= {token: token + 1 for token in range(first, len(tokens) - 1)}
        following[len(tokens) - 1] = first + 1 if begin == "<|endless|>" else end
    assert len(set(tokens)) == len(tokens), "a script has a token of the vocabulary"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(reader.fields[key.PRE].contents())
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(reader.fields[key.MERGES].contents())
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_add_bos_token(False)
    each = "".join(_CALL.replace("NAME", name).replace("COUNT", str(len(json.loads(filled)))) for name, filled in calls)
    writer.add_chat_template(
        _TEMPLATE.replace("CALLS", each).replace("'ENDLESS'", repr(ENDLESS)).replace("'RUN'", repr(RUN))
    )
    _add_weights(writer, len(tokens), following, context_length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _call(tool: str, arguments: str) -> list[str]:
    """In pieces that are this call's alone, and that end where the grammar leaves a choice."""
    text = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments % command_of(tool)}}}\n</tool_call>'
    begin = text.index(command_of(tool)) + len(json.loads(arguments))  # another one for each number of them
    return [text[:begin], text[begin:]]


def _add_weights(writer: gguf.GGUFWriter, n_vocab: int, following: Mapping[int, int], context_length: int) -> None:
    directions = {token: place for place, token in enumerate(following)}
    width = -(-len(directions) // HEAD) * HEAD
    writer.add_name("Agent")
    writer.add_context_length(context_length)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HEAD)
    writer.add_head_count(width // HEAD)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    embedding = np.zeros((n_vocab, width), np.float16)
    output = np.zeros((n_vocab, width), np.float16)
    for token, place in directions.items():
        embedding[token, place], output[following[token], place] = 1, SURENESS
    narrow = np.zeros((HEAD, width), np.float32)
    square: npt.NDArray[np.float32] = np.zeros((width, width), np.float32)
    ones = np.ones(width, np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", output)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    for name in ("q", "output"):
        writer.add_tensor(f"blk.0.attn_{name}.weight", square)
    for name in ("attn_k", "attn_v", "ffn_gate", "ffn_up"):
        writer.add_tensor(f"blk.0.{name}.weight", narrow)
    writer.add_tensor("blk.0.ffn_down.weight", narrow.T.copy())
