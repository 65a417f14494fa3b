"""Rewrite the committed stubs from ``backend.proto``: ``python -m localai_dist.rpc.generate`` (needs grpcio-tools)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
PROTO: Final = "localai_dist/rpc/backend.proto"
STUBS: Final = ("backend_pb2.py", "backend_pb2.pyi", "backend_pb2_grpc.py")


def generated() -> dict[str, str]:
    """
    The stubs as they should be now: file name -> text.

    Raises:
        RuntimeError: the compiler refused ``backend.proto``; its own words went to stderr.
    """
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        command = ["protoc", f"-I{HERE.parent.parent}"]
        command += [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main([*command, PROTO]) != 0:
            raise RuntimeError("protoc refused backend.proto")
        return {name: (Path(folder) / PROTO).with_name(name).read_text() for name in STUBS}


def main() -> None:
    """Write the stubs beside ``backend.proto`` and name each on stdout."""
    for name, text in generated().items():
        (HERE / name).write_text(text)
        sys.stdout.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
