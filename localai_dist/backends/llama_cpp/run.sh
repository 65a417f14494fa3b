#!/bin/sh
# Start the llama-cpp backend. Usage: run.sh --addr 127.0.0.1:PORT
#
# LOCALAI_BACKEND_PYTHON     interpreter that has localai-dist[llama]; the worker sets it to its own
# LOCALAI_GRPC_AUTH_TOKEN    the token callers must present
#
# exec: the backend must be the process its parent started, so that it ends with it.
exec "${LOCALAI_BACKEND_PYTHON:-python3}" -m localai_dist.backends.llama_cpp "$@"
