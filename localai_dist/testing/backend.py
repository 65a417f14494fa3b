"""
The scriptable test backend: how it is installed and started.

It stands for "any unmodified program that speaks backend.proto": it is written against stubs generated when it is
installed, and imports nothing of this package. ``python -m localai_dist.testing.backend --install DIR`` writes it in
directory form (``run.sh``, ``metadata.json``), ``--gallery DIR`` a folder with ``index.yaml`` and the backend in it,
``--addr HOST:PORT`` runs it at once.

What it does is scripted by ``Options`` of LoadModel (the model YAML's ``options``), each ``test:name=value``:

=============  =====================================================================================================
delay          seconds before each token;  end_gate: a file it waits for before it ends, all tokens said
tokens         how many tokens it says (``token0 token1 ...``, default 10);  gate: a file it waits for before the second
answer         what it says instead, a word a token
deltas         a JSON list of replies instead, each a list of chat deltas as JSON: ``content``, ``reasoning_content``,
               ``tool_calls`` with ``index``, ``id``, ``name``, ``arguments``; Predict says all of them in one reply
reply_bytes    says this many bytes instead, in pieces of ``piece_bytes`` (default 64 KiB)
dim            size of its embeddings (default 4)
error_at       aborts with INTERNAL and the text of ``error`` at this token (from 1)
die_at         the process ends at this token (from 1)
load           ``ok``, ``fail``, ``hang``, ``die``;  load_delay: seconds a load takes;  load_gate: a file it waits for
free           ``ok``, ``fail``, ``hang``
health         ``ok``, or anything else for a wrong answer
sigterm        ``obey``, ``ignore``
transcribe     ``no``: it has no AudioTranscription; else the text is the size and hash of the recording, which it reads
events         file that gets a JSON line per event: load, start (with images, messages, tools, choice, grammar and
               hints, or with the recording and what was asked about it), done, cancelled (with the tokens said), free,
               sigterm
=============  =====================================================================================================
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

NAME: Final = "test-backend"
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_RUN: Final = """#!/bin/sh
# The scriptable test backend. Usage: run.sh --addr 127.0.0.1:PORT
here=$(cd "$(dirname "$0")" && pwd)
exec "${LOCALAI_BACKEND_PYTHON:-python3}" "$here/program.py" "$@"
"""


def install(folder: Path, *, name: str = NAME) -> Path:
    """
    Write the backend in directory form to ``folder`` (made if missing), its stubs freshly generated.

    Returns:
        The folder.

    Raises:
        RuntimeError: protoc refused the contract.
    """
    protoc: Any = importlib.import_module("grpc_tools.protoc")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_PACKAGE / "rpc" / "backend.proto", folder / "backend.proto")
    outputs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    if protoc.main(["protoc", f"-I{folder}", *outputs, "backend.proto"]) != 0:
        raise RuntimeError("protoc refused backend.proto")
    shutil.copyfile(_PACKAGE / "testing" / "backend_program.py", folder / "program.py")
    run = folder / "run.sh"
    run.write_text(_RUN)
    run.chmod(0o755)
    (folder / "metadata.json").write_text(json.dumps({"name": name, "version": "1"}) + "\n")
    return folder


def write_gallery(folder: Path, *, name: str = NAME) -> Path:
    """
    Write a gallery with this backend in it to ``folder``.

    Returns:
        Its ``index.yaml``.
    """
    install(folder / name, name=name)
    index = folder / "index.yaml"
    index.write_text(f"- name: {name}\n  uri: {name}\n  version: '1'\n")
    return index


def main() -> None:
    """Install, or run."""
    parser = argparse.ArgumentParser(
        prog="python -m localai_dist.testing.backend", description="scriptable test backend"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--install", type=Path, metavar="DIR", help="write the backend in directory form")
    what.add_argument("--gallery", type=Path, metavar="DIR", help="write a gallery index with the backend in it")
    what.add_argument("--addr", metavar="HOST:PORT", help="run it; port 0 = free, printed to stdout")
    options = parser.parse_args()
    if options.install:
        sys.stdout.write(f"{install(options.install)}\n")
    elif options.gallery:
        sys.stdout.write(f"{write_gallery(options.gallery)}\n")
    else:
        folder = install(Path(tempfile.mkdtemp(prefix="test-backend-")))
        program = [sys.executable, str(folder / "program.py"), "--addr", options.addr, "--remove", str(folder)]
        os.execv(sys.executable, program)


if __name__ == "__main__":
    main()
