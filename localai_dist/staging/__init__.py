"""
Model files onto nodes, however big: resumed, verified, and given up only for silence.

Reading order (the first three are pure)::

    hold.py       the deadline that progress extends
    plan.py       files, keys, pieces;  answers.py  what the worker's file server says
    errors.py     what ends a staging;  progress.py  counters
    hold_timer.py a hold on a clock
    reader.py     a file for worker threads;  source.py  a model's files;  digests.py  their hashes
    identity.py   what a file is called while it is hashed
    piece.py      the body of one PUT;  transient.py  what passes by itself
    upload.py     one file;  stager.py  all files of a model;  by_store.py  the same by way of an object store
    request_files.py  files of one request

    Stager.stage ─▶ Upload: hash ─▶ HEAD ─┬─ there: skip
                              ▲           ├─ verifying: ask again
                              │           └─ PUT pieces from the offset ─▶ 200 remote path
                              └── the way broke: pause, ask again, go on from what is there

A large file that nobody has hashed, of which the worker has nothing, is hashed while its pieces go (decision 0009).
"""
