`localai-dist` shows and operates a cluster: `nodes`, `models`, `ops`, `doctor`, and `demo`, which runs a whole one on this machine.
