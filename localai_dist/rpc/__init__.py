"""
The gRPC contract of inference backends: ``backend.proto`` and the stubs generated from it, nothing else.

Reading order: ``backend.proto`` (package ``backend``, service ``Backend``), ``generate.py`` (rewrites the stubs; a test
proves they are current). ``backend_pb2.py``, ``backend_pb2.pyi`` and ``backend_pb2_grpc.py`` are generated::

    backend.proto ──generate──▶ backend_pb2        messages, used by frontend, worker and backends
                            └──▶ backend_pb2_grpc  servicer and stub, used by backends and tests only
"""
