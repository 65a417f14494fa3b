"""
Inference backends that ship in the box; programs of their own, which import ``rpc`` and nothing else of ours.

``index.yaml`` is a gallery index: each entry's ``uri`` is a folder beside it. A folder is a backend in directory form,
as a worker installs it: ``run.sh`` (started with ``--addr 127.0.0.1:PORT``) and ``metadata.json``::

    index.yaml ── llama-cpp: llama_cpp/ ──▶ run.sh ──exec──▶ python -m localai_dist.backends.llama_cpp
"""
