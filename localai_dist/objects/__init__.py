"""
An object store that speaks the S3 API, as the other way of model files to nodes.

Reading order (the first two are pure)::

    bucket.py   where it is and who we are;  keys of objects
    signing.py  AWS Signature Version 4
    errors.py   what can go wrong
    body.py     an object's bytes as they arrive, bounded
    store.py    HEAD, ranged GET, PUT, and uploads in parts, over twisted.web's Agent

    frontend ── parts ──▶ bucket/localai-dist/sha256/<hash> ── ranged GET ──▶ worker
"""
