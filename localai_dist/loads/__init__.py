"""
Cold loads: a model that is asked for and not loaded gets loaded once, however many ask, wherever.

Reading order (the first seven are pure)::

    budget.py     how long each part may take;  status.py  what can be said about a load;  speed.py  rates and estimates
    errors.py     what a caller may be told;    cause.py   the cause of a failure, in and out of the row
    options.py    configuration -> LoadModel;  lack.py  who loads what every frontend lacks something of
    rows.py       rows as values;  table.py  the job rows (store/sql/load_jobs.sql);  endings.py  how loads ended
    fleet.py      registry rows -> placement facts;  tools.py  the seams;  placing.py  the node of one attempt
    stop.py       ending exactly one process;  room.py  the slot of an older replica;  cancel.py  what a cancel leaves
    steps.py      the work on one node;  job.py  one attempt: hold, heartbeat, fence
    flight.py     the waiters of one model;  watch.py  a load that another frontend runs
    lookout.py    orphans, offered jobs, cancelled jobs without an owner
    retire.py     replicas of older configurations;  leftovers.py  unfinished files of deleted models
    tables.py     what of all this is in the database
    unload.py     taking replicas off
    service.py    Loads: ensure, status, jobs, cancel, unload

    ensure ─▶ warm replica? ─yes─▶ it
                 │ no
              Flight (one per model and frontend) ─▶ claim the row
                 ├─ ours:   LoadJob: files here? ─▶ place ─▶ install ─▶ stage ─▶ LoadModel ─▶ replica row in
                 │             └─ no: offer it to the frontends that have them
                 └─ theirs: look at the row twice a second
                              ─▶ gone: warm, or cancelled · failed: the cause · orphaned: claim it
"""
