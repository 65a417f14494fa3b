"""A copy of a model file with another chat template."""

from __future__ import annotations

import struct
from pathlib import Path

TOOLS = (
    "{%- if tools %}{{- '<|user|><tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '</tools><|end|>' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}{%- if m.content %}{{- m.content }}{%- endif %}"
    '{%- for call in m.tool_calls %}{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|end|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|user|><tool_response>' + m.content + '</tool_response><|end|>' }}"
    "{%- else %}{{- '<|user|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""A template with a place for tools, their calls and their results, in the words of the tiny models."""

_KEY = b"tokenizer.chat_template"
_STRING = 8
_ALIGNMENT = 32


def with_template(model: Path, copy: Path, template: str = TOOLS) -> Path:
    """
    Write ``model`` to ``copy`` with ``template``; a comment pads it, so that the tensors stay aligned.

    Returns:
        The copy.
    """
    content = model.read_bytes()
    at = content.index(_KEY) + len(_KEY)
    kind, length = struct.unpack_from("<IQ", content, at)
    assert kind == _STRING
    text = template.encode()
    room = (length - len(text) - len("{##}")) % _ALIGNMENT
    text += b"{#" + b" " * room + b"#}"
    rest = content[at + 12 + length :]
    copy.write_bytes(content[:at] + struct.pack("<IQ", kind, len(text)) + text + rest)
    return copy
